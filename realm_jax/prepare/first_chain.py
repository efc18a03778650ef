"""Chooses a chain for a text and questions of one's own; see `realm init`."""

import dataclasses
import itertools
import json
import math
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from realm_jax.data.documents import VALIDATION_FRACTION, stable_uniform
from realm_jax.data.questions import (
    Question,
    describe_unknown_titles,
    parse_records,
    records_of,
    write_questions,
)
from realm_jax.data.words import normalise_title
from realm_jax.errors import BadInputError
from realm_jax.prepare.encoder_start import EncoderStart
from realm_jax.prepare.text_sample import Masks, TextSample, VocabularyFit

CHUNK_LENGTH = 96
"""Wordpieces of a block, as gin/runs/quickstart.gin has them."""

# Of English, about; a block is rarely full, for it holds whole sentences.
_CHARACTERS_PER_PIECE = 4.5
_FULL = 0.8
# REALM reads the null document, the sentence's own block, and retrieved ones.
_FEWEST_BLOCKS = 8
_FEW_DOCUMENTS = 1000
# The quickstart's reader has seen 4,908, and answered more than one that saw 832.
_FEW_QUESTIONS = 1000
_VALIDATION_OF_FEW = 0.05
# Questions of an update with a retriever that finds the right block first, and without.
_BATCH, _BATCH_FROM_NOTHING = 24, 8
# Each question is visited once, those of a small set as often as 352 are in 50 updates.
_VISITS_OF_FEW, _STEPS_OF_FEW = 50 * 24 / 352, 50
_FEWEST_STEPS, _MOST_STEPS = 20, 2000
# With fewer, exact match on dev is too noisy to choose a checkpoint by.
_ENOUGH_TO_CHOOSE = 1000
# English and Hindi in MiniLM's vocabulary have 0 to 2 %, Japanese has 30 %, Thai 67 %.
_MOST_UNKNOWN = 0.05
# Their index takes two cores a minute.
_MOST_BLOCKS_TO_WAIT_FOR = 10_000
# By an estimate; `realm evaluate` counts the words of twice as many.
_MOST_BLOCKS_BY_WORDS = 250_000
# Languages of Latin script have 0 to 1 % in it, Russian has 88 %.
_MOST_SPELLED = 0.2
_SHARES = {"train": 0.7, "dev": 0.1, "test": 0.2}


@dataclasses.dataclass(frozen=True)
class TextSize:
    """Size of a text.

    Attributes:
      is_estimate: whether it was extrapolated from the first parts of the text.
      untitled: number of documents without a title.
      titles: those of the documents that were read, as `normalise_title` makes them.
      alphabet: number of different characters in them.
      characters_per_piece: mean length of a wordpiece.
      held_out: number of documents to hold out, at most a twentieth of them.
    """

    documents: int
    characters: int
    is_estimate: bool
    untitled: int = 0
    titles: frozenset[str] = frozenset()
    alphabet: int = 0
    characters_per_piece: float = _CHARACTERS_PER_PIECE
    held_out: int = 0

    @property
    def validation_fraction(self) -> float:
        """Share of the articles that is held out."""
        if self.documents < _FEW_DOCUMENTS:
            return _VALIDATION_OF_FEW
        wanted = round(self.held_out / self.documents, 4)
        return max(VALIDATION_FRACTION, min(_VALIDATION_OF_FEW, wanted))

    @property
    def pieces(self) -> int:
        """Approximate number of wordpieces."""
        return round(self.characters / self.characters_per_piece)

    @property
    def blocks(self) -> int:
        """Approximate number of blocks of `CHUNK_LENGTH`."""
        return self.blocks_of(CHUNK_LENGTH)

    def blocks_of(self, chunk_length: int) -> int:
        """Returns the approximate number of blocks of some length, in wordpieces."""
        return max(self.documents, round(self.pieces / (_FULL * chunk_length)))


