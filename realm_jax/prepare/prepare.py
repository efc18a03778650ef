"""Prepares a corpus: text to blocks, salient spans, and materialised examples.

    CORPUS/                              the block store (see `data/blocks.py`)
    CORPUS/examples/<task>/<split>/      examples a trainer reads without TensorFlow

Apache Beam makes both part by part, or for a small corpus this process: first the
tagged blocks, then the examples of each task. The bytes do not depend on the number of
workers, the size of a part or the runner. Existing outputs are not made again; a run
that was killed resumes with the missing parts.
"""

import dataclasses
import itertools
import re
import threading
from collections.abc import Iterator, Sequence

from realm_jax import ranges
from realm_jax.data import inverse_cloze, masking
from realm_jax.data.blocks import VOCABULARY_FILE, BlockStore
from realm_jax.data.documents import VALIDATION_FRACTION
from realm_jax.data.features import Example
from realm_jax.data.questions import read_questions
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.prepare import examples, vocabularies
from realm_jax.prepare.block_parts import unpack_arrays
from realm_jax.prepare.blocks import (
    PART_BYTES,
    BlocksConfig,
    loaded_tagger,
    prepare_blocks,
)
from realm_jax.prepare.corpus_tasks import CorpusTask
from realm_jax.prepare.examples import examples_folder
from realm_jax.prepare.fingerprints import module_code
from realm_jax.prepare.scratch import (
    ALL_CORES,
    Report,
    Scratch,
    Workers,
    check_of,
    only_writer,
)
from realm_jax.prepare.vocabularies import VocabularyTraining

# The examples of so many blocks take one process about as long as Beam takes to start.
_FEW_BLOCKS = 4096
_FEW_PARTS = 256
# Tasks of masked sentences that are made only where they are asked for.
_OTHER_MASKS = ("terms", "random_spans", "random_tokens")


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """Configuration of a corpus and its examples.

    Attributes:
      corpus: directory of the block store.
      source: source of the documents, see `documents.open.open_source`; in the simplest
        case JSON lines with `title` and `text`, plain or gzipped. "" for an existing
        corpus made by `update_corpus`: only examples are made then.
      name: name of the corpus; its tasks are `<name>_ict`, `<name>_salient` and, with
        questions, `<name>_questions`.
      vocabulary: a BERT `vocab.txt`, or "" to train one on the text.
      vocabulary_size: number of wordpieces of a trained vocabulary.
      lowercase: whether text is lowercased; None as the files beside the vocabulary
        say (see `load_vocabulary`), which a value must not contradict. One that is
        trained is lowercase by default.
      strip_accents: whether accents are removed; None as for `lowercase`, else as BERT,
        which strips them if it lowercases. False for scripts that this would decompose,
        such as Hangul.
      chunk_length: wordpieces of a block, title and special pieces included.
      tagger: tagger of salient spans: "spacy", "rules", "given" (only the spans that
        articles bring), "checkpoint:FOLDER" (a BERT token classifier) or "auto", which
        is spaCy where it is installed, else rules.
      questions: JSON lines of questions, or "".
      query_length: wordpieces of a masked sentence or a question.
      inverse_cloze_query_length: wordpieces of an inverse cloze query.
      max_masks: masked wordpieces that are scored.
      validation_fraction: share of the articles, by a hash of their id, that no
        training example is made from; at least one, and of a single article a share of
        its blocks.
      examples: the corpus's own tasks to materialise, such as "salient" or
        `<name>_salient`; empty for ict, salient and questions. Where there is little to
        mask in it as salient: terms, random_spans or random_tokens.
      more_tasks: other registered SeqIO tasks and mixtures to materialise.
      knowledge: another prepared corpus that is searched for the sentences of this one
        (X and Z in REALM, section 4.3), or "". Its vocabulary is used, and the examples
        are stored with it, where its trainer looks for them.
      modules: modules imported by every worker, for user-defined tasks.
      seqio_cache: output folder of SeqIO's caching tool, or "".
      seed: seeds random choices in making examples.
      part_bytes: approximate size of a part of the source, in bytes.
      scratch: parent of the corpus's folder for parts, or "" to place it beside the
        corpus. On gs:// where Beam's workers are on other machines.
    """

    corpus: str
    source: str
    name: str
    vocabulary: str = ""
    vocabulary_size: int = vocabularies.SIZE
    lowercase: bool | None = None
    strip_accents: bool | None = None
    chunk_length: int = inverse_cloze.DOCUMENT_LENGTH
    tagger: str = "auto"
    questions: str = ""
    query_length: int = masking.QUERY_LENGTH
    inverse_cloze_query_length: int = inverse_cloze.QUERY_LENGTH
    max_masks: int = masking.MAX_MASKS
    validation_fraction: float = VALIDATION_FRACTION
    examples: Sequence[str] = ()
    more_tasks: Sequence[str] = ()
    knowledge: str = ""
    modules: Sequence[str] = ()
    seqio_cache: str = ""
    seed: int = 0
    part_bytes: int = PART_BYTES
    scratch: str = ""

    def __post_init__(self):
        # [CLS], [SEP] and a wordpiece between them; of a block, two [SEP].
        ranges.require_ranges(
            self,
            corpus=ranges.LOCAL_FOLDER,
            name=ranges.TEXT,
            vocabulary_size=ranges.whole(1),
            chunk_length=ranges.whole(4),
            query_length=ranges.whole(3),
            inverse_cloze_query_length=ranges.whole(3),
            max_masks=ranges.whole(1),
            validation_fraction=ranges.SHARE,
            examples=ranges.TEXTS,
            more_tasks=ranges.TEXTS,
            modules=ranges.TEXTS,
            seed=ranges.SEED,
            part_bytes=ranges.whole(1),
        )


