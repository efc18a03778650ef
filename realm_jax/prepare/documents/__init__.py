"""Sources of documents, one module each; `open.open_source` finds the right one.

None of them imports TensorFlow before a source is opened that needs it.
"""
