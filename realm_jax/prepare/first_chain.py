"""Chooses a chain for a text and questions of one's own; see `realm init`."""

import dataclasses
import itertools
import json
import math
import pathlib
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from realm_jax.data.documents import Document
from realm_jax.data.normalisation import normalise_title
from realm_jax.data.question_titles import describe_unknown_titles
from realm_jax.data.questions import (
    Question,
    parse_question,
    read_questions,
    write_questions,
)
from realm_jax.data.records import json_object, read_text
from realm_jax.data.splits import stable_uniform
from realm_jax.data.tokenizer_files import read_settings
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.prepare.documents.open import open_source
from realm_jax.weights.tensors import weights_file

# Where `make data` puts MiniLM's weights, below a checkout.
_MINILM = pathlib.Path(".cache/data/minilm-l6")
_CHECKOUT = pathlib.Path(__file__).parents[2]

_CHUNK_LENGTH = 96
# Of English, about; a block is rarely full, for it holds whole sentences.
_CHARACTERS_PER_PIECE = 4.5
_FULL = 0.8
# REALM reads the null document, the sentence's own block, and retrieved ones.
_FEWEST_BLOCKS = 8
_SAMPLED_SHARDS = 4
_FEW_DOCUMENTS = 1000
_VALIDATION_OF_FEW = 0.05
# As in the quickstart, whose 352 questions are visited in 50 updates of 8.
_VISITS, _BATCH = 50 * 8 / 352, 8
_FEWEST_STEPS, _MOST_STEPS = 20, 2000
# With fewer, exact match on dev is too noisy to choose a checkpoint by.
_ENOUGH_TO_CHOOSE = 1000
_SHARES = {"train": 0.7, "dev": 0.1, "test": 0.2}


@dataclasses.dataclass(frozen=True)
class TextSize:
    """Size of a text.

    Attributes:
      documents: number of documents.
      characters: number of characters.
      is_estimate: whether it was extrapolated from the first parts of the text.
      untitled: number of documents without a title.
      titles: those of the documents that were read, as `normalise_title` makes them.
    """

    documents: int
    characters: int
    is_estimate: bool
    untitled: int = 0
    titles: frozenset[str] = frozenset()

    @property
    def blocks(self) -> int:
        """Approximate number of blocks."""
        pieces = self.characters / _CHARACTERS_PER_PIECE
        return max(self.documents, round(pieces / (_FULL * _CHUNK_LENGTH)))


def measure_text(source: str, stop: threading.Event) -> TextSize:
    """Reads the first parts of a text.

    Args:
      source: as of `prepare`.
      stop: ends reading.

    Raises:
      BadInputError: there is no such source, or too little in it.
      StoppedError: asked to stop.
    """
    opened = open_source(source)
    shards = opened.shards()
    sampled = shards[:_SAMPLED_SHARDS]
    documents = characters = untitled = 0
    titles = set()
    for record in itertools.chain.from_iterable(map(opened.read, sampled)):
        if stop.is_set():
            raise StoppedError("stopped; nothing was written")
        if isinstance(record, Document):
            documents += 1
            characters += len(record.title) + len(record.text)
            untitled += not record.title.strip()
            titles.add(normalise_title(record.title))
    scale = len(shards) / max(len(sampled), 1)
    size = TextSize(
        documents=round(scale * documents),
        characters=round(scale * characters),
        is_estimate=len(shards) > len(sampled),
        untitled=round(scale * untitled),
        titles=frozenset(titles),
    )
    if documents == 0 or size.blocks < _FEWEST_BLOCKS:
        raise BadInputError(
            f"expected text for at least {_FEWEST_BLOCKS} blocks of {_CHUNK_LENGTH} "
            f"wordpieces in {source}, got {documents} documents with {characters} "
            "characters; a retriever needs something to choose from"
        )
    return size


