"""How it learns: the stages, the step they share, and what surrounds a step.

A stage (`warm_start.py`, `pretrain.py`, `finetune.py`) gathers the inputs of each step;
`losses.py` joins models and objectives; `step.py` is the update; `loop.py` says what
happens between two updates, and in which order.
"""
