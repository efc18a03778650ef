"""Makes examples from blocks, shard by shard of a SeqIO task."""

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.features import Example
from realm_jax.data.questions import read_questions
from realm_jax.errors import BadInputError
from realm_jax.prepare.block_parts import pack_arrays, unpack_arrays
from realm_jax.prepare.fingerprints import changed_modules

_BLOCKS_PER_SHARD = 4096
_MAX_SHARDS = 1024
_NAME = re.compile(r"(.+)\.(.+)\.(\d+)-of-(\d+)\.[0-9a-f]+")


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


def metadata(config: TaskSettings, task: str, split: str) -> dict[str, Any] | None:
    """Returns `materialise.metadata` of a task, None if it has no such split."""
    register(config)
    from realm_jax.prepare import materialise

    if split not in materialise.find_task(task).splits:
        return None
    return materialise.metadata(task, split, config.seed)


def part_names(
    config: TaskSettings, task: str, split: str, metadata: Mapping[str, Any]
) -> list[str]:
    """Returns the names of the parts of a split, in order.

    They end in a fingerprint of the metadata, so that parts of other code or settings
    have other names.
    """
    register(config)
    from realm_jax.prepare import materialise

    count = materialise.num_shards(task, split)
    content = json.dumps(metadata, sort_keys=True).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return [f"{task}.{split}.{i:05d}-of-{count:05d}.{digest}" for i in range(count)]


@dataclasses.dataclass(frozen=True)
class MakeExamples:
    """Makes the examples of a shard of a task; see `beam_parts.MakePart`.

    Attributes:
      config: the corpus and the settings of its tasks.
      modules: the source of the user's modules, see `fingerprints.module_code`.
    """

    config: TaskSettings
    modules: Mapping[str, str]

    def __call__(self, name: str, check: Callable[[], None]) -> bytes:
        """Returns the examples of the shard, serialised, one array per feature."""
        register(self.config)
        from realm_jax.prepare import materialise

        if changed := changed_modules(self.modules):
            raise BadInputError(
                f"expected modules to stay as they are while examples are made, but "
                f"{', '.join(changed)} has changed; run the same command again"
            )

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
    task: str,
    split: str,
    directory: pathlib.Path,
    parts: Iterable[bytes],
    metadata: Mapping[str, Any],
) -> Examples:
    """Writes the examples of all parts, in order."""
    examples = (example for part in parts if (example := unpack_arrays(part)))
    first = next(examples, None)
    if first is None:
        raise BadInputError(
            f"expected examples of {task} in the split {split!r}, got none: nothing in "
            "it has what they are made of; prepare more articles, hold out more by "
            "VALIDATION_FRACTION, or name other EXAMPLES: text without names can have "
            "terms, random_spans or random_tokens masked"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    from realm_jax.prepare import materialise

    try:
        return materialise.write(
            task, directory, itertools.chain([first], examples), metadata
        )
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
