"""Sources of documents, one module each; `open.open_source` chooses among them.

TensorFlow is imported only when a source that needs it is opened.
"""
