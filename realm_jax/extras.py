"""Extras of the package: what a trainer does without, and who says that it is missing.

`pip install realm_jax` brings what trains, builds an index and measures. The libraries
of the other commands are extras, which setup.py lists; these are the modules by which
they are recognised here.
"""

import importlib.util
from collections.abc import Mapping, Sequence

from realm_jax.errors import BadInputError

MODULES: Mapping[str, Sequence[str]] = {
    "prepare": ("tensorflow", "seqio", "apache_beam", "tensorflow_datasets"),
    "scann": ("scann",),
    "serve": ("aiohttp",),
    "launch": ("google.cloud.tpu_v2", "requests"),
    "gcs": ("google.cloud.storage", "gcsfs"),
}
"""Extra -> modules that are imported for its sake; nothing else needs them."""


def require_extra(extra: str, purpose: str) -> None:
    """Checks that the libraries of an extra are installed; imports none of them.

    Args:
      extra: a key of `MODULES`.
      purpose: what needs it, for the error.

    Raises:
      BadInputError: one is missing.
    """
    for module in MODULES[extra]:
        if not _is_installed(module):
            raise BadInputError(
                f"expected {module} for {purpose}, but it is not installed; run "
                f"pip install 'realm_jax[{extra}]'"
            )


def require_extra_of_url(url: str) -> None:
    """Checks that a file can be read where it is.

    Raises:
      BadInputError: it is on gs://, and the libraries for that are missing.
    """
    if url.startswith("gs://"):
        require_extra("gcs", url)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # A package that it is in.
        return False