def text_size(sample: TextSample) -> TextSize:
    """Returns the size of a text, given its first parts."""
    documents = sample.documents
    characters = sum(len(d.title) + len(d.text) for d in documents)
    untitled = sum(not d.title.strip() for d in documents)
    return TextSize(
        documents=round(sample.scale * len(documents)),
        characters=round(sample.scale * characters),
        is_estimate=sample.scale > 1,
        untitled=round(sample.scale * untitled),
        titles=frozenset(normalise_title(d.title) for d in documents),
        alphabet=len(set().union(*(d.title + d.text for d in documents))),
    )


def measure_text(source: str, sample: TextSample) -> TextSize:
    """Returns the size of a text."""
    size = text_size(sample)
    if not size.documents or size.blocks < _FEWEST_BLOCKS:
        raise BadInputError(
            f"expected text for at least {_FEWEST_BLOCKS} blocks of {CHUNK_LENGTH} "
            f"wordpieces in {source}, got {size.documents} documents with "
            f"{size.characters} characters; a retriever needs something to choose from"
        )
    return size


@dataclasses.dataclass(frozen=True)
class Questions:
    """Questions of a chain.

    Attributes:
      are_new: whether splits were given to them, so that they are to be written.
    """

    path: str
    questions: Sequence[Question]
    are_new: bool

    @classmethod
    def read(cls, path: str) -> "Questions":
        """Reads questions that may lack splits."""
        records = list(records_of(path))
        if not records:
            raise BadInputError(
                f"expected questions in {path}, got none; give a JSON object a line "
                "with question and answers"
            )
        are_new = any("split" not in record for _, record in records)
        divided = _divided(records) if are_new else records
        return cls(path, list(parse_records(path, divided)), are_new)

    def write(self) -> None:
        """Writes them to `path`."""
        write_questions(self.path, self.questions)

    def count(self, split: str) -> int:
        """Returns the number of questions of a split."""
        return sum(question.split == split for question in self.questions)


