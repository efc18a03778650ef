"""Registers the tasks of a prepared corpus, and others, with SeqIO.

Importing this module imports TensorFlow, which takes seconds. The functions that make
examples are NumPy's; here they are wrapped, without logic of its own.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data.blocks import BlockStore
from realm_jax.data.documents import TRAIN, VALIDATION, VALIDATION_FRACTION
from realm_jax.data.features import SENTENCE_ID, Example, FeatureSpecs
from realm_jax.data.questions import Question
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare.corpus_tasks import (
    NUM_SHARDS,
    BlockSplits,
    CorpusTask,
    block_provenance,
    corpus_tasks,
    narrow_dtypes,
    question_task,
)

_SHUFFLE_BUFFER = 1 << 20
_WRITE_EXAMPLES = 1024


class BlockSource(seqio.DataSource):
    """Ids of the blocks of a split, as int32 scalars; see `BlockSplits`.

    Attributes:
      store: the corpus.
      provenance: fingerprints of corpus, vocabulary and settings, and the fraction of
        held-out articles.
      references: what the rows refer to that the task's dataset has beside its
        features, None without.
    """

    def __init__(
        self,
        store: BlockStore,
        num_shards: int = NUM_SHARDS,
        fraction: float = VALIDATION_FRACTION,
        *,
        task: CorpusTask | None = None,
    ):
        """Creates a source of the blocks of `store` in `num_shards` ranges.

        Of a task of the corpus it has the blocks, which all its tasks share.
        """
        super().__init__(splits=(TRAIN, VALIDATION))
        self.store = store
        if task is None:
            self.provenance = block_provenance(store, fraction)
            self.references = None
            self._blocks = BlockSplits(store, num_shards, fraction)
        else:
            assert task.blocks is not None
            self.provenance = dict(task.provenance)
            self.references = task.references
            self._blocks = task.blocks

    @property
    def supports_arbitrary_sharding(self) -> bool:
        """Always False: the shards are those of `list_shards`."""
        return False

    def list_shards(self, split: str) -> list[str]:
        """Returns the name of each shard."""
        count = self._blocks.num_shards
        return [f"{split}-{index:05d}-of-{count:05d}" for index in range(count)]

    def get_dataset(
        self,
        split: str = TRAIN,
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **unused,
    ) -> tf.data.Dataset:
        """Returns the ids of every `num_shards`-th shard, from `index` on."""
        shards = None
        if shard_info is not None:
            every = range(self._blocks.num_shards)
            shards = every[shard_info.index :: shard_info.num_shards]
        ids = self._blocks.ids(split, shards)
        dataset = tf.data.Dataset.from_tensor_slices(ids)
        if shuffle and len(ids):
            dataset = dataset.shuffle(min(len(ids), _SHUFFLE_BUFFER), seed=seed)
        return dataset


def register_corpus(name: str, store: BlockStore, **settings: Any) -> list[str]:
    """Registers the tasks of `corpus_tasks.corpus_tasks`; returns their names."""
    tasks = corpus_tasks(name, store, **settings)
    for task in tasks:
        register_task(task)
    return [task.name for task in tasks]


def register_question_task(
    name: str, questions: Sequence[Question], vocabulary: WordPiece, **lengths: Any
) -> None:
    """Registers the task of `corpus_tasks.question_task`."""
    register_task(question_task(name, questions, vocabulary, **lengths))


def register_task(task: CorpusTask) -> None:
    """Registers a task of a corpus or of questions."""
    add_task(
        task.name,
        BlockSource(task.blocks.store, task=task)
        if task.blocks
        else _question_source(task),
        task.examples,
        task.specs,
        task.vocabulary.size,
        task.references.layout.columns if task.references else None,
    )


def _question_source(task: CorpusTask) -> seqio.DataSource:
    def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None):
        del shuffle_files, seed  # A single shard, which the task itself shuffles.
        return tf.data.Dataset.from_tensor_slices(task.ids(split, None))

    counts = {split: len(task.ids(split, None)) for split in task.splits}
    source = seqio.FunctionDataSource(
        dataset_fn, splits=tuple(counts), num_input_examples=counts
    )
    source.vocabulary, source.provenance = task.vocabulary, task.provenance
    return source


def add_task(
    name: str,
    source: seqio.DataSource,
    make_examples: Callable[..., Example],
    specs: FeatureSpecs,
    vocab_size: int,
    columns: FeatureSpecs | None = None,
) -> None:
    """Registers a task that maps the elements of a source with a NumPy function.

    Args:
      name: letters, digits and underscores.
      source: a source of scalars.
      make_examples: maps an array of scalars to any number of examples.
      columns: further arrays that the function returns and that the dataset has beside
        the features of the task; see `references.py`.
    """
    made = {**specs, **(columns or {})}
    vocabulary = seqio.PassThroughVocabulary(size=vocab_size)
    features = {
        feature: seqio.ContinuousFeature(
            vocabulary=vocabulary,
            add_eos=False,
            dtype=tf.as_dtype(spec.dtype),
            rank=len(spec.shape),
        )
        for feature, spec in specs.items()
    }
    add_to_registry(
        name,
        source=source,
        preprocessors=[
            functools.partial(expand, make_examples=make_examples, specs=made),
            seqio.CacheDatasetPlaceholder(),
            functools.partial(restore_shapes, specs=specs, columns=columns),
        ],
        output_features=features,
    )


def add_to_registry(name: str, **task: Any) -> None:
    """Calls `seqio.TaskRegistry.add`, with one line for a name that it refuses."""
    try:
        seqio.TaskRegistry.add(name, **task)
    except ValueError as error:
        raise BadInputError(
            f"expected a new task name of letters, digits and underscores, got "
            f"{name!r} ({error}); choose another."
        ) from error


def expand(
    dataset: tf.data.Dataset,
    make_examples: Callable[..., Example],
    specs: FeatureSpecs,
    *,
    chunk_size: int = 64,
) -> tf.data.Dataset:
    """Makes any number of examples of scalars with a NumPy function."""

    def make_list(scalars: np.ndarray) -> list[np.ndarray]:
        examples = make_examples(scalars)
        return [examples[name] for name in specs]

    def from_numpy(scalars: tf.Tensor) -> dict[str, tf.Tensor]:
        types = [spec.dtype for spec in specs.values()]
        arrays = tf.numpy_function(make_list, [scalars], types)
        for spec, array in zip(specs.values(), arrays, strict=True):
            array.set_shape((None, *spec.shape))
        return dict(zip(specs, arrays, strict=True))

    return dataset.batch(chunk_size).map(from_numpy).unbatch()


def restore_shapes(
    dataset: tf.data.Dataset,
    sequence_length: Mapping[str, Any] | None,
    specs: FeatureSpecs,
    columns: FeatureSpecs | None = None,
) -> tf.data.Dataset:
    """Restores the fixed shapes of examples, which SeqIO's cache does not store.

    A preprocessor to follow the cache. SeqIO then truncates features to
    `sequence_length`, which would remove the last [SEP]: shorter lengths are refused.
    Of `columns`, which are no part of the task's output, a cache may lack some.
    """
    if missing := sorted(specs.keys() - dataset.element_spec.keys()):
        raise BadInputError(
            f"expected a cache with the features {', '.join(specs)}, but it lacks "
            f"{', '.join(missing)}; remove it and run SeqIO's caching tool again."
        )
    for name, length in (sequence_length or {}).items():
        made = specs[name].shape[:1] if name in specs else ()
        if made and isinstance(length, int) and length < made[0]:
            raise BadInputError(
                f"expected a length of at least {made[0]} for {name}, which is what "
                f"the task was registered with, got {length}; register it with shorter "
                "lengths."
            )
    there = dataset.element_spec.keys()
    kept = {name: spec for name, spec in (columns or {}).items() if name in there}
    return dataset.map(
        lambda example: {
            name: tf.ensure_shape(example[name], spec.shape)
            for name, spec in {**specs, **kept}.items()
        }
    )


def numpy_batches(
    dataset: tf.data.Dataset, names: Sequence[str], batch_size: int
) -> Iterator[Example]:
    """Yields batches of the named features as NumPy arrays; the last may be smaller."""
    specs: Any = dataset.element_spec
    for name in names:
        if not specs[name].shape.is_fully_defined():
            raise BadInputError(
                f"expected examples of one shape, got {name} of shape "
                f"{specs[name].shape}; pad it to a fixed length in the task."
            )
    kept = dataset.map(lambda example: {name: example[name] for name in names})
    for batch in kept.batch(batch_size).as_numpy_iterator():
        yield {name: np.asarray(value) for name, value in batch.items()}


def provenance(provider: seqio.Task | seqio.Mixture) -> dict[str, str | float]:
    """Returns the provenance of a task's examples: fingerprints and shares.

    Sources provide it as an attribute `provenance`. A mixture has the values that all
    its tasks have in common.
    """
    tasks = provider.tasks if isinstance(provider, seqio.Mixture) else [provider]
    known = [getattr(task.source, "provenance", {}) for task in tasks]
    return {
        name: value
        for name, value in known[0].items()
        if all(other.get(name) == value for other in known)
    }


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
