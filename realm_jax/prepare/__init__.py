"""Prepares a corpus from text: documents, blocks, tagged spans, SeqIO tasks, examples.

This is the only package that imports TensorFlow, SeqIO and Apache Beam. Training,
search and evaluation read its output.
"""