def _divided(
    records: Sequence[tuple[int, dict[str, Any]]],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields records of questions with splits where they have none."""
    texts = [_asked(str(record.get("question"))) for _, record in records]
    # By a hash, so that the order of the file does not matter; the shares are exact.
    # A question that is asked twice is in one split.
    order = sorted(set(texts), key=lambda text: stable_uniform("split", text))
    ends = list(itertools.accumulate(_SHARES.values()))
    splits = {}
    for place, text in enumerate(order):
        share = (place + 0.5) / len(order)
        index = next(i for i, end in enumerate(ends) if share < end or end == ends[-1])
        splits[text] = list(_SHARES)[index]
    for text, (number, record) in zip(texts, records, strict=True):
        yield number, {"split": splits[text], **record}


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


def require_known(
    fit: VocabularyFit,
    path: str,
    otherwise: str = "--weights='' to train a vocabulary on the text",
) -> None:
    """Requires that a vocabulary has what a text is made of.

    Args:
      otherwise: what may be given instead of other weights.
    """
    advice = f"give {otherwise}, or --weights=FOLDER of a BERT of its language"
    if fit.unknown > _MOST_UNKNOWN:
        raise BadInputError(
            f"expected a vocabulary that has at least {1 - _MOST_UNKNOWN:.0%} of the "
            f"text's wordpieces, got {path}, in which {fit.unknown:.1%} are [UNK]; "
            f"{advice}"
        )
    if fit.spelled > _MOST_SPELLED:
        raise BadInputError(
            f"expected a vocabulary that has words of the text's language, got {path}, "
            f"which spells {fit.spelled:.0%} of them letter by letter; {advice}"
        )


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A fine-tuned model of the quickstart's size, which a chain goes on from."""

    model_dir: str
    vocabulary: str


@dataclasses.dataclass(frozen=True)
class FirstChain:
    """A chain for a text of one's own.

    Attributes:
      source: as of `prepare`.
      questions: questions of one's own, or None.
      encoder: published weights to start with, or None.
      start: a model to go on from instead, or None.
      fit: how well the vocabulary of `encoder` or `start` fits the text; if there are
        neither, that of weights which were passed over for it, or None.
    """

    root: str
    name: str
    source: str
    text: TextSize
    masks: Masks
    questions: Questions | None
    encoder: EncoderStart | None = None
    start: TrainedModel | None = None
    fit: VocabularyFit | None = None

    def __post_init__(self):
        if self.questions is None:
            return
        found = sorted({question.split for question in self.questions.questions})
        if not {"train", "test"}.issubset(found):
            raise BadInputError(
                f"expected questions of the splits train and test in "
                f"{self.questions.path}, got {', '.join(found)}; leave the field "
                "split out of all lines to have them drawn"
            )

    @property
    def is_searched_by_words(self) -> bool:
        """Whether the text is small enough for BM25, which counts words in memory."""
        return self.text.blocks <= _MOST_BLOCKS_BY_WORDS

    def description(self) -> list[str]:
        """Returns what was found, and what follows from it, a line each."""
        about = "about " if self.text.is_estimate else ""
        untitled = ""
        if self.text.untitled:
            untitled = f" ({self.text.untitled:,} without a title)"
        lines = [
            f"text: {about}{self.text.documents:,} documents{untitled}, "
            f"{self.text.characters:,} characters, some {self.text.blocks:,} blocks",
            f"masks: {self.masks.kind}, about {self.masks.examples:,} examples in "
            f"{self.masks.share:.0%} of the sentences (--masks gives others)",
            f"vocabulary: {self._vocabulary()}",
        ]
        if self.questions is None:
            answers = "the model answers as it is" if self.start else "no answers"
            lines.append(f"questions: none, so no fine-tuning: {answers}")
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
        if self.encoder:
            lines.append(f"encoder: {self.encoder.description}")
        return [*lines, f"model: {self._model()}"]

    def _vocabulary(self) -> str:
        trained = f"{self._vocabulary_size():,} wordpieces, trained on the text"
        if self.fit is None:
            return trained
        known = f"{self.fit.unknown:.1%} of the text is [UNK]"
        if self.fit.spelled >= 0.01:
            known += f", {self.fit.spelled:.0%} of its words are spelled in letters"
        if self.encoder or self.start:
            return f"that of the model, {known}"
        return f"{trained}; in MiniLM's {known}"

    def _model(self) -> str:
        if self.start:
            return f"goes on from {self.start.model_dir}"
        if not self.encoder:
            return (
                "BERT-tiny from nothing, which learns to retrieve but hardly to read; "
                "for more give --weights (`make data` fetches MiniLM's)"
            )
        model = self.encoder.model
        if not self.questions or self.questions.count("train") < _FEW_QUESTIONS:
            model += (
                "; so few questions teach a reader little: for English text "
                "--start=runs/quickstart goes on from one that `make quickstart` has "
                "trained"
            )
        return model

    def gin_file(self) -> str:
        """Returns the chain file."""
        base = "quickstart" if self.encoder or self.start else "from_nothing"
        return _FILE.format(
            base=base,
            root=self.root,
            name=self.name,
            source=self.source,
            questions=self.questions.path if self.questions else "",
            stages=json.dumps(self._stages()),
            settings="\n".join(self.settings()),
        )

    def _stages(self) -> list[str]:
        if self.start:
            return ["prepare", *(["finetune", "evaluate"] if self.questions else [])]
        stages = ["prepare", "warm-start", "pretrain"]
        return [*stages, "finetune", "evaluate"] if self.questions else stages

    def settings(self) -> Iterator[str]:
        """Yields the lines that differ from those of the chain that is included."""
        if self.start:
            yield f"WEIGHTS = {self.start.model_dir!r}"
            yield f"VOCABULARY = {self.start.vocabulary!r}"
            yield 'evaluate/MASKED_TASK = ""'
        elif self.encoder:
            yield from self.encoder.settings()
        else:
            yield f"VOCABULARY_SIZE = {self._vocabulary_size()}"
            if self.fit:
                yield "# Marks of its script are no accents."
                yield "prepare/STRIP_ACCENTS = False"
        yield ""
        if self.text.validation_fraction != VALIDATION_FRACTION:
            yield "# Of so few documents more are held out to measure on."
            yield f"prepare/VALIDATION_FRACTION = {self.text.validation_fraction}"
        if self.masks.kind != "salient" and not self.start:
            yield "# Names and dates are too few in this text to be masked."
            for setting in ("warm_start/TASK", "pretrain/TASK", "evaluate/MASKED_TASK"):
                if setting != "evaluate/MASKED_TASK" or self.questions:
                    yield f'{setting} = "{self.name}_{self.masks.kind}"'
        yield f"prepare/EXAMPLES = {json.dumps(self._examples())}"
        if self.encoder and not self.start:
            yield from self._refreshes()
        if self.questions is None:
            return
        if not self.questions.count("dev"):
            yield "# There are none of the split dev to measure recall on."
            yield 'pretrain/QUESTIONS = ""'
            yield "# Nor to choose a checkpoint by."
            yield 'finetune/QUESTIONS = ""'
        steps = self._finetune_steps()
        count, batch = self.questions.count("train"), self._questions_of_update()
        yield f"# {count} questions, {batch} an update."
        yield f"finetune/TRAIN_STEPS = {steps}"
        yield f"finetune/WARMUP_STEPS = {max(1, steps // 5)}"
        if self.questions.count("dev"):
            chooses = self.questions.count("dev") >= _ENOUGH_TO_CHOOSE
            period = math.ceil(steps / 4) if chooses else steps
            yield f"finetune/EVALUATION_PERIOD = {period}"
        if self.start:
            yield "# A tenth of the quickstart's rate, at which it unlearned to read."
            yield "finetune/LEARNING_RATE = 3e-5"
        if self.is_searched_by_words:
            yield "# The report says what `realm ask --hybrid` is worth."
            yield 'evaluate/BASELINES = ["hybrid"]'
        yield f'evaluate/TITLE = "REALM on {self.name}"'
        yield 'evaluate/ATTRIBUTION = ""'

    def _refreshes(self) -> Iterator[str]:
        """Yields how often the index is replaced, where not as in the quickstart."""
        if self.text.blocks > _MOST_BLOCKS_TO_WAIT_FOR:
            yield "# An index of so many blocks takes longer than all updates."
            yield "pretrain/REFRESH_PERIOD = 24"
            yield "pretrain/MAX_STALENESS_STEPS = None"

    def _examples(self) -> list[str]:
        questions = ["questions"] if self.questions else []
        if self.start:
            # Without questions the corpus is all that is needed.
            return questions or [self.masks.kind]
        pairs = [] if self.encoder else ["ict"]
        return [*pairs, self.masks.kind, *questions]

    def _finetune_steps(self) -> int:
        assert self.questions is not None
        updates = self.questions.count("train") / self._questions_of_update()
        of_few = min(_VISITS_OF_FEW * updates, _STEPS_OF_FEW)
        return min(max(math.ceil(max(updates, of_few)), _FEWEST_STEPS), _MOST_STEPS)

    def _questions_of_update(self) -> int:
        return _BATCH if self.encoder or self.start else _BATCH_FROM_NOTHING

    def _vocabulary_size(self) -> int:
        """Returns fewer wordpieces for little text, which has fewer words.

        Each character is one, and another within words.
        """
        size = min(8192, max(1000, self.text.characters // 30))
        return max(size, 2 * self.text.alphabet + 500)


_FILE = """# A chain for {source}, as `realm init` wrote it.
#
#   python -m tpu_launch local --gin_file={root}/chain.gin
#
# What does not stand here is as in gin/runs/{base}.gin, which explains each setting. A
# line such as pretrain/TRAIN_STEPS = 48 here, or --gin.pretrain/TRAIN_STEPS=48 on the
# command line, overrides it.
from __gin__ import dynamic_registration

include "gin/runs/{base}.gin"

ROOT = {root!r}
NAME = {name!r}
SOURCE = {source!r}
QUESTIONS = {questions!r}

STAGES = {stages}
{settings}
"""
