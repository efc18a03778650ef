"""Retrieval-augmented language-model pre-training (REALM) in JAX.

`load` opens a fine-tuned model, `open_corpus` a prepared corpus: see `realm_jax.api`.
"""

import os
from typing import TYPE_CHECKING, Any

from realm_jax.errors import BadInputError

if TYPE_CHECKING:
    from realm_jax.api import (
        Answer,
        Document,
        Model,
        ReadDocument,
        load,
        open_corpus,
    )

__version__ = "0.2.0.dev0"

# Files on gs:// are read by gcsfs whether or not TensorFlow is there. By its own
# client the same file would be another in a process that has imported it, and Orbax
# would import it into every trainer.
os.environ.setdefault("EPATH_USE_TF", "false")

__all__ = [
    "Answer",
    "BadInputError",
    "Document",
    "Model",
    "ReadDocument",
    "load",
    "open_corpus",
]


def __getattr__(name: str) -> Any:
    """Imports `realm_jax.api` when it is first used: JAX takes seconds."""
    if name in __all__:
        from realm_jax import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
