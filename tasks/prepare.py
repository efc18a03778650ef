"""Prepares a corpus: text to blocks, salient spans, and materialised examples.

    CORPUS/                              the block store (see `data/blocks.py`)
    CORPUS/examples/<task>/<split>/      examples a trainer reads without TensorFlow

What is there already is not made again; a killed run goes on where it was.
"""

import dataclasses
import itertools
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from realm_jax.data import inverse_cloze, masking
from realm_jax.data.blocks import INFO_FILE, BlockStore
from realm_jax.data.corpus import (
    Document,
    build_corpus,
    read_json_lines,
    settings_fingerprint,
    source_fingerprint,
)
from realm_jax.data.examples import Examples
from realm_jax.data.questions import question_examples, read_questions
from realm_jax.data.salient_spans import Tagger, tagger_by_name
from realm_jax.data.splits import VALIDATION_FRACTION
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError

Report = Callable[[str, int, int | None], None]
"""Called with (what is being made, how many are done, how many there are)."""


@dataclasses.dataclass(frozen=True)
class PrepareConfig:
    """What to prepare.

    Attributes:
      corpus: folder to make.
      source: JSON lines with `title` and `text`, plain or gzipped.
      name: of the corpus; its tasks are `<name>_ict`, `<name>_salient` and, with
        questions, `<name>_questions`.
      vocabulary: a BERT `vocab.txt`, or "" to train one on the text.
      vocabulary_size: wordpieces of a vocabulary that is trained.
      chunk_length: wordpieces of a block with its title and special pieces.
      tagger: of salient spans: "spacy", "rules", "given" or "auto".
      questions: JSON lines of questions, or "".
      query_length: wordpieces of a masked sentence or a question.
      inverse_cloze_query_length: wordpieces of an inverse cloze query.
      max_masks: masked wordpieces that are scored.
      validation_fraction: share of the articles no training example is made from.
      more_tasks: registered SeqIO tasks and mixtures to materialise as well.
      seed: of random choices in making examples.
    """

    corpus: str
    source: str
    name: str
    vocabulary: str = ""
    vocabulary_size: int = 8192
    chunk_length: int = inverse_cloze.DOCUMENT_LENGTH
    tagger: str = "auto"
    questions: str = ""
    query_length: int = masking.QUERY_LENGTH
    inverse_cloze_query_length: int = inverse_cloze.QUERY_LENGTH
    max_masks: int = masking.MAX_MASKS
    validation_fraction: float = VALIDATION_FRACTION
    more_tasks: Sequence[str] = ()
    seed: int = 0


