"""From text to a corpus: documents, blocks, tagged spans, SeqIO tasks and examples.

The only package that imports TensorFlow, SeqIO and Apache Beam. Whatever trains,
searches or answers reads what this one wrote.
"""