@dataclasses.dataclass(frozen=True)
class Questions:
    """Questions of a chain.

    Attributes:
      path: their file.
      questions: the questions, each with an id and a split.
      are_new: whether ids or splits were given to them, so that they are to be written.
    """

    path: str
    questions: Sequence[Question]
    are_new: bool

    @classmethod
    def read(cls, path: str) -> "Questions":
        """Reads questions that may lack ids and splits.

        Raises:
          BadInputError: the file or one of its lines cannot be read.
        """
        lines = read_text(path).split("\n")
        records = [
            json_object(line, f"{path}:{number}")
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
        if not records:
            raise BadInputError(
                f"expected questions in {path}, got none; give a JSON object a line "
                "with question and answers"
            )
        lacking = [
            name for name in ("id", "split") if any(name not in r for r in records)
        ]
        if not lacking:
            return cls(path, read_questions(path), are_new=False)
        return cls(path, list(_completed(path, records)), are_new=True)

    def write(self) -> None:
        """Writes them to `path`."""
        write_questions(self.path, self.questions)

    def count(self, split: str) -> int:
        """Returns the number of questions of a split."""
        return sum(question.split == split for question in self.questions)


def _completed(path: str, records: Sequence[dict[str, Any]]) -> Iterator[Question]:
    """Yields questions with ids and splits where the file has none."""
    texts = [_asked(str(record.get("question"))) for record in records]
    # By a hash, so that the order of the file does not matter; the shares are exact.
    # A question that is asked twice is in one split.
    order = sorted(set(texts), key=lambda text: stable_uniform("split", text))
    ends = list(itertools.accumulate(_SHARES.values()))
    splits = {}
    for place, text in enumerate(order):
        share = (place + 0.5) / len(order)
        index = next(i for i, end in enumerate(ends) if share < end or end == ends[-1])
        splits[text] = list(_SHARES)[index]
    for row, (text, record) in enumerate(zip(texts, records, strict=True)):
        line = {"id": f"question-{row + 1}", "split": splits[text], **record}
        yield parse_question(line, f"{path}:{row + 1}", row)


def _asked(question: str) -> str:
    """Returns a question without what does not tell it from another.

    Case, the form of characters, spaces and punctuation do not.
    """
    folded = unicodedata.normalize("NFKC", question).casefold()
    words = "".join(c if c.isalnum() or _is_mark(c) else " " for c in folded).split()
    return " ".join(words) or folded


def _is_mark(character: str) -> bool:
    # Vowel signs of Indic scripts are no letters of their own, but tell words apart.
    return unicodedata.category(character).startswith("M")


def find_weights(folder: str | None) -> str:
    """Returns the weights to start from.

    Args:
      folder: a folder with weights, "" for none, None for MiniLM's if they are there.

    Raises:
      BadInputError: the folder has no weights with a vocabulary, or those of another
        tokenizer than BERT's.
    """
    if folder is None:
        for root in (pathlib.Path(), _CHECKOUT):
            if weights_file(str(root / _MINILM)) is not None:
                return str(root / _MINILM)
        return ""
    if folder and not (
        weights_file(folder) is not None and pathlib.Path(folder, "vocab.txt").exists()
    ):
        raise BadInputError(
            f"expected weights and vocab.txt in {folder}, found none; give the folder "
            "of a published BERT, or --weights='' to start from nothing"
        )
    read_settings(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A fine-tuned model of the quickstart's size, which a chain goes on from.

    Attributes:
      model_dir: its model directory.
      vocabulary: vocab.txt of its corpus.
    """

    model_dir: str
    vocabulary: str


@dataclasses.dataclass(frozen=True)
class FirstChain:
    """A chain for a text of one's own.

    Attributes:
      root: folder of the chain.
      name: name of the corpus.
      source: as of `prepare`.
      text: size of the text.
      questions: questions of one's own, or None.
      weights: folder of BERT weights, or "".
      start: a model to go on from instead, or None.
    """

    root: str
    name: str
    source: str
    text: TextSize
    questions: Questions | None
    weights: str = ""
    start: TrainedModel | None = None

    def __post_init__(self):
        if self.questions is None:
            return
        for split in ("train", "test"):
            if not self.questions.count(split):
                found = sorted(
                    {question.split for question in self.questions.questions}
                )
                raise BadInputError(
                    f"expected questions of the splits train and test in "
                    f"{self.questions.path}, got {', '.join(found)}; leave the field "
                    "split out of all lines to have them drawn"
                )

    def description(self) -> list[str]:
        """Returns what was found, and what follows from it, a line each."""
        about = "about " if self.text.is_estimate else ""
        untitled = ""
        if self.text.untitled:
            untitled = f" ({self.text.untitled:,} without a title)"
        lines = [
            f"text: {about}{self.text.documents:,} documents{untitled}, "
            f"{self.text.characters:,} characters, some {self.text.blocks:,} blocks"
        ]
        if self.questions is None:
            lines.append("questions: none, so nothing is fine-tuned or answered")
        else:
            counts = ", ".join(
                f"{self.questions.count(split)} {split}" for split in _SHARES
            )
            drawn = f", drawn into {self.questions.path}" * self.questions.are_new
            lines.append(f"questions: {counts}{drawn}")
            # Of a text that was not read to its end `prepare` finds out.
            if not self.text.is_estimate and (
                unknown := describe_unknown_titles(
                    self.questions.questions, self.text.titles
                )
            ):
                lines.append(f"warning: {unknown}")
        return [*lines, f"model: {self._model()}"]

    def _model(self) -> str:
        if self.start:
            return f"goes on from {self.start.model_dir}"
        if not self.weights:
            return (
                "BERT-tiny from nothing, which learns to retrieve but hardly to read; "
                "for more give --weights (`make data` fetches MiniLM's)"
            )
        model = f"MiniLM's size, from {self.weights}"
        if self.text.documents < _FEW_DOCUMENTS:
            model += (
                "; so few documents teach a reader little, --start=runs/quickstart "
                "goes on from one that `make quickstart` has trained"
            )
        return model

    def gin_file(self) -> str:
        """Returns the chain file."""
        base = "quickstart" if self.weights or self.start else "from_nothing"
        return _FILE.format(
            base=base,
            root=self.root,
            name=self.name,
            source=self.source,
            questions=self.questions.path if self.questions else "",
            stages=json.dumps(self._stages()),
            settings="\n".join(self._settings()),
        )

    def _stages(self) -> list[str]:
        if self.start:
            return ["prepare", *(["finetune", "evaluate"] if self.questions else [])]
        stages = ["prepare", "warm-start", "pretrain"]
        return [*stages, "finetune", "evaluate"] if self.questions else stages

    def _settings(self) -> Iterator[str]:
        """Yields the lines that differ from those of the chain that is included."""
        if self.start:
            yield f'WEIGHTS = "{self.start.model_dir}"'
            yield f'VOCABULARY = "{self.start.vocabulary}"'
            yield 'evaluate/MASKED_TASK = ""'
        elif self.weights:
            yield f'WEIGHTS = "{self.weights}"'
            yield f'VOCABULARY = "{self.weights}/vocab.txt"'
        else:
            yield f"VOCABULARY_SIZE = {self._vocabulary_size()}"
        yield ""
        if self.text.documents < _FEW_DOCUMENTS:
            yield "# Of so few documents more are held out to measure on."
            yield f"prepare/VALIDATION_FRACTION = {_VALIDATION_OF_FEW}"
        yield f"prepare/EXAMPLES = {json.dumps(self._examples())}"
        if self.questions is None:
            return
        if not self.questions.count("dev"):
            yield "# There are none of the split dev to measure recall on."
            yield 'pretrain/QUESTIONS = ""'
            yield "# Nor to choose a checkpoint by."
            yield 'finetune/QUESTIONS = ""'
        steps = self._finetune_steps()
        yield f"# {self.questions.count('train')} questions, 8 an update."
        yield f"finetune/TRAIN_STEPS = {steps}"
        yield f"finetune/WARMUP_STEPS = {max(1, steps // 5)}"
        if self.questions.count("dev"):
            chooses = self.questions.count("dev") >= _ENOUGH_TO_CHOOSE
            period = math.ceil(steps / 4) if chooses else steps
            yield f"finetune/EVALUATION_PERIOD = {period}"
        if self.start:
            yield "# A tenth of the quickstart's rate, at which it unlearned to read."
            yield "finetune/LEARNING_RATE = 3e-5"
        yield f'evaluate/TITLE = "REALM on {self.name}"'
        yield 'evaluate/ATTRIBUTION = ""'

    def _examples(self) -> list[str]:
        questions = ["questions"] if self.questions else []
        if self.start:
            # Without questions the corpus is all that is needed.
            return questions or ["salient"]
        pairs = [] if self.weights else ["ict"]
        return [*pairs, "salient", *questions]

    def _finetune_steps(self) -> int:
        assert self.questions is not None
        visits = _VISITS * self.questions.count("train")
        return min(max(math.ceil(visits / _BATCH), _FEWEST_STEPS), _MOST_STEPS)

    def _vocabulary_size(self) -> int:
        """Returns fewer wordpieces for little text, which has fewer words."""
        return min(8192, max(1000, self.text.characters // 30))


_FILE = """# A chain for {source}, as `realm init` wrote it.
#
#   python -m tpu_launch local --gin_file={root}/chain.gin
#
# What does not stand here is as in gin/runs/{base}.gin, which explains each setting. A
# line such as pretrain/TRAIN_STEPS = 48 here, or --gin.pretrain/TRAIN_STEPS=48 on the
# command line, overrides it.
from __gin__ import dynamic_registration

include "gin/runs/{base}.gin"

ROOT = "{root}"
NAME = "{name}"
SOURCE = "{source}"
QUESTIONS = "{questions}"

STAGES = {stages}
{settings}
"""
