"""Materialises SeqIO tasks on disk, so that training runs without TensorFlow."""

import os
import re
from collections.abc import Iterator

import seqio
import tensorflow as tf

from realm_jax.data.examples import Examples
from realm_jax.data.features import SENTENCE_ID, Example
from realm_jax.errors import BadInputError
from realm_jax.prepare.corpus_tasks import narrow_dtypes
from realm_jax.prepare.examples import metadata, write
from realm_jax.prepare.seqio_tasks import numpy_batches, provenance

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
      use_cached: read the output of SeqIO's caching tool.

    Returns:
      The examples; their metadata hold task, split and provenance.
    """
    task = RegisteredTask(task_or_mixture, seed=seed, use_cached=use_cached)
    if split not in task.splits:
        raise BadInputError(
            f"expected a split of {task_or_mixture} ({', '.join(task.splits)}), "
            f"got {split!r}; name one of these."
        )
    made = task.batches(split, 0, 1)
    return write(task, directory, made, metadata(task, split, seed))


class RegisteredTask:
    """A task or mixture that is registered with SeqIO; see `examples.ExampleTask`."""

    def __init__(self, name: str, *, seed: int = 0, use_cached: bool | None = None):
        """Finds a task.

        Args:
          name: as registered.
          seed: seeds random preprocessors and mixing.
          use_cached: whether the output of SeqIO's caching tool is read; None if there
            is one.
        """
        provider = find_task(name)
        is_task = isinstance(provider, seqio.Task)
        self.name = name
        self.splits = list(provider.splits)
        self.provenance = provenance(provider)
        self.references = getattr(is_task and provider.source, "references", None)
        self.dtypes = narrow_dtypes(
            {
                feature: spec.vocabulary.vocab_size
                for feature, spec in provider.output_features.items()
                if tf.as_dtype(spec.dtype) == tf.int32
            }
        )
        self._provider = provider
        self._seed = seed
        if use_cached is None:
            use_cached = is_task and provider.cache_dir is not None
        self._use_cached = use_cached

    def num_shards(self, split: str) -> int:
        """Returns the number of shards, 1 for a mixture or a cached task.

        The concatenated examples of the shards are those of the task.
        """
        if isinstance(self._provider, seqio.Mixture) or self._use_cached:
            return 1
        return max(1, len(self._provider.source.list_shards(split)))

    def batches(self, split: str, shard: int, count: int) -> Iterator[Example]:
        """Yields one epoch of a shard out of `count`, in batches.

        Of a task whose examples refer to sentences of the corpus, a batch has the
        columns of its layout instead of the features, unless it is of a cache that an
        earlier release wrote.
        """
        try:
            dataset = self._provider.get_dataset(
                split=split,
                use_cached=self._use_cached,
                shuffle=False,
                seed=self._seed,
                num_epochs=1,
                shard_info=seqio.ShardInfo(shard, count) if count > 1 else None,
            )
            names = list(self._provider.output_features)
            columns = self.references.layout.columns if self.references else {}
            if columns and columns.keys() <= dataset.element_spec.keys():
                names = [*columns, *({*names} & {SENTENCE_ID})]
            yield from numpy_batches(dataset, names, _WRITE_EXAMPLES)
        except AssertionError as error:  # SeqIO raises it if nothing is cached.
            raise BadInputError(
                f"expected a cache of {self.name}, but {error}; run SeqIO's caching "
                "tool, add the cache directory, or do without the cache."
            ) from error
        except tf.errors.OpError as error:
            raise_bad_input(error)
            raise


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


def raise_bad_input(error: tf.errors.OpError) -> None:
    """Raises the `BadInputError` that TensorFlow has wrapped, if there is one."""
    if found := re.search(r"BadInputError: (.*)", str(error)):
        raise BadInputError(found[1]) from error