def run(
    config: PrepareConfig,
    report: Report,
    stop: threading.Event | None = None,
    workers: Workers = ALL_CORES,
) -> BlockStore:
    """Makes the missing parts of the corpus and its examples."""
    stop = stop or threading.Event()
    # Cheap checks come before hours of work.
    require_task_name(config.name)
    wanted = _wanted_examples(config)
    if config.source:
        store = prepare_blocks(_blocks_config(config), report, stop, workers)
    else:
        store = _existing(config)
    tasks = _task_settings(config)
    examples.own_tasks.cache_clear()  # The text and questions may have changed.
    found = {key: examples.find_examples(tasks, *key) for key in wanted}
    if "questions" in _wanted_suffixes(config):
        name = f"{config.name}_questions"
        splits = {split for task, split in wanted if task == name}
        examples.require_no_other_splits(tasks, name, splits)
    examples.report_other_code(store, filter(None, found.values()))
    missing = [key for key, made in found.items() if made is None]
    if missing:
        with only_writer(config.corpus):
            _make_examples(config, tasks, store, missing, report, stop, workers)
    return store


def require_task_name(name: str) -> None:
    """Requires a name that tasks can begin with."""
    if not re.fullmatch(r"\w+", name, re.ASCII):
        raise BadInputError(
            "expected a NAME of ASCII letters, digits and underscores, got "
            f"{name!r}; the SeqIO tasks are named after it"
        )


def _existing(config: PrepareConfig) -> BlockStore:
    """Opens an existing corpus, which was not made from a single source."""
    store = BlockStore.open(config.corpus)
    if store.chunk_length != config.chunk_length:
        raise BadInputError(
            f"expected the chunk_length {store.chunk_length} of {config.corpus}, got "
            f"{config.chunk_length}; set it, or give a SOURCE to prepare another corpus"
        )
    given = _vocabulary(config)
    if (
        isinstance(given, WordPiece)
        and given.fingerprint != store.vocabulary.fingerprint
    ):
        raise BadInputError(
            f"expected the vocabulary of {config.corpus}, got another by VOCABULARY or "
            "KNOWLEDGE; leave it out, or give a SOURCE to prepare another corpus"
        )
    tagger = store.info.get("tagger", "")
    if tagger and config.tagger != "auto":
        asked = loaded_tagger(config.tagger).name
        if asked != tagger:
            raise BadInputError(
                f"expected the TAGGER {tagger} of {config.corpus}, got {asked}; leave "
                "it out, or give a SOURCE to prepare another corpus"
            )
    return store


def _blocks_config(config: PrepareConfig) -> BlocksConfig:
    return BlocksConfig(
        corpus=config.corpus,
        source=config.source,
        vocabulary=_vocabulary(config),
        tagger=config.tagger,
        chunk_length=config.chunk_length,
        part_bytes=config.part_bytes,
        scratch=config.scratch,
        characters=_characters(config),
    )


def _characters(config: PrepareConfig) -> str:
    """Returns the characters of the questions, for a vocabulary that is trained."""
    if not config.questions:
        return ""
    questions = read_questions(config.questions)
    texts = (text for q in questions for text in (q.question, *q.answers))
    return "".join(sorted(set(itertools.chain.from_iterable(texts))))


