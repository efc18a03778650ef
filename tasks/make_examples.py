"""Blocks to examples, shard by shard of a SeqIO task: what workers do second."""

import dataclasses
import functools
import importlib
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator

from realm_jax.data.block_parts import pack_arrays, unpack_arrays
from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.features import Example
from realm_jax.errors import BadInputError

_BLOCKS_PER_SHARD = 4096
_MAX_SHARDS = 1024
_NAME = re.compile(r"(.+)\.(.+)\.(\d+)-of-(\d+)")


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """How the tasks of a corpus are registered; see `tasks.prepare.PrepareConfig`."""

    corpus: str
    name: str
    questions: str
    document_length: int
    query_length: int
    inverse_cloze_query_length: int
    max_masks: int
    validation_fraction: float
    seed: int
    knowledge: str
    modules: tuple[str, ...]
    seqio_cache: str


@functools.cache
def register(config: TaskSettings) -> None:
    """Registers the tasks of a corpus; a worker is another process and does it anew."""
    # TensorFlow takes seconds to import; a corpus that is complete does not need it.
    import seqio

    from realm_jax.data.blocks import BlockStore
    from tasks import corpora, questions

    for module in config.modules:
        importlib.import_module(module)
    if config.seqio_cache:
        seqio.add_global_cache_dirs([config.seqio_cache])
    store = BlockStore.open(config.corpus)
    corpora.register(
        config.name,
        config.corpus,
        query_length=config.query_length,
        inverse_cloze_query_length=config.inverse_cloze_query_length,
        document_length=config.document_length,
        max_masks=config.max_masks,
        knowledge=config.knowledge or None,
        num_shards=_num_shards(store.num_blocks),
        validation_fraction=config.validation_fraction,
        seed=config.seed,
    )
    if config.questions:
        questions.register_questions(
            f"{config.name}_questions",
            config.questions,
            store.vocabulary,
            query_length=config.query_length,
        )


def _num_shards(num_blocks: int) -> int:
    """Into how many shards a corpus is cut: enough to spread, few enough to start."""
    return min(max(1, num_blocks // _BLOCKS_PER_SHARD), _MAX_SHARDS)


def part_names(config: TaskSettings, task: str, split: str) -> list[str]:
    """Returns the names of the parts of a task's examples, in order; none if no split.

    Raises:
      BadInputError: there is no such task.
    """
    register(config)
    from tasks import materialise

    if split not in materialise.find_task(task).splits:
        return []
    count = materialise.num_shards(task, split)
    return [f"{task}.{split}.{i:05d}-of-{count:05d}" for i in range(count)]


@dataclasses.dataclass(frozen=True)
class MakeExamples:
    """Makes the examples of a shard of a task; see `tasks.parts.MakePart`.

    Attributes:
      config: which corpus, and how its tasks are registered.
    """

    config: TaskSettings

    def __call__(self, name: str, check: Callable[[], None]) -> bytes:
        """Returns the examples, one array a feature.

        Raises:
          BadInputError: an example has no fixed shape, or a text cannot be read.
        """
        register(self.config)
        from tasks import materialise

        match = _NAME.fullmatch(name)
        assert match is not None
        task, split, index, count = match.groups()
        batches = materialise.batches(
            task,
            split,
            use_cached=materialise.is_cached(task),
            seed=self.config.seed,
            shard=(int(index), int(count)),
        )
        return pack_arrays(_concatenate(_checked(batches, check)))


def assemble(
    config: TaskSettings,
    task: str,
    split: str,
    directory: pathlib.Path,
    parts: Iterable[bytes],
) -> Examples:
    """Writes the examples of all parts, in order.

    Raises:
      BadInputError: there is none at all, shapes differ, or the disk is full.
    """
    from tasks import materialise

    directory.parent.mkdir(parents=True, exist_ok=True)
    examples = (example for part in parts if (example := unpack_arrays(part)))
    metadata = materialise.metadata(task, split, config.seed)
    try:
        return write_examples(directory, examples, metadata)
    except BadInputError as error:
        raise BadInputError(f"{task}, split {split!r}: {error}") from error


def _checked(
    batches: Iterable[Example], check: Callable[[], None]
) -> Iterator[Example]:
    for batch in batches:
        check()
        yield batch


def _concatenate(batches: Iterable[Example]) -> Example:
    import numpy as np

    gathered = list(batches)
    names = gathered[0] if gathered else ()
    return {name: np.concatenate([b[name] for b in gathered]) for name in names}
