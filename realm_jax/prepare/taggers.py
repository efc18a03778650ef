"""Creates taggers by name: those of `data.salient_spans`, and checkpoints on disk."""

import functools
from importlib.util import find_spec

from realm_jax.data.salient_spans import (
    SPACY_MODEL,
    PreAnnotated,
    RuleTagger,
    SpacyTagger,
    Tagger,
)
from realm_jax.errors import BadInputError

_TAGGERS = {"spacy": SpacyTagger, "rules": RuleTagger, "given": PreAnnotated}
CHECKPOINT = "checkpoint:"
"""Prefix of a tagger's name, followed by the folder of a token classifier."""


def tagger_by_name(name: str) -> Tagger:
    """Returns a tagger.

    Args:
      name: "spacy", "rules", "given" (only spans that documents provide), "auto" (spaCy
        where it is installed, otherwise rules), or "checkpoint:FOLDER" with the folder
        of a BERT token classifier, see `weights.token_classification`.
    """
    folder = name.removeprefix(CHECKPOINT)
    if folder != name and folder:
        # Imports JAX and the model, which the other taggers do without.
        from realm_jax.weights.token_classification import CheckpointTagger

        return CheckpointTagger(folder)
    if name == "auto":
        has_spacy = all(find_spec(package) for package in ("spacy", SPACY_MODEL))
        name = "spacy" if has_spacy else "rules"
    if name not in _TAGGERS:
        raise BadInputError(
            f"expected a tagger out of auto, {', '.join(_TAGGERS)} or "
            f"{CHECKPOINT}FOLDER, got {name!r}; correct the name."
        )
    return _TAGGERS[name]()


@functools.lru_cache(maxsize=1)
def loaded_tagger(name: str) -> Tagger:
    """Returns `tagger_by_name`, cached per process because loading takes seconds."""
    return tagger_by_name(name)


def option_of(name: str, given: str = "") -> str:
    """Returns the argument of `tagger_by_name` for the tagger recorded in a corpus.

    Args:
      given: the argument, where the user sets it; "" to derive it from the name.
    """
    option = given or name.partition("-")[0]
    if option == CHECKPOINT.removesuffix(":"):
        raise BadInputError(
            f"expected the folder of {name}, the tagger that the corpus was made with, "
            f"got none; give TAGGER as {CHECKPOINT}FOLDER."
        )
    found = loaded_tagger(option).name
    if found != name:
        raise BadInputError(
            f"expected the tagger {name}, which the corpus was made with, got {found}; "
            "install or name that one, or prepare the corpus again."
        )
    return option