def _vocabulary(config: PrepareConfig) -> WordPiece | VocabularyTraining:
    rules = {"lowercase": config.lowercase, "strip_accents": config.strip_accents}
    if config.knowledge or not (config.vocabulary or config.source):
        store = BlockStore.open(config.knowledge or config.corpus)
        return load_vocabulary(store.directory / VOCABULARY_FILE, **rules)
    if config.vocabulary:
        return load_vocabulary(config.vocabulary, **rules)
    return VocabularyTraining(
        config.vocabulary_size,
        lowercase=config.lowercase is not False,
        strip_accents=config.strip_accents,
    )


def _wanted_examples(config: PrepareConfig) -> list[tuple[str, str]]:
    """Returns the tasks and splits to materialise."""
    suffixes = _wanted_suffixes(config)
    of_blocks = [suffix for suffix in suffixes if suffix != "questions"]
    names = [f"{config.name}_{suffix}" for suffix in of_blocks]
    names += config.more_tasks
    # Validation first: a small share of few articles can leave it empty, which must be
    # refused before anything is trained on the rest.
    wanted = [(name, split) for name in names for split in ("validation", "train")]
    if "questions" in suffixes:
        splits = dict.fromkeys(q.split for q in read_questions(config.questions))
        wanted += [(f"{config.name}_questions", split) for split in splits]
    return wanted


def _wanted_suffixes(config: PrepareConfig) -> list[str]:
    """Returns the suffixes of the tasks to materialise, in order."""
    usual = [] if config.knowledge else ["ict"]
    usual += ["salient"] + (["questions"] if config.questions else [])
    known = [*usual, *_OTHER_MASKS]
    asked = [name.removeprefix(f"{config.name}_") for name in config.examples]
    for name, suffix in zip(config.examples, asked, strict=True):
        if suffix not in known:
            raise BadInputError(
                f"expected EXAMPLES out of {', '.join(known)}, got {name!r}; correct "
                'it, give QUESTIONS for "questions", or name other tasks in more_tasks'
            )
    return [suffix for suffix in known if suffix in (asked or usual)]


def _task_settings(config: PrepareConfig) -> examples.TaskSettings:
    names = {field.name for field in dataclasses.fields(examples.TaskSettings)}
    given = {name: getattr(config, name) for name in names - {"document_length"}}
    given |= {"document_length": config.chunk_length, "modules": tuple(config.modules)}
    return examples.TaskSettings(**given)


def _make_examples(
    config: PrepareConfig,
    tasks: examples.TaskSettings,
    store: BlockStore,
    missing: Sequence[tuple[str, str]],
    report: Report,
    stop: threading.Event,
    workers: Workers,
) -> None:
    jobs = []
    for name, split in missing:
        task = examples.find_task(tasks, name)
        if split in task.splits:  # A task of the user's own may lack one.
            metadata = examples.metadata(task, split, tasks.seed)
            metadata[examples.MADE_BY] = examples.made_by(tasks, name)
            parts = examples.part_names(task, split, metadata)
            jobs.append((task, split, metadata, parts))
    names = [name for *_, parts in jobs for name in parts]
    make = examples.MakeExamples(tasks, module_code(tasks.modules))
    scratch = Scratch(config.corpus, config.scratch)
    if _is_little(store, names, workers):
        for task, split, *_ in jobs:
            if isinstance(task, CorpusTask):
                task.ids(split, None)  # Refuses an empty one before any is written.

        def read(name: str) -> Iterator[Example]:
            report("examples", names.index(name), len(names))
            return make.batches(name, check_of(stop))

    else:
        read_part = scratch.make_parts(
            "examples",
            names,
            make,
            what="examples",
            report=report,
            stop=stop,
            workers=workers,
        )

        def read(name: str) -> Iterator[Example]:
            return iter([unpack_arrays(read_part(name))])

    for task, split, metadata, parts in jobs:
        folder = examples_folder(config.knowledge or config.corpus, task.name, split)
        batches = itertools.chain.from_iterable(map(read, parts))
        examples.write_split(task, split, folder, batches, metadata)
    report("examples", len(names), len(names))
    scratch.clear()


def _is_little(store: BlockStore, names: Sequence[str], workers: Workers) -> bool:
    """Returns whether one process is faster: others take seconds to start."""
    is_small = store.num_blocks <= _FEW_BLOCKS and len(names) <= _FEW_PARTS
    return is_small and workers.count <= 1 and not workers.beam_flags
