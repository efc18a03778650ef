"""Sources of documents, one module each; `open.open_source` finds the right one.

None of them imports TensorFlow before a source is opened that needs it.
"""

import os

# Files on gs:// are read by gcsfs whether or not TensorFlow is there: by TensorFlow's
# own client the same file would be another in a process that has imported it.
os.environ.setdefault("EPATH_USE_TF", "false")
