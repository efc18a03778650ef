"""Registers a prepared corpus with SeqIO: one call, three tasks.

    tasks.corpora.register("vital", source="runs/vital/corpus")

gives `vital_blocks` (the documents), `vital_ict` (sentences and their blocks) and
`vital_salient` (sentences with a salient span masked), each with the splits train and
validation. Importing this module imports TensorFlow.
"""

import functools
import os
from collections.abc import Callable

import numpy as np
import seqio

from realm_jax.data import inverse_cloze, masking
from realm_jax.data.blocks import BlockStore
from realm_jax.data.feature_converters import expand, output_features, restore_shapes
from realm_jax.data.features import Example, FeatureSpecs, int32
from realm_jax.data.splits import VALIDATION_FRACTION
from realm_jax.errors import BadInputError
from tasks.sources import BlockSource

NUM_SHARDS = 64


def register(
    name: str,
    source: str | os.PathLike[str],
    *,
    query_length: int = masking.QUERY_LENGTH,
    inverse_cloze_query_length: int = inverse_cloze.QUERY_LENGTH,
    document_length: int = inverse_cloze.DOCUMENT_LENGTH,
    max_masks: int = masking.MAX_MASKS,
    num_shards: int = NUM_SHARDS,
    validation_fraction: float = VALIDATION_FRACTION,
    seed: int = 0,
) -> list[str]:
    """Registers `<name>_blocks`, `<name>_ict` and `<name>_salient`.

    Args:
      name: letters, digits and underscores.
      source: directory of the corpus, as `realm prepare` makes it.
      query_length: wordpieces of a masked sentence, special pieces included.
      inverse_cloze_query_length: the same of an inverse cloze query.
      document_length: the same of a document.
      max_masks: masked wordpieces that are scored.
      num_shards: into how many parts SeqIO can split the work.
      validation_fraction: share of the articles no training example is made from.
      seed: which inverse cloze queries are removed from their blocks.

    Returns:
      The names of the tasks.

    Raises:
      BadInputError: there is no corpus at `source`, a length leaves no room for an
        example, or a task of this name is registered already.
    """
    store = BlockStore.open(source)
    blocks = BlockSource(store, num_shards, validation_fraction)
    ict_lengths = {
        "query_length": inverse_cloze_query_length,
        "document_length": document_length,
    }
    salient_lengths = {"query_length": query_length, "max_masks": max_masks}
    makers: dict[str, tuple[Callable[..., Example], FeatureSpecs]] = {
        f"{name}_blocks": (
            functools.partial(block_examples, store, document_length=document_length),
            block_specs(document_length),
        ),
        f"{name}_ict": (
            functools.partial(
                inverse_cloze.inverse_cloze_examples, store, **ict_lengths, seed=seed
            ),
            inverse_cloze.inverse_cloze_specs(**ict_lengths),
        ),
        f"{name}_salient": (
            functools.partial(masking.salient_examples, store, **salient_lengths),
            masking.pretrain_specs(**salient_lengths),
        ),
    }
    for task, (make_examples, specs) in makers.items():
        add_task(task, blocks, make_examples, specs, store.vocabulary.size)
    return list(makers)


def block_specs(document_length: int) -> FeatureSpecs:
    """Returns the features of one example of `<name>_blocks`."""
    return {
        "block_id": int32(),
        "document_ids": int32(document_length),
        "document_segment_ids": int32(document_length),
    }


def block_examples(
    store: BlockStore, block_ids: np.ndarray, *, document_length: int
) -> Example:
    """Returns the blocks as `BlockStore.document_ids` makes them, with their ids."""
    ids, segments = store.document_ids(block_ids, document_length)
    return {
        "block_id": np.asarray(block_ids, np.int32),
        "document_ids": ids,
        "document_segment_ids": segments,
    }


def add_task(
    name: str,
    source: seqio.DataSource,
    make_examples: Callable[..., Example],
    specs: FeatureSpecs,
    vocab_size: int,
) -> None:
    """Registers a task whose examples a NumPy function makes of what a source yields.

    Raises:
      BadInputError: the name is taken, or SeqIO does not allow it.
    """
    try:
        seqio.TaskRegistry.add(
            name,
            # SeqIO's protocol asks for more than its own base class promises.
            source=source,  # pyright: ignore[reportArgumentType]
            preprocessors=[
                functools.partial(expand, make_examples=make_examples, specs=specs),
                seqio.CacheDatasetPlaceholder(),
                functools.partial(restore_shapes, specs=specs),
            ],
            output_features=output_features(specs, vocab_size),
        )
    except ValueError as error:
        raise BadInputError(
            f"expected a new task name of letters, digits and underscores, got "
            f"{name!r} ({error}); choose another."
        ) from error


def provenance(provider: seqio.Task | seqio.Mixture) -> dict[str, str | float]:
    """Returns what the examples of a task are made from: fingerprints and shares.

    Sources tell theirs in an attribute `provenance`. A mixture has what all its tasks
    have in common.
    """
    tasks = provider.tasks if isinstance(provider, seqio.Mixture) else [provider]
    known = [getattr(task.source, "provenance", {}) for task in tasks]
    return {
        name: value
        for name, value in known[0].items()
        if all(other.get(name) == value for other in known)
    }
