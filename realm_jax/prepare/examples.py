"""Makes examples from blocks and questions, shard by shard of a task.

The tasks of a corpus need NumPy alone. For a task of the user's own, and for what
SeqIO's caching tool has made, SeqIO is imported, and with it TensorFlow.
"""

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.features import Example
from realm_jax.data.questions import read_questions
from realm_jax.errors import BadInputError
from realm_jax.prepare.block_parts import pack_arrays
from realm_jax.prepare.corpus_tasks import CorpusTask, corpus_tasks, question_task
from realm_jax.prepare.fingerprints import differing_modules, module_code

_BLOCKS_PER_SHARD = 4096
_MAX_SHARDS = 1024
_NAME = re.compile(r"(.+)\.(.+)\.(\d+)-of-(\d+)\.[0-9a-f]+")


if TYPE_CHECKING:
    from realm_jax.prepare.seqio_tasks import RegisteredTask

ExampleTask: TypeAlias = "CorpusTask | RegisteredTask"
"""A task whose examples are materialised."""


@dataclasses.dataclass(frozen=True)
class TaskSettings:
    """Settings of the tasks of a corpus; see `prepare.PrepareConfig`."""

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


@functools.lru_cache(maxsize=1)
def own_tasks(config: TaskSettings) -> dict[str, CorpusTask]:
    """Returns the tasks of a corpus by name, made once in every worker process."""
    store = BlockStore.open(config.corpus)
    tasks = corpus_tasks(
        config.name,
        store,
        knowledge=BlockStore.open(config.knowledge) if config.knowledge else None,
        query_length=config.query_length,
        inverse_cloze_query_length=config.inverse_cloze_query_length,
        document_length=config.document_length,
        max_masks=config.max_masks,
        num_shards=min(max(1, store.num_blocks // _BLOCKS_PER_SHARD), _MAX_SHARDS),
        validation_fraction=config.validation_fraction,
        seed=config.seed,
    )
    if config.questions:
        name, questions = f"{config.name}_questions", read_questions(config.questions)
        length = {"query_length": config.query_length}
        tasks.append(question_task(name, questions, store.vocabulary, **length))
    return {task.name: task for task in tasks}


@functools.cache
def register(config: TaskSettings) -> None:
    """Registers the tasks of a corpus with SeqIO, and those of the user's modules."""
    # TensorFlow takes seconds to import, and the corpus's own tasks do not need it.
    import seqio

    from realm_jax.prepare import seqio_tasks

    for module in config.modules:
        importlib.import_module(module)
    if config.seqio_cache:
        seqio.add_global_cache_dirs([config.seqio_cache])
    for task in own_tasks(config).values():
        seqio_tasks.register_task(task)


def find_task(config: TaskSettings, name: str) -> ExampleTask:
    """Returns a task of the corpus, or one that is registered with SeqIO."""
    own = own_tasks(config)
    if name in own and not config.seqio_cache:
        return own[name]
    register(config)
    from realm_jax.prepare.seqio_tasks import RegisteredTask

    return RegisteredTask(name, seed=config.seed)


def metadata(task: ExampleTask, split: str, seed: int) -> dict[str, Any]:
    """Returns the metadata of materialised examples: task, split, seed, provenance."""
    return {"task": task.name, "split": split, "seed": seed, **task.provenance}


def part_names(task: ExampleTask, split: str, metadata: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parts of a split, in order.

    They end in a fingerprint of the metadata, so that parts of other code or settings
    have other names.
    """
    count = task.num_shards(split)
    content = json.dumps(metadata, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return [
        f"{task.name}.{split}.{i:05d}-of-{count:05d}.{digest}" for i in range(count)
    ]


@dataclasses.dataclass(frozen=True)
class MakeExamples:
    """Makes the examples of a shard of a task; see `beam_parts.MakePart`.

    Attributes:
      modules: the source of the user's modules, see `fingerprints.module_code`.
    """

    config: TaskSettings
    modules: Mapping[str, str]

    def __call__(self, name: str, check: Callable[[], None]) -> bytes:
        """Returns the examples of the shard, serialised, one array per feature."""
        gathered = list(self.batches(name, check))
        names = gathered[0] if gathered else ()
        return pack_arrays({n: np.concatenate([b[n] for b in gathered]) for n in names})

    def batches(self, name: str, check: Callable[[], None]) -> Iterator[Example]:
        """Yields the examples of a part, given its name."""
        changed = differing_modules(self.modules, module_code(self.config.modules))
        if changed:
            raise BadInputError(
                f"expected modules to stay as they are while examples are made, but "
                f"{', '.join(changed)} has changed; run the same command again"
            )
        match = _NAME.fullmatch(name)
        assert match is not None
        task, split, index, count = match.groups()
        made = find_task(self.config, task).batches(split, int(index), int(count))
        for batch in made:
            check()
            yield batch


def write_split(
    task: ExampleTask,
    split: str,
    directory: pathlib.Path,
    batches: Iterable[Example],
    metadata: Mapping[str, Any],
) -> Examples:
    """Writes the examples of a split, of which there must be some."""
    made = filter(None, batches)
    first = next(made, None)
    if first is None:
        raise BadInputError(
            f"expected examples of {task.name} in the split {split!r}, got none: "
            "nothing in it has what they are made of; prepare more articles, hold out "
            "more by VALIDATION_FRACTION, or name other EXAMPLES: text without names "
            "can have terms, random_spans or random_tokens masked"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        return write(task, directory, itertools.chain([first], made), metadata)
    except BadInputError as error:
        raise BadInputError(f"{task.name}, split {split!r}: {error}") from error


def write(
    task: ExampleTask,
    directory: str | os.PathLike[str],
    batches: Iterable[Example],
    metadata: Mapping[str, Any],
) -> Examples:
    """Writes the batches of a task; see `data.examples.write_examples`.

    Rows that refer to sentences are written as such, and wordpieces of others in the
    width of their vocabulary.
    """
    batches = iter(batches)
    first = next(batches, {})
    references = task.references
    # A cache of an earlier release has no rows that refer to sentences.
    if references is not None and not references.layout.columns.keys() <= first.keys():
        references = None
    made = itertools.chain([first] if first else [], batches)
    return write_examples(
        directory, made, metadata, references=references, dtypes=task.dtypes
    )


def examples_folder(corpus: str, task: str, split: str) -> pathlib.Path:
    """Returns the directory of the examples of a task and split."""
    return pathlib.Path(corpus) / "examples" / task / split
