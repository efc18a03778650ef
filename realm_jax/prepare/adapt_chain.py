"""Chooses the chain of `realm adapt`: an encoder and a text, without a question."""

import dataclasses
import threading
from collections.abc import Iterator

from realm_jax.data.documents import Document
from realm_jax.data.records import BadRecord
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import read_all
from realm_jax.prepare.first_chain import CHUNK_LENGTH, FirstChain, TextSize

_FEWEST_BLOCKS = 100
_HELD_OUT = 200
# As many updates as an index on two cores takes, and a tenth of them to warm up.
_REFRESH_PERIOD = 40
_WARMUP_STEPS = 5
# Chosen on Cranfield (docs/adapt.md): the weight, queries of an update, and a share of
# the reader's rate.
_BM25_WEIGHT = 0.5
_QUERIES = 32
_RETRIEVER_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a text consists of, by a look at every document."""

    ids: frozenset[str]
    empty: int
    duplicates: int
    longest: str

    @classmethod
    def read(cls, source: str, stop: threading.Event) -> "Survey":
        """Reads a text."""
        ids, texts = set(), set()
        documents, empty, longest = 0, 0, ""
        for record in read_all(open_source(source)):
            if stop.is_set():
                raise StoppedError("stopped; nothing was written")
            if isinstance(record, BadRecord):
                raise BadInputError(f"{record.where}: {record.reason}")
            if not isinstance(record, Document):
                continue
            documents += 1
            ids.add(record.source_id)
            empty += not record.text.strip()
            texts.add(hash(record.text.strip()))
            longest = max(longest, record.text, key=len)
        distinct = len(texts - {hash("")})
        return cls(frozenset(ids), empty, documents - empty - distinct, longest)

    def description(self) -> list[str]:
        """Returns a line if there is something to say."""
        if not self.empty + self.duplicates:
            return []
        return [
            f"of the documents, {self.empty:,} have no text and {self.duplicates:,} "
            "have that of another one"
        ]


def require_enough(source: str, size: TextSize, survey: Survey) -> TextSize:
    """Returns the size of a text, with more of it held out than by default."""
    useless = survey.empty + survey.duplicates
    share = 1.0 - useless / max(size.documents, 1)
    if share * size.blocks < _FEWEST_BLOCKS:
        raise BadInputError(
            f"expected text for at least {_FEWEST_BLOCKS} blocks of {CHUNK_LENGTH} "
            f"wordpieces, some 40,000 characters, in {source}, got "
            f"{size.documents:,} documents with {size.characters:,} characters, of "
            f"which {useless:,} are empty or copies; an encoder learns nothing from so "
            "little, so use it as it is, or give more text"
        )
    return dataclasses.replace(size, held_out=_HELD_OUT)


def require_measurable(source: str, survey: Survey, vocabulary: WordPiece) -> None:
    """Requires a document that is longer than a block, where there are no queries."""
    if len(vocabulary.ids_batch([survey.longest])[0]) < CHUNK_LENGTH:
        raise BadInputError(
            f"expected documents longer than a block of {CHUNK_LENGTH} wordpieces in "
            f"{source}, whose sentences can look for its others, got shorter ones "
            "alone; give queries to measure with, by --queries and --qrels"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptChain(FirstChain):
    """A chain that ends with a retriever."""

    survey: Survey
    updates: int

    @property
    def task(self) -> str:
        """The task of masked sentences."""
        return f"{self.name}_{self.masks.kind}"

    def settings(self) -> Iterator[str]:
        """Yields the lines that differ from those of the quickstart."""
        yield from super().settings()
        yield ""
        yield "# The query tower learns from BM25 (docs/adapt.md)."
        yield f'warm_start/PAIRS_TASK = "{self.name}_ict"'
        yield f"warm_start/BM25_WEIGHT = {_BM25_WEIGHT}"
        yield f"warm_start/BATCH_SIZE = {_QUERIES}"
        yield f"warm_start/RETRIEVER_RATE = {_RETRIEVER_RATE}"
        yield 'warm_start/CLIP = "per_model"'
        if self.encoder is not None and self.encoder.is_projected:
            yield 'warm_start/PROJECTION = "lda"'
        yield ""
        yield f"pretrain/TRAIN_STEPS = {self.updates}"
        yield f"pretrain/WARMUP_STEPS = {min(self.updates, _WARMUP_STEPS)}"

    def description(self) -> list[str]:
        """Returns what was found, and what follows from it, a line each."""
        text, *others = super().description()
        questions = next(line for line in others if line.startswith("questions"))
        others.remove(questions)
        found = [text, *self.survey.description(), *others]
        return [line.removesuffix(" (--masks gives others)") for line in found]

    def _refreshes(self) -> Iterator[str]:
        yield f"pretrain/REFRESH_PERIOD = {min(self.updates, _REFRESH_PERIOD)}"
        yield "pretrain/MAX_STALENESS_STEPS = None"

    def _examples(self) -> list[str]:
        return ["ict", self.masks.kind]

    def _model(self) -> str:
        assert self.encoder is not None
        updates = f"{self.updates} updates of REALM (--updates gives others)"
        return f"{self.encoder.model}; {updates}"
