"""Registers corpora and questions with SeqIO under names of your choice.

This module imports nothing, and realm_jax imports nothing of this package: the
implementation is in `realm_jax.prepare`, and a `tasks.py` of your own may replace it.
"""
