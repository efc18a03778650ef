"""Measures a text before it is prepared: its size, what to mask in it, its alphabet."""

import collections
import dataclasses
import itertools
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from realm_jax.data.chunking import split_sentences
from realm_jax.data.documents import Document, held_out, share_of_at_least_one
from realm_jax.data.salient_spans import RuleTagger, Span
from realm_jax.data.terms import TermTagger
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.prepare.documents.files import is_compressed
from realm_jax.prepare.documents.lines import LineSource
from realm_jax.prepare.documents.open import open_source
from realm_jax.prepare.documents.source import SHARD_BYTES, Shard

MASKS = ("salient", "terms", "random_spans", "random_tokens")
"""Tasks of masked sentences, in the order in which they are preferred."""

# Of the sentences, so that training does not dwell on a few. Wikipedia's lead sections
# have names in six of ten, abstracts in three of ten or, in lower case, in one of 100.
_ENOUGH = 0.1
_SAMPLED_SHARDS = 4
_EXAMINED = 2000
_PASSAGE_CHARACTERS = 350
# What a query of 64 wordpieces holds of a longer sentence, about.
_QUERY_CHARACTERS = 280
# A wordpiece has a character at least, so a span that ends here fits any query.
_SURELY_READ = 50
_ENCODED = 1000
# A shorter word in a vocabulary's alphabet may be two letters, and known.
_LONG_WORD = 4
# A sentence of so many characters has the wordpieces that `inverse_cloze` divides.
_DIVISIBLE = 100


@dataclasses.dataclass(frozen=True)
class TextSample:
    """The first parts of a text.

    Attributes:
      scale: how much larger the text is, 1 if it was read whole.
    """

    documents: Sequence[Document]
    scale: float = 1.0

    @classmethod
    def read(cls, source: str, stop: threading.Event) -> "TextSample":
        """Reads the first parts of a text."""
        opened = open_source(source)
        shards = opened.shards()
        sampled = shards[:_SAMPLED_SHARDS]
        if isinstance(opened, LineSource):
            sampled = [_beginning(shard) for shard in sampled]
        documents = []
        for record in itertools.chain.from_iterable(map(opened.read, sampled)):
            if stop.is_set():
                raise StoppedError("stopped; nothing was written")
            if isinstance(record, Document):
                documents.append(record)
        return cls(documents, _size(shards) / max(_size(sampled), 1))

    def fit(self, vocabulary: WordPiece) -> "VocabularyFit":
        """Returns how well a vocabulary fits the text."""
        texts = [document.text for document in self.documents[:_ENCODED]]
        ids = vocabulary.ids_batch(texts)
        count = sum(map(len, ids))
        unknown = sum(int((of_one == vocabulary.unk).sum()) for of_one in ids)
        words = _long_words(texts)
        pieces = vocabulary.ids_batch(list(words))
        spelled = sum(
            times
            for (word, times), of_one in zip(words.items(), pieces, strict=True)
            if len(of_one) >= len(word) - 1
        )
        return VocabularyFit(
            unknown=unknown / max(count, 1),
            spelled=spelled / max(words.total(), 1),
            characters_per_piece=max(sum(map(len, texts)), 1) / max(count, 1),
        )


def _beginning(shard: Shard) -> Shard:
    """Returns a shard without the ends of large compressed files, which are not cut."""
    pieces = (
        dataclasses.replace(piece, stop=min(piece.stop, SHARD_BYTES))
        if is_compressed(piece.path)
        else piece
        for piece in shard.pieces
    )
    return Shard(tuple(pieces))


def _size(shards: Sequence[Shard]) -> int:
    return sum(piece.size for shard in shards for piece in shard.pieces)


@dataclasses.dataclass(frozen=True)
class VocabularyFit:
    """How well a vocabulary fits a text.

    Attributes:
      unknown: share of the wordpieces that are [UNK].
      spelled: share of the longer words that are cut into single letters, as those of a
        script of which the vocabulary has only the alphabet.
      characters_per_piece: mean length of a wordpiece with the space before it.
    """

    unknown: float
    spelled: float
    characters_per_piece: float


def _long_words(texts: Sequence[str]) -> collections.Counter[str]:
    split, clean = BertPreTokenizer().pre_tokenize_str, BertNormalizer().normalize_str
    return collections.Counter(
        word
        for text in texts
        for word, _ in split(clean(text))
        if len(word) >= _LONG_WORD
        and all(unicodedata.category(character)[0] in "LM" for character in word)
    )


@dataclasses.dataclass(frozen=True)
class Masks:
    """What is masked in a text.

    Attributes:
      kind: one of `MASKS`.
      examples: number of examples, about.
      share: share of the sentences that have one.
    """

    kind: str
    examples: int
    share: float


