"""Checks whether the libraries of the package's extras are installed.

`pip install realm_jax` installs what is needed to train, build an index and evaluate.
The libraries of the other commands are extras, listed in setup.py; this module lists
the modules by which they are recognised.
"""

import importlib.util
from collections.abc import Mapping, Sequence

from realm_jax.errors import BadInputError

MODULES: Mapping[str, Sequence[str]] = {
    "prepare": ("tensorflow", "seqio", "apache_beam", "tensorflow_datasets"),
    "scann": ("scann",),
    "serve": ("aiohttp",),
    "launch": ("google.cloud.tpu_v2", "kubernetes", "requests", "yaml"),
    "export": ("faiss", "pyarrow"),
    "gcs": ("google.cloud.storage", "gcsfs"),
}
"""Maps an extra to the modules imported for it."""


def require_extra(extra: str, purpose: str) -> None:
    """Checks, without importing them, that an extra's libraries are installed."""
    for module in MODULES[extra]:
        if not _is_installed(module):
            raise BadInputError(
                f"expected {module} for {purpose}, but it is not installed; run "
                f"pip install 'realm_jax[{extra}]'"
            )


def require_extra_of_url(url: str) -> None:
    """Checks that the libraries needed to read a URL are installed."""
    if url.startswith("gs://"):
        require_extra("gcs", url)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # A parent package is missing.
        return False
