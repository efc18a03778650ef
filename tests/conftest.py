"""What every test runs under."""

import os

# One thread pool a process is enough for tiny models, and keeps timings steady.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from jaxtyping import install_import_hook

# Shapes in signatures are checked at run time in tests, and only there.
install_import_hook("realm_jax.objectives", "beartype.beartype")
