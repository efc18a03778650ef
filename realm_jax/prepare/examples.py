"""Makes examples from blocks and questions, shard by shard of a task.

The tasks of a corpus need NumPy alone. For a task of the user's own, and for what
SeqIO's caching tool has made, SeqIO is imported, and with it TensorFlow.

Examples record what made them (`made_by` in examples.json): the code of this package,
the settings, and for a task of the user's own the source of the user's modules. The
settings and modules of examples that are there must be those of the command, or it
refuses: checkpoints may have been trained on these examples, so they are never
overwritten. Other code of this package is reported, and so is what examples of an
earlier release do not record.
"""

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import logging
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.features import SENTENCE_ID, Example
from realm_jax.data.questions import read_questions
from realm_jax.data.store_files import PARTIAL
from realm_jax.errors import BadInputError
from realm_jax.prepare.block_parts import pack_arrays
from realm_jax.prepare.corpus_tasks import CorpusTask, corpus_tasks, question_task
from realm_jax.prepare.fingerprints import (
    differing_modules,
    listing_sha256,
    module_code,
    package_code,
)

_BLOCKS_PER_SHARD = 4096
_MAX_SHARDS = 1024
_NAME = re.compile(r"(.+)\.(.+)\.(\d+)-of-(\d+)\.[0-9a-f]+")

if TYPE_CHECKING:
    from realm_jax.prepare.seqio_tasks import RegisteredTask

ExampleTask: TypeAlias = "CorpusTask | RegisteredTask"
"""A task whose examples are materialised."""

MADE_BY = "made_by"
"""Entry of the metadata of examples, and of corpus.json."""

# Of a task of the user's own, which may be a mixture of any others.
_ALL_SETTINGS = (
    "query_length",
    "max_masks",
    "validation_fraction",
    "seed",
    "inverse_cloze_query_length",
    "document_length",
)

# Tasks whose examples have always recorded all that they are compared by.
_COMPLETE = ("_ict", "_salient")

_OTHERS = {
    "corpus_fingerprint": "they were made for another corpus",
    "vocabulary_fingerprint": "they are in another vocabulary",
    "settings_fingerprint": "the corpus they are from has another text or tagger",
    "questions_fingerprint": "the questions have changed since",
}

_log = logging.getLogger(__name__)


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


def examples_folder(
    corpus: str | os.PathLike[str], task: str, split: str
) -> pathlib.Path:
    """Returns the directory of the examples of a task and split."""
    return pathlib.Path(corpus) / "examples" / task / split


def made_by(tasks: TaskSettings, name: str) -> dict[str, Any]:
    """Returns what makes the examples of a task, as JSON values.

    A task of the user's own depends on all the settings, and on all the user's modules.
    """
    own = own_tasks(tasks).get(name)
    names = own.settings if own else _ALL_SETTINGS
    settings = {setting: getattr(tasks, setting) for setting in names}
    if tasks.seqio_cache:
        settings["seqio_cache"] = listing_sha256(f"{tasks.seqio_cache}/{name}")
    return {
        "realm_jax": package_code(),
        "settings": settings,
        "modules": {} if own else module_code(tasks.modules),
    }


def find_examples(tasks: TaskSettings, name: str, split: str) -> Examples | None:
    """Returns the examples of a split of a task, None if there are none."""
    folder = examples_folder(tasks.knowledge or tasks.corpus, name, split)
    if not folder.exists():
        return None
    examples = Examples.open(folder)
    if differences := _differences(tasks, name, split, examples):
        raise BadInputError(
            f"expected {folder} to be absent or made by this code and these settings, "
            f"but {'; '.join(differences)}; to have them made again, remove the "
            f"folder and run the same command: rm -r {shlex.quote(str(folder.parent))}"
        )
    return examples


def require_no_other_splits(tasks: TaskSettings, task: str, splits: set[str]) -> None:
    """Requires that there are no examples of splits that a task no longer has."""
    folder = examples_folder(tasks.knowledge or tasks.corpus, task, "train").parent
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    unfinished = {name for name in there if name.endswith(PARTIAL)}
    if others := sorted(there - unfinished - splits):
        raise BadInputError(
            f"expected the splits {', '.join(sorted(splits))} of {tasks.questions} in "
            f"{folder}, got {', '.join(others)} too, of other questions; to have them "
            "made again, remove the folder and run the same command: rm -r "
            f"{shlex.quote(str(folder))}"
        )


def report_other_code(store: BlockStore, found: Iterable[Examples]) -> None:
    """Logs which of what is there other code made, or code that is not known."""
    made = {str(store.directory): store.info.get(MADE_BY)}
    for examples in found:
        by = examples.metadata.get(MADE_BY)
        made[str(examples.directory.parent)] = by and by["realm_jax"]
    unknown = [place for place, by in made.items() if not by]
    others = [place for place, by in made.items() if by and by != package_code()]
    if unknown:
        _log.warning(
            "kept %s: an earlier release, or a call from Python, did not record the "
            "code and settings that made them, so whether they are those of this "
            "command is unknown",
            ", ".join(unknown),
        )
    if others:
        _log.warning(
            "kept %s: other code of realm_jax made them than this; what is removed is "
            "made again",
            ", ".join(others),
        )


def _differences(
    tasks: TaskSettings, name: str, split: str, examples: Examples
) -> list[str]:
    """Returns how the examples differ from those that this command would make."""
    own, found = own_tasks(tasks).get(name), examples.metadata
    made, now = found.get(MADE_BY), made_by(tasks, name)
    if own:
        wanted: dict[str, Any] = dict(own.provenance)
        if "seed" in own.settings:
            wanted["seed"] = tasks.seed
    else:
        # SeqIO knows what it is made from; that takes TensorFlow, and seconds.
        wanted = metadata(find_task(tasks, name), split, tasks.seed)
    if made:
        # What the provenance has is compared under its own name.
        wanted = {**now["settings"], **wanted}
        found = {**made["settings"], **found}
    elif not (own and name.endswith(_COMPLETE)):
        wanted = {key: value for key, value in wanted.items() if key in found}
    differences = [
        _OTHERS.get(key, f"their {key} is {found.get(key)!r}, not {value!r}")
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if made:
        before, after = made["modules"], now["modules"]
        differences += [
            f"the module {module} {_what_happened(module in before, module in after)}"
            for module in differing_modules(before, after)
        ]
    elif own and not differences and not _fit(own, split, examples):
        differences = ["they are of other lengths or other questions"]
    return differences


def _what_happened(was_imported: bool, is_imported: bool) -> str:
    if not was_imported:
        return "was not imported then"
    return "has changed since" if is_imported else "is not imported now"


def _fit(task: CorpusTask, split: str, examples: Examples) -> bool:
    """Returns whether examples have the configured lengths, and the same questions.

    Those that record what made them are compared by that.
    """
    specs = {name: s for name, s in task.specs.items() if name != SENTENCE_ID}
    if task.blocks is not None or examples.specs != specs:
        return examples.specs == specs
    made = task.make(task.ids(split, None))
    return all(np.array_equal(examples.features[name], made[name]) for name in made)