def run(config: PrepareConfig, report: Report) -> BlockStore:
    """Makes what is missing of the corpus and its examples.

    Args:
      config: what to make.
      report: told of progress; may raise to stop.

    Raises:
      BadInputError: the source is missing, empty or malformed, or the folder holds
        another corpus.
    """
    # What costs nothing to check comes before hours of work.
    wanted = list(_wanted_examples(config))
    _require_task_name(config.name)
    store = _make_blocks(config, report)
    missing = [
        (task, split, folder)
        for task, split, folder in wanted
        if not _is_there(config, store, task, split, folder)
    ]
    if not missing:
        return store
    # TensorFlow takes seconds to import; a corpus that is complete does not need it.
    from tasks import corpora, materialise, questions

    corpora.register(
        config.name,
        config.corpus,
        query_length=config.query_length,
        inverse_cloze_query_length=config.inverse_cloze_query_length,
        document_length=config.chunk_length,
        max_masks=config.max_masks,
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
    for number, (task, split, folder) in enumerate(missing):
        report("examples", number, len(missing))
        folder.parent.mkdir(parents=True, exist_ok=True)
        splits = materialise.find_task(task).splits
        if split in splits:
            materialise.materialise(task, split, folder, seed=config.seed)
    report("examples", len(missing), len(missing))
    return store


def _require_task_name(name: str) -> None:
    if not re.fullmatch(r"\w+", name, re.ASCII):
        raise BadInputError(
            f"expected a NAME of letters, digits and underscores, got {name!r}; the "
            "SeqIO tasks are named after it"
        )


def examples_folder(corpus: str, task: str, split: str) -> pathlib.Path:
    """Where the examples of a task and split lie."""
    return pathlib.Path(corpus) / "examples" / task / split


def _wanted_examples(config: PrepareConfig) -> Iterator[tuple[str, str, pathlib.Path]]:
    names = [f"{config.name}_ict", f"{config.name}_salient", *config.more_tasks]
    # Validation first: too small a share of too few articles leaves it empty, which
    # must be refused before anything is trained on the rest.
    wanted = list(itertools.product(names, ("validation", "train")))
    if config.questions:
        splits = dict.fromkeys(q.split for q in read_questions(config.questions))
        wanted += [(f"{config.name}_questions", split) for split in splits]
    for task, split in wanted:
        yield task, split, examples_folder(config.corpus, task, split)


def _is_there(
    config: PrepareConfig,
    store: BlockStore,
    task: str,
    split: str,
    folder: pathlib.Path,
) -> bool:
    """Whether these very examples exist already.

    Raises:
      BadInputError: others do, and nothing is overwritten silently.
    """
    if not folder.exists():
        return False
    expect: dict[str, object] = {"vocabulary_fingerprint": store.vocabulary.fingerprint}
    if task in (f"{config.name}_ict", f"{config.name}_salient"):
        expect["corpus_fingerprint"] = store.fingerprint
        # The spans too: the corpus fingerprint does not know them.
        expect["settings_fingerprint"] = store.info.get("settings_fingerprint", "")
        expect["validation_fraction"] = config.validation_fraction
        expect["seed"] = config.seed
    examples = Examples.open(folder, expect=expect)
    if not _fits(config, store, task, split, examples):
        raise BadInputError(
            f"expected {folder} to be absent or made with these settings, but its "
            "examples are of other lengths or other questions; remove it to have it "
            "made again"
        )
    return True


def _fits(
    config: PrepareConfig, store: BlockStore, task: str, split: str, examples: Examples
) -> bool:
    """Whether examples have the lengths, and questions the contents, of `config`."""
    features = examples.features
    if task == f"{config.name}_ict":
        return (features["query_ids"].shape[1], features["document_ids"].shape[1]) == (
            config.inverse_cloze_query_length,
            config.chunk_length,
        )
    if task == f"{config.name}_salient":
        return (features["query_ids"].shape[1], features["mask_ids"].shape[1]) == (
            config.query_length,
            config.max_masks,
        )
    if task != f"{config.name}_questions":
        return True
    made = question_examples(
        read_questions(config.questions, split),
        store.vocabulary,
        query_length=config.query_length,
    )
    return all(
        np.array_equal(features[name], made[name])
        for name in ("question_ids", "answer_ids")
    )


def _make_blocks(config: PrepareConfig, report: Report) -> BlockStore:
    tagger = tagger_by_name(config.tagger)
    documents = read_json_lines(config.source)
    source = source_fingerprint(config.source)
    if (pathlib.Path(config.corpus) / INFO_FILE).exists():
        store = BlockStore.open(config.corpus)
        _require_same_settings(config, store, tagger, source)
        report("blocks", store.num_blocks, store.num_blocks)
        return store
    return build_corpus(
        documents,
        config.corpus,
        vocabulary=_vocabulary(config, report),
        tagger=tagger,
        chunk_length=config.chunk_length,
        source=source,
        metadata={"trained_vocabulary_size": _trained_size(config)},
        progress=lambda count: report("articles", count, None),
    )


def _trained_size(config: PrepareConfig) -> int | None:
    """Wordpieces of a vocabulary that is trained on the text, None if one is given."""
    return None if config.vocabulary else config.vocabulary_size


def _vocabulary(config: PrepareConfig, report: Report) -> WordPiece:
    if config.vocabulary:
        return WordPiece.load(config.vocabulary)
    report("vocabulary", 0, 1)

    def texts() -> Iterator[str]:
        document: Document
        for document in read_json_lines(config.source):
            yield document.title
            yield document.text

    # The store keeps a copy of its own.
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "vocab.txt"
        return WordPiece.train(texts(), config.vocabulary_size, path)


def _require_same_settings(
    config: PrepareConfig, store: BlockStore, tagger: Tagger, source: str
) -> None:
    vocabulary = store.vocabulary
    if config.vocabulary:
        vocabulary = WordPiece.load(config.vocabulary)
    wanted = settings_fingerprint(
        vocabulary=vocabulary,
        tagger_name=tagger.name,
        chunk_length=config.chunk_length,
        source=source,
    )
    trained_size = store.info.get("trained_vocabulary_size")
    if store.info.get(
        "settings_fingerprint"
    ) != wanted or trained_size != _trained_size(config):
        raise BadInputError(
            f"expected {config.corpus} to be absent or made from {config.source} with "
            f"these settings, but it holds another corpus (tagger "
            f"{store.info.get('tagger')!r}, {store.chunk_length} wordpieces a block, "
            f"{store.vocabulary.size} in a vocabulary that was "
            f"{'trained on it' if trained_size else 'given'}); remove it or choose "
            "another CORPUS"
        )
