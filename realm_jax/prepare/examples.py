"""Makes examples from blocks, shard by shard of a SeqIO task."""

import dataclasses
import functools
import importlib
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.features import Example
from realm_jax.data.questions import pattern_length, question_examples, read_questions
from realm_jax.errors import BadInputError
from realm_jax.prepare.block_parts import pack_arrays, unpack_arrays

_BLOCKS_PER_SHARD = 4096
_MAX_SHARDS = 1024
_NAME = re.compile(r"(.+)\.(.+)\.(\d+)-of-(\d+)")


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """Settings to register the tasks of a corpus; see `prepare.PrepareConfig`."""

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
    """Registers the tasks of a corpus, once in every worker process."""
    # TensorFlow takes seconds to import, and a complete corpus does not need it.
    import seqio

    from realm_jax.data.blocks import BlockStore
    from realm_jax.prepare import question_tasks, seqio_tasks

    for module in config.modules:
        importlib.import_module(module)
    if config.seqio_cache:
        seqio.add_global_cache_dirs([config.seqio_cache])
    store = BlockStore.open(config.corpus)
    seqio_tasks.register_corpus(
        config.name,
        store,
        query_length=config.query_length,
        inverse_cloze_query_length=config.inverse_cloze_query_length,
        document_length=config.document_length,
        max_masks=config.max_masks,
        knowledge=BlockStore.open(config.knowledge) if config.knowledge else None,
        num_shards=_num_shards(store.num_blocks),
        validation_fraction=config.validation_fraction,
        seed=config.seed,
    )
    if config.questions:
        question_tasks.register_question_task(
            f"{config.name}_questions",
            read_questions(config.questions),
            store.vocabulary,
            query_length=config.query_length,
        )


def _num_shards(num_blocks: int) -> int:
    """Returns a number of shards that balances parallelism and start-up cost."""
    return min(max(1, num_blocks // _BLOCKS_PER_SHARD), _MAX_SHARDS)


def part_names(config: TaskSettings, task: str, split: str) -> list[str]:
    """Returns the names of the parts of a split, in order; none if it does not exist.

    Raises:
      BadInputError: there is no such task.
    """
    register(config)
    from realm_jax.prepare import materialise

    if split not in materialise.find_task(task).splits:
        return []
    count = materialise.num_shards(task, split)
    return [f"{task}.{split}.{i:05d}-of-{count:05d}" for i in range(count)]


@dataclasses.dataclass(frozen=True)
class MakeExamples:
    """Makes the examples of a shard of a task; see `beam_parts.MakePart`.

    Attributes:
      config: the corpus and the settings of its tasks.
    """

    config: TaskSettings

    def __call__(self, name: str, check: Callable[[], None]) -> bytes:
        """Returns the examples of the shard, serialised, one array per feature.

        Raises:
          BadInputError: an example has no fixed shape, or a text cannot be read.
        """
        register(self.config)
        from realm_jax.prepare import materialise

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
      BadInputError: there are no examples, shapes differ, or the disk is full.
    """
    from realm_jax.prepare import materialise

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


def examples_folder(corpus: str, task: str, split: str) -> pathlib.Path:
    """Returns the directory of the examples of a task and split."""
    return pathlib.Path(corpus) / "examples" / task / split


def are_there(tasks: TaskSettings, store: BlockStore, task: str, split: str) -> bool:
    """Returns whether the examples of exactly these settings exist.

    Args:
      tasks: settings of the tasks.
      store: the corpus from which the examples are made.
      task: name of the task.
      split: split of the task.

    Raises:
      BadInputError: examples of other settings exist, which are never overwritten.
    """
    folder = examples_folder(tasks.knowledge or tasks.corpus, task, split)
    if not folder.exists():
        return False
    expect: dict[str, object] = {"vocabulary_fingerprint": store.vocabulary.fingerprint}
    if task in (f"{tasks.name}_ict", f"{tasks.name}_salient"):
        expect["corpus_fingerprint"] = (
            BlockStore.open(tasks.knowledge) if tasks.knowledge else store
        ).fingerprint
        # Covers the spans, which the corpus fingerprint leaves out.
        expect["settings_fingerprint"] = store.info.get("settings_fingerprint", "")
        expect["validation_fraction"] = tasks.validation_fraction
        expect["seed"] = tasks.seed
    examples = Examples.open(folder, expect=expect)
    if not _fit(tasks, store, task, split, examples):
        raise BadInputError(
            f"expected {folder} to be absent or made with these settings, but its "
            "examples are of other lengths or other questions; remove it to have it "
            "made again"
        )
    return True


def _fit(
    tasks: TaskSettings, store: BlockStore, task: str, split: str, examples: Examples
) -> bool:
    """Returns whether examples have the configured lengths, and the same questions."""
    features = examples.features
    if task == f"{tasks.name}_ict":
        return (features["query_ids"].shape[1], features["document_ids"].shape[1]) == (
            tasks.inverse_cloze_query_length,
            tasks.document_length,
        )
    if task == f"{tasks.name}_salient":
        return (features["query_ids"].shape[1], features["mask_ids"].shape[1]) == (
            tasks.query_length,
            tasks.max_masks,
        )
    if task != f"{tasks.name}_questions":
        return True
    made = question_examples(
        read_questions(tasks.questions, split),
        store.vocabulary,
        query_length=tasks.query_length,
        max_pattern_length=pattern_length(read_questions(tasks.questions)),
    )
    return features.keys() == made.keys() and all(
        np.array_equal(features[name], made[name]) for name in made
    )
