"""Retrieval-augmented language-model pre-training (REALM) in JAX."""

import os

__version__ = "0.2.0.dev0"

# Files on gs:// are read by gcsfs whether or not TensorFlow is there. By its own
# client the same file would be another in a process that has imported it, and Orbax
# would import it into every trainer.
os.environ.setdefault("EPATH_USE_TF", "false")
