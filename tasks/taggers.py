"""Taggers by name: those of `data.salient_spans`, and checkpoints on disk."""

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
