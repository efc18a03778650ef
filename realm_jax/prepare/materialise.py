"""Materialises SeqIO tasks on disk, so that training runs without TensorFlow."""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data.example_layouts import References
from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.features import SENTENCE_ID, WORDPIECE_FEATURES, Example
from realm_jax.errors import BadInputError
from realm_jax.prepare.seqio_tasks import BlockSource, provenance
from realm_jax.prepare.tf_datasets import numpy_batches

_WRITE_EXAMPLES = 1024


def materialise(
    task_or_mixture: str,
    split: str,
    directory: str | os.PathLike[str],
    *,
    use_cached: bool = False,
    seed: int = 0,
) -> Examples:
    """Writes one epoch of a task or mixture, in the order of its source.

    Args:
      task_or_mixture: a name registered with SeqIO; its features have fixed shapes.
      directory: must be absent or empty; see `data.examples`.

    Returns:
      The examples; their metadata hold task, split and provenance.
    """
    provider = find_task(task_or_mixture)
    if split not in provider.splits:
        raise BadInputError(
            f"expected a split of {task_or_mixture} ({', '.join(provider.splits)}), "
            f"got {split!r}; name one of these."
        )
    made = batches(task_or_mixture, split, use_cached=use_cached, seed=seed)
    return write(
        task_or_mixture, directory, made, metadata(task_or_mixture, split, seed)
    )


def write(
    task_or_mixture: str,
    directory: str | os.PathLike[str],
    made: Iterable[Example],
    metadata: Mapping[str, Any],
) -> Examples:
    """Writes the `batches` of a task or mixture; see `data.examples.write_examples`.

    Rows that refer to sentences are written as such, and wordpieces of others in the
    width of their vocabulary.
    """
    provider = find_task(task_or_mixture)
    found = _references(provider)
    made = iter(made)
    first = next(made, {})
    # A cache of an earlier release has no rows that refer to sentences.
    if found is not None and not found.layout.columns.keys() <= first.keys():
        found = None
    batches = itertools.chain([first] if first else [], made)
    return write_examples(
        *(directory, batches, metadata),
        references=found,
        dtypes=_narrow_dtypes(provider),
    )


def _references(provider: seqio.Task | seqio.Mixture) -> References | None:
    """Returns what a task's rows refer to, None if they have to be whole."""
    source = getattr(provider, "source", None)
    if not isinstance(source, BlockSource) or source.layout is None:
        return None
    return References(source.layout, source.store)


def _narrow_dtypes(provider: seqio.Task | seqio.Mixture) -> dict[str, np.dtype]:
    """Returns the width of the vocabulary for each feature of wordpieces, by name.

    A vocabulary that needs as many bits as a batch has is left out, and one whose size
    a task does not state.
    """
    dtypes = {
        name: np.min_scalar_type(feature.vocabulary.vocab_size - 1)
        for name, feature in provider.output_features.items()
        if name in WORDPIECE_FEATURES
        and tf.as_dtype(feature.dtype) == tf.int32
        and feature.vocabulary.vocab_size > 1
    }
    return {name: dtype for name, dtype in dtypes.items() if dtype.itemsize < 4}


def metadata(task_or_mixture: str, split: str, seed: int) -> dict[str, Any]:
    """Returns the metadata of materialised examples: task, split, seed, provenance."""
    return {
        "task": task_or_mixture,
        "split": split,
        "seed": seed,
        **provenance(find_task(task_or_mixture)),
    }


def num_shards(task_or_mixture: str, split: str) -> int:
    """Returns the number of shards of a task, 1 for a mixture or a cached task.

    The concatenated examples of the shards are those of the task.
    """
    provider = find_task(task_or_mixture)
    if isinstance(provider, seqio.Mixture) or is_cached(task_or_mixture):
        return 1
    return max(1, len(provider.source.list_shards(split)))


def is_cached(task_or_mixture: str) -> bool:
    """Returns whether SeqIO's caching tool has cached the examples of a task."""
    provider = find_task(task_or_mixture)
    return isinstance(provider, seqio.Task) and provider.cache_dir is not None


def find_task(name: str) -> seqio.Task | seqio.Mixture:
    """Returns a registered task or mixture."""
    try:
        return seqio.get_mixture_or_task(name)
    except ValueError as error:
        known = sorted([*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()])
        raise BadInputError(
            f"expected a registered task or mixture ({', '.join(known) or 'none is'}), "
            f"got {name!r}; correct the name or import the module that registers it."
        ) from error


def batches(
    task_or_mixture: str,
    split: str,
    *,
    use_cached: bool = False,
    seed: int = 0,
    shard: tuple[int, int] | None = None,
) -> Iterator[Example]:
    """Yields one epoch of a task or mixture, or of a shard of it, in batches.

    Of a task whose examples refer to sentences of the corpus, a batch has the columns
    of its `layout` instead of the features.
    """
    provider = find_task(task_or_mixture)
    try:
        dataset = provider.get_dataset(
            split=split,
            use_cached=use_cached,
            shuffle=False,
            seed=seed,
            num_epochs=1,
            shard_info=seqio.ShardInfo(*shard) if shard and shard[1] > 1 else None,
        )
        names = list(provider.output_features)
        if found := _references(provider):
            columns = found.layout.columns
            if columns.keys() <= dataset.element_spec.keys():
                names = [*columns, *({*names} & {SENTENCE_ID})]
        yield from numpy_batches(dataset, names, _WRITE_EXAMPLES)
    except AssertionError as error:  # SeqIO raises it if nothing is cached.
        raise BadInputError(
            f"expected a cache of {provider.name}, but {error}; run SeqIO's caching "
            "tool, add the cache directory, or do without the cache."
        ) from error
    except tf.errors.OpError as error:
        raise_bad_input(error)
        raise


def raise_bad_input(error: tf.errors.OpError) -> None:
    """Raises the `BadInputError` that TensorFlow has wrapped, if there is one."""
    if found := re.search(r"BadInputError: (.*)", str(error)):
        raise BadInputError(found[1]) from error
