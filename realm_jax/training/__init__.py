"""Training: the stages, the step they share, and everything around a step.

A stage (`warm_start.py`, `pretrain.py`, `finetune.py`) has its loop, which gathers the
inputs of each step; its loss (`pretrain_loss.py` and so on) combines models and
objectives; `step.py` is the update; `loop.py` is what the loops of all stages share.
"""
