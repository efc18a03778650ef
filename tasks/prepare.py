"""Prepares a corpus: text to blocks, salient spans, and materialised examples.

    CORPUS/                              the block store (see `data/blocks.py`)
    CORPUS/examples/<task>/<split>/      examples a trainer reads without TensorFlow

Apache Beam makes both part by part: source, filter, sentences, blocks and tags first,
then the examples of each task. Whatever the number of workers, the size of a part and
the runner, the bytes are the same. What is there already is not made again; a run that
was killed goes on with the parts that are missing.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from realm_jax.data import inverse_cloze, masking
from realm_jax.data.block_writer import EmptyCorpusError
from realm_jax.data.blocks import INFO_FILE, BlockStore
from realm_jax.data.corpus import settings_fingerprint
from realm_jax.data.questions import read_questions
from realm_jax.data.records import read_text
from realm_jax.data.splits import VALIDATION_FRACTION
from realm_jax.errors import BadInputError
from realm_jax.storage import open_store
from tasks import make_blocks, make_examples
from tasks.documents.open import open_source
from tasks.made_examples import are_there, examples_folder
from tasks.taggers import tagger_by_name
from tasks.vocabularies import VocabularyChoice

if TYPE_CHECKING:
    from tasks.parts import MakePart, Parts

Report = Callable[[str, int, int | None], None]
"""Called with (what is being made, how many are done, how many there are)."""


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """What to prepare.

    Attributes:
      corpus: folder to make.
      source: of the documents, see `tasks.documents.open.open_source`; most simply
        JSON lines with `title` and `text`, plain or gzipped.
      name: of the corpus; its tasks are `<name>_ict`, `<name>_salient` and, with
        questions, `<name>_questions`.
      vocabulary: a BERT `vocab.txt`, or "" to train one on the text.
      vocabulary_size: wordpieces of a vocabulary that is trained.
      lowercase: whether text is lowercased; False for a cased vocabulary.
      strip_accents: whether accents are removed; None as BERT does, if it lowercases.
        False for scripts that this would take apart, such as Hangul.
      chunk_length: wordpieces of a block with its title and special pieces.
      tagger: of salient spans, see `tasks.taggers.tagger_by_name`.
      questions: JSON lines of questions, or "".
      query_length: wordpieces of a masked sentence or a question.
      inverse_cloze_query_length: wordpieces of an inverse cloze query.
      max_masks: masked wordpieces that are scored.
      validation_fraction: share of the articles no training example is made from.
      more_tasks: registered SeqIO tasks and mixtures to materialise as well.
      knowledge: the prepared corpus that is searched for the sentences of this one,
        where it is another (X and Z in REALM, section 4.3), or "". Its vocabulary is
        used, and the examples lie with it, where a trainer of it looks for them.
      modules: imported by every worker, for tasks of your own.
      seqio_cache: folder where SeqIO's caching tool has put examples, or "".
      seed: of random choices in making examples.
      part_bytes: about how much of the source is one part.
      scratch: in which folder the corpus gets one of its own for parts until all are
        there, or "" for one beside the corpus. On gs:// where Beam's workers are on
        other machines.
    """

    corpus: str
    source: str
    name: str
    vocabulary: str = ""
    vocabulary_size: int = 8192
    lowercase: bool = True
    strip_accents: bool | None = None
    chunk_length: int = inverse_cloze.DOCUMENT_LENGTH
    tagger: str = "auto"
    questions: str = ""
    query_length: int = masking.QUERY_LENGTH
    inverse_cloze_query_length: int = inverse_cloze.QUERY_LENGTH
    max_masks: int = masking.MAX_MASKS
    validation_fraction: float = VALIDATION_FRACTION
    more_tasks: Sequence[str] = ()
    knowledge: str = ""
    modules: Sequence[str] = ()
    seqio_cache: str = ""
    seed: int = 0
    part_bytes: int = 2 << 20
    scratch: str = ""


@dataclasses.dataclass(frozen=True)
class Workers:
    """Who does the work; nothing that is made depends on it.

    Attributes:
      count: processes on this machine; 0 for one a core.
      beam_flags: options of Apache Beam, such as --runner=DataflowRunner.
      max_bad_lines: damaged records to leave out before giving up.
    """

    count: int = 0
    beam_flags: Sequence[str] = ()
    max_bad_lines: int = 0


def run(
    config: PrepareConfig,
    report: Report,
    stop: threading.Event | None = None,
    workers: Workers = Workers(),
) -> BlockStore:
    """Makes what is missing of the corpus and its examples.

    Args:
      config: what to make.
      report: told of progress.
      stop: asks to end soon; what is done stays.
      workers: who makes it.

    Raises:
      BadInputError: the source is missing, empty or malformed, or the folder holds
        another corpus.
      StoppedError: asked to stop.
    """
    stop = stop or threading.Event()
    # What costs nothing to check comes before hours of work.
    wanted = _wanted_examples(config)
    _require_task_name(config.name)
    store = _make_blocks(config, report, stop, workers)
    tasks = _task_settings(config)
    missing = [
        (task, split)
        for task, split in wanted
        if not are_there(tasks, store, task, split)
    ]
    if missing:
        _make_examples(config, tasks, store, missing, report, stop, workers)
    return store


def make_blocks_of(config: PrepareConfig, workers: Workers = Workers()) -> BlockStore:
    """Makes the block store alone, without any examples.

    Raises:
      BadInputError: as `run`.
    """
    return _make_blocks(config, lambda *_: None, threading.Event(), workers)


def _scratch(config: PrepareConfig, name: str = "") -> str:
    """A folder of this corpus alone: it is removed in the end with all in it."""
    corpus = pathlib.Path(config.corpus)
    root = str(corpus.with_name(f"{corpus.name}.parts"))
    if config.scratch:
        whose = hashlib.sha256(str(corpus.absolute()).encode()).hexdigest()[:8]
        root = f"{config.scratch.rstrip('/')}/{corpus.name}-{whose}.parts"
    return f"{root}/{name}" if name else root


def _clear_scratch(config: PrepareConfig) -> None:
    store = open_store(_scratch(config))
    for name in store.list():
        store.delete(name)
    # On a disk folders outlive what was in them.
    shutil.rmtree(_scratch(config), ignore_errors=True)


def _run_parts(
    scratch: str,
    names: Sequence[str],
    make_part: "MakePart",
    what: str,
    report: Report,
    stop: threading.Event,
    workers: Workers,
) -> "Parts":
    # Beam takes seconds to import; a corpus that is complete does not need it. It warns
    # of clients for Google Cloud that are not there, and not needed.
    logging.disable(logging.WARNING)
    try:
        from tasks.parts import Parts, default_workers
    finally:
        logging.disable(logging.NOTSET)

    parts = Parts(scratch)
    parts.make(
        names,
        make_part,
        workers=workers.count or default_workers(),
        beam_flags=workers.beam_flags,
        report=lambda done, total: report(what, done, total),
        stop=stop,
    )
    return parts


def _require_task_name(name: str) -> None:
    if not re.fullmatch(r"\w+", name, re.ASCII):
        raise BadInputError(
            f"expected a NAME of letters, digits and underscores, got {name!r}; the "
            "SeqIO tasks are named after it"
        )


def _make_blocks(
    config: PrepareConfig, report: Report, stop: threading.Event, workers: Workers
) -> BlockStore:
    source = open_source(config.source, shard_bytes=config.part_bytes)
    tagger = tagger_by_name(config.tagger).name
    fingerprint = source.fingerprint()
    if (pathlib.Path(config.corpus) / INFO_FILE).exists():
        store = BlockStore.open(config.corpus)
        _require_same_settings(config, store, tagger, fingerprint)
        report("blocks", store.num_blocks, store.num_blocks)
        return store
    source.prepare_shards(_scratch(config, "unpacked"))
    shards = source.shards()
    choice = _vocabulary_choice(config)
    vocabulary = choice.given()
    if vocabulary is None:
        report("vocabulary", 0, 1)
        vocabulary = choice.train(source, fingerprint, open_store(_scratch(config)))
    settings = settings_fingerprint(
        vocabulary=vocabulary,
        tagger_name=tagger,
        chunk_length=config.chunk_length,
        source=fingerprint,
    )
    names = make_blocks.part_names(len(shards))
    parts = _run_parts(
        _scratch(config, f"blocks-{settings[:16]}-{config.part_bytes}"),
        names,
        make_blocks.MakeBlocks(
            source,
            dict(zip(names, shards, strict=True)),
            vocabulary,
            config.tagger,
            config.chunk_length,
            workers.max_bad_lines,
        ),
        "blocks",
        report,
        stop,
        workers,
    )
    try:
        store = make_blocks.assemble(
            config.corpus,
            map(parts.read, names),
            vocabulary=vocabulary,
            chunk_length=config.chunk_length,
            max_bad_lines=workers.max_bad_lines,
            metadata={
                "tagger": tagger,
                "source": fingerprint,
                "settings_fingerprint": settings,
                "vocabulary_training": choice.training(),
            },
        )
    except EmptyCorpusError:
        # Of no use to a later run. Whatever else goes wrong, such as a full disk, is
        # mended without making the parts again.
        _clear_scratch(config)
        raise
    _clear_scratch(config)
    return store


def _vocabulary_choice(config: PrepareConfig) -> VocabularyChoice:
    return VocabularyChoice(
        path=config.vocabulary,
        knowledge=config.knowledge,
        size=config.vocabulary_size,
        lowercase=config.lowercase,
        strip_accents=config.strip_accents,
    )


def _require_same_settings(
    config: PrepareConfig, store: BlockStore, tagger: str, source: str
) -> None:
    choice = _vocabulary_choice(config)
    wanted = settings_fingerprint(
        vocabulary=choice.given() or store.vocabulary,
        tagger_name=tagger,
        chunk_length=config.chunk_length,
        source=source,
    )
    trained = store.info.get("vocabulary_training")
    same = store.info.get("settings_fingerprint") == wanted
    if not same or trained != choice.training():
        raise BadInputError(
            f"expected {config.corpus} to be absent or made from {config.source} with "
            f"these settings, but it holds another corpus (tagger "
            f"{store.info.get('tagger')!r}, {store.chunk_length} wordpieces a block, "
            f"{store.vocabulary.size} in a vocabulary that was "
            f"{'trained on it' if trained else 'given'}); remove it or choose "
            "another CORPUS"
        )


def _wanted_examples(config: PrepareConfig) -> list[tuple[str, str]]:
    """The tasks and splits to materialise."""
    names = [f"{config.name}_salient", *config.more_tasks]
    if not config.knowledge:
        names.insert(0, f"{config.name}_ict")
    # Validation first: too small a share of too few articles leaves it empty, which
    # must be refused before anything is trained on the rest.
    wanted = [(name, split) for name in names for split in ("validation", "train")]
    if config.questions:
        splits = dict.fromkeys(q.split for q in read_questions(config.questions))
        wanted += [(f"{config.name}_questions", split) for split in splits]
    return wanted


def _task_settings(config: PrepareConfig) -> make_examples.TaskSettings:
    return make_examples.TaskSettings(
        corpus=config.corpus,
        name=config.name,
        questions=config.questions,
        document_length=config.chunk_length,
        query_length=config.query_length,
        inverse_cloze_query_length=config.inverse_cloze_query_length,
        max_masks=config.max_masks,
        validation_fraction=config.validation_fraction,
        seed=config.seed,
        knowledge=config.knowledge,
        modules=tuple(config.modules),
        seqio_cache=config.seqio_cache,
    )


def _make_examples(
    config: PrepareConfig,
    tasks: make_examples.TaskSettings,
    store: BlockStore,
    missing: Sequence[tuple[str, str]],
    report: Report,
    stop: threading.Event,
    workers: Workers,
) -> None:
    names = {
        (task, split): make_examples.part_names(tasks, task, split)
        for task, split in missing
    }
    settings = [dataclasses.asdict(tasks), store.info.get("settings_fingerprint")]
    if config.questions:
        settings.append(read_text(config.questions))
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    parts = _run_parts(
        _scratch(config, f"examples-{digest[:16]}"),
        list(itertools.chain.from_iterable(names.values())),
        make_examples.MakeExamples(tasks),
        "examples",
        report,
        stop,
        workers,
    )
    for task, split in missing:
        if names[task, split]:
            folder = examples_folder(config.knowledge or config.corpus, task, split)
            contents = map(parts.read, names[task, split])
            make_examples.assemble(tasks, task, split, folder, contents)
    _clear_scratch(config)
