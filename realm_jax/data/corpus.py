"""Turns documents into blocks with salient spans, and names what decides them."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from realm_jax.data.block_writer import Block
from realm_jax.data.blocks import FORMAT_VERSION, BlockText
from realm_jax.data.chunking import (
    NUM_SPECIAL_PIECES,
    divide,
    pack,
    require_room,
    split_at,
    split_sentences,
)
from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import Span, Tagger
from realm_jax.data.wordpiece import WordPiece

_Range = tuple[int, int]


def settings_fingerprint(
    *, vocabulary: WordPiece, tagger_name: str, chunk_length: int, source: str
) -> str:
    """Returns a hash of everything that determines the content of a corpus.

    A store whose corpus.json has this `settings_fingerprint` need not be made again.
    """
    settings: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "vocabulary": vocabulary.fingerprint,
        "tagger": tagger_name,
        "chunk_length": chunk_length,
        "source": source,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class Chunked(NamedTuple):
    """Blocks of documents.

    Attributes:
      blocks: the blocks of each document; a block has at least one wordpiece.
      shortened_titles: number of documents whose title was longer than half a block.
      divisions: number of cuts in sentences that were longer than a block.
      unread_pieces: wordpieces beyond the end of their block, of words that are longer
        than one.
    """

    blocks: list[list[Block]]
    shortened_titles: int
    divisions: int
    unread_pieces: int


def chunk_each(
    documents: Sequence[Document],
    vocabulary: WordPiece,
    tagger: Tagger,
    chunk_length: int,
) -> Chunked:
    """Returns the blocks of each document.

    The wordpieces of a block are the concatenation of those of its sentences, which
    equals the wordpieces of its body as a whole (see `split_sentences`). A title has at
    most half of a block, and a sentence that does not fit the rest is divided.
    """
    require_room(chunk_length)
    room = chunk_length - NUM_SPECIAL_PIECES
    titles = vocabulary.ids_batch([document.title for document in documents])
    # The text has at least half of a block.
    shortened = [title[: room // 2] for title in titles]
    drafts: list[_Draft] = []
    counts = []
    divisions = unread = 0
    for document, title, (ranges, pieces) in zip(
        documents, shortened, _split(documents, vocabulary), strict=True
    ):
        before = len(drafts)
        if any(len(ids) > room - len(title) for ids in pieces):
            whole = len(ranges)
            ranges, pieces = _divided(
                document.text, ranges, pieces, vocabulary, room - len(title)
            )
            divisions += len(ranges) - whole
        for block in pack(len(title), [len(ids) for ids in pieces], chunk_length):
            body_ids = np.concatenate(pieces[block.start : block.stop])
            if len(body_ids):
                ranges_here = ranges[block.start : block.stop]
                drafts.append(_Draft(document, ranges_here, title, body_ids))
                unread += max(0, len(title) + len(body_ids) - room)
        counts.append(len(drafts) - before)
    untagged = [draft.body for draft in drafts if draft.document.spans is None]
    tags = iter(tagger.tag(untagged))
    made = (
        draft.finish(next(tags) if draft.document.spans is None else draft.given_spans)
        for draft in drafts
    )
    return Chunked(
        [list(itertools.islice(made, count)) for count in counts],
        shortened_titles=sum(len(title) > room // 2 for title in titles),
        divisions=divisions,
        unread_pieces=unread,
    )


def _split(
    documents: Sequence[Document], vocabulary: WordPiece
) -> Iterator[tuple[list[_Range], list[np.ndarray]]]:
    """Yields the sentences of each document and their wordpieces."""
    chinese = vocabulary.tokenize_chinese_chars
    sentences = [_sentences(document, chinese) for document in documents]
    ids = iter(
        vocabulary.ids_batch(
            [
                document.text[start:end]
                for document, ranges in zip(documents, sentences, strict=True)
                for start, end in ranges
            ]
        )
    )
    for ranges in sentences:
        yield ranges, list(itertools.islice(ids, len(ranges)))


def _divided(
    text: str,
    ranges: Sequence[_Range],
    pieces: Sequence[np.ndarray],
    vocabulary: WordPiece,
    room: int,
) -> tuple[list[_Range], list[np.ndarray]]:
    """Returns sentences and their wordpieces, those longer than `room` in parts."""
    parts: list[_Range] = []
    ids_of_parts: list[np.ndarray] = []
    for (start, end), ids in zip(ranges, pieces, strict=True):
        begins = [0]
        if len(ids) > room:
            sentence = text[start:end]
            offsets = vocabulary.encode(sentence).offsets
            begins = divide(sentence, offsets, room, vocabulary.tokenize_chinese_chars)
            starts = [start + int(offsets[piece, 0]) for piece in begins[1:]]
            found = itertools.pairwise([start, *starts, end])
            parts += [(a, a + len(text[a:b].rstrip())) for a, b in found]
        else:
            parts.append((start, end))
        ids_of_parts += np.split(ids, begins[1:])
    return parts, ids_of_parts


def _sentences(
    document: Document, tokenize_chinese_chars: bool
) -> list[tuple[int, int]]:
    if document.sentences is None:
        return split_sentences(document.text, tokenize_chinese_chars)
    starts = [start for start, _ in document.sentences]
    return split_at(document.text, starts, tokenize_chinese_chars)


class _Draft(NamedTuple):
    """A block before its spans are known; `sentences` count from the document start."""

    document: Document
    sentences: list[tuple[int, int]]
    title_ids: np.ndarray
    body_ids: np.ndarray

    @property
    def start(self) -> int:
        return self.sentences[0][0]

    @property
    def body(self) -> str:
        return self.document.text[self.start : self.sentences[-1][1]]

    @property
    def given_spans(self) -> list[Span]:
        return [
            Span(start - self.start, end - self.start, label)
            for start, end, label in sorted(self.document.spans or ())
        ]

    def finish(self, spans: Iterable[Span]) -> Block:
        """Returns the block with the spans that lie inside a sentence."""
        sentences = [(a - self.start, b - self.start) for a, b in self.sentences]
        spans_inside = [
            span
            for span in spans
            if any(a <= span.start and span.end <= b for a, b in sentences)
        ]
        document = self.document
        text = BlockText(
            document.title, self.body, document.source_id, sentences, spans_inside
        )
        return Block(self.title_ids, self.body_ids, text)
