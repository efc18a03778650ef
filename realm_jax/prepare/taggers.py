"""Taggers by name: those of `data.salient_spans`, and checkpoints on disk."""

import functools

from realm_jax.data import salient_spans
from realm_jax.data.salient_spans import Tagger
from realm_jax.errors import BadInputError

CHECKPOINT = "checkpoint:"
"""Before the folder of a token classifier in the name of a tagger."""


def tagger_by_name(name: str) -> Tagger:
    """Returns a tagger.

    Args:
      name: "spacy", "rules", "given" (only spans that documents bring), "auto" (spaCy
        where it is installed, otherwise rules), or "checkpoint:FOLDER" with the folder
        of a BERT token classifier, see `weights.token_classification`.

    Raises:
      BadInputError: there is no tagger of that name, it is not installed, or the
        checkpoint cannot serve.
    """
    folder = name.removeprefix(CHECKPOINT)
    if folder != name and folder:
        # Imports JAX and the model, which the other taggers do without.
        from realm_jax.weights.token_classification import CheckpointTagger

        return CheckpointTagger(folder)
    if name not in salient_spans.TAGGERS:
        raise BadInputError(
            f"expected a tagger out of {', '.join(salient_spans.TAGGERS)} or "
            f"{CHECKPOINT}FOLDER, got {name!r}; correct the name."
        )
    return salient_spans.tagger_by_name(name)


@functools.lru_cache(maxsize=1)
def loaded_tagger(name: str) -> Tagger:
    """Does what `tagger_by_name` does, once a process: loading takes seconds."""
    return tagger_by_name(name)


def option_of(name: str, given: str = "") -> str:
    """Returns the option of `tagger_by_name` for a tagger that a corpus names.

    Args:
      name: what corpus.json says, see `Tagger.name`.
      given: the option, where a person gives one; "" to find it by the name.

    Raises:
      BadInputError: the tagger of this option is another one than the corpus names, or
        the name does not tell where its checkpoint lies.
    """
    option = given or name.partition("-")[0]
    if option == CHECKPOINT.removesuffix(":"):
        raise BadInputError(
            f"expected where the tagger {name} lies, which the corpus was made with, "
            f"got nothing; give TAGGER as {CHECKPOINT}FOLDER."
        )
    found = loaded_tagger(option).name
    if found != name:
        raise BadInputError(
            f"expected the tagger {name}, which the corpus was made with, got {found}; "
            "install or name that one, or prepare the corpus again."
        )
    return option
