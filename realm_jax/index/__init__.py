"""How documents are found: embedding, search, candidates, and the index snapshots.

`snapshots.py` is how trainer and builder meet, `builder.py` the job that embeds the
corpus, `follower.py` the trainer's side, `candidates.py` what a step makes of what was
found.
"""