def choose_masks(sample: TextSample, fraction: float, asked: str = "") -> Masks:
    """Returns the first of `MASKS` that fits a text.

    It fits if a tenth of the sentences have examples, and those that are held out have
    some, too, as far as all are known.

    Args:
      asked: the kind that is chosen in any case, or "".
    """
    documents = sample.documents[:_EXAMINED]
    scale = sample.scale * len(sample.documents) / len(documents)
    passages = [list(_passages(document)) for document in documents]
    keys = _held_out_together(documents, passages)
    is_held = held_out(keys, share_of_at_least_one(keys, fraction))
    flat = list(itertools.chain.from_iterable(passages))
    terms = TermTagger(lambda: [passage.text for passage in flat])
    finders: dict[str, Callable[[_Passage], Sequence[Span]]] = {
        "salient": _names,
        "terms": lambda passage: terms.tag([passage.text])[0],
        "random_spans": lambda passage: _beginnings(passage, _num_words),
        "random_tokens": lambda passage: _beginnings(passage, len),
    }
    for kind in [asked] if asked else MASKS:
        found = [_examples_of(passage, finders[kind](passage)) for passage in flat]
        number = sum(made.examples for made in found)
        share = sum(made.sentences for made in found) / max(
            sum(len(passage.sentences) for passage in flat), 1
        )
        pairs = zip(found, is_held.tolist(), strict=True)
        sides = {held for made, held in pairs if made.surely}
        is_split = len(sides) == 2 or scale > 1
        if is_split and number and (asked or share >= _ENOUGH):
            return Masks(kind, round(scale * number), share)
    wanted = asked or " or ".join(MASKS)
    raise BadInputError(
        f"expected sentences in which {wanted} can be masked, in the articles that are "
        f"held out and in the others, got none among {len(flat)} passages of "
        f"{len(documents)} documents; give more text"
        + ", or other masks by --masks"
        * bool(asked)
    )


def require_pairs(sample: TextSample) -> None:
    """Requires that sentences can be paired with their blocks (inverse cloze task)."""
    passages = itertools.chain.from_iterable(map(_passages, sample.documents))
    if not any(
        len(passage.sentences) > 1 or len(passage.text) >= _DIVISIBLE
        for passage in passages
    ):
        raise BadInputError(
            "expected documents of several sentences, or of long ones, got single "
            "short sentences, which a retriever cannot be warmed up on; give longer "
            "documents, or a trained encoder by --weights=FOLDER"
        )


@dataclasses.dataclass(frozen=True)
class _Passage:
    """Consecutive sentences of a document, about as many as a block has."""

    text: str
    sentences: Sequence[tuple[int, int]]
    spans: Sequence[Span] | None


@dataclasses.dataclass(frozen=True)
class _Made:
    examples: int
    sentences: int
    surely: bool


def _passages(document: Document) -> Iterator[_Passage]:
    sentences = [
        (first, min(first + _PASSAGE_CHARACTERS, end))
        for start, end in document.sentences or split_sentences(document.text)
        for first in range(start, end, _PASSAGE_CHARACTERS)
    ]
    group: list[tuple[int, int]] = []
    for index, sentence in enumerate(sentences):
        group.append(sentence)
        start, end = group[0][0], sentence[1]
        if end - start < _PASSAGE_CHARACTERS and index + 1 < len(sentences):
            continue
        spans = document.spans
        if spans is not None:
            inside = (span for span in spans if start <= span.start < span.end <= end)
            spans = [Span(s.start - start, s.end - start, s.label) for s in inside]
        moved = [(first - start, last - start) for first, last in group]
        yield _Passage(document.text[start:end], moved, spans)
        group = []


def _held_out_together(
    documents: Sequence[Document], passages: Sequence[Sequence[_Passage]]
) -> list[str]:
    """Returns the key by which each passage is held out; see `BlockSource`."""
    if len(documents) == 1:
        return [f"block {block}" for block in range(len(passages[0]))]
    return [
        document.source_id
        for document, of_one in zip(documents, passages, strict=True)
        for _ in of_one
    ]


def _examples_of(passage: _Passage, spans: Sequence[Span]) -> _Made:
    """Returns the examples of a passage: a span that lies in a sentence is one."""
    examples = sentences = 0
    surely = False
    for start, end in passage.sentences:
        read = min(end, start + _QUERY_CHARACTERS)
        inside = [span for span in spans if start <= span.start < span.end <= read]
        examples += len(inside)
        sentences += bool(inside)
        surely |= any(span.end - start <= _SURELY_READ for span in inside)
    return _Made(examples, sentences, surely)


def _names(passage: _Passage) -> Sequence[Span]:
    if passage.spans is not None:
        return passage.spans
    return RuleTagger().tag([passage.text])[0]


def _beginnings(passage: _Passage, size: Callable[[str], int]) -> list[Span]:
    """Returns the beginning of each sentence whose size is more than one."""
    return [
        Span(start, start + 1, "")
        for start, end in passage.sentences
        if size(passage.text[start:end].strip()) > 1
    ]


def _num_words(text: str) -> int:
    clean = BertNormalizer().normalize_str(text)
    return len(BertPreTokenizer().pre_tokenize_str(clean))
