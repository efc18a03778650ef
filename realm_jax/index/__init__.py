"""Document retrieval: embedding, search, candidates, and the index snapshots.

Trainer and builder communicate through `snapshots.py`; `builder.py` is the job that
embeds the corpus, `follower.py` the trainer's side, and `candidates.py` converts search
results to the input of a step.
"""
