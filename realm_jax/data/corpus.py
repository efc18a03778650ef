"""Turns documents into blocks with salient spans, and names what decides them."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from realm_jax.data.block_writer import Block
from realm_jax.data.blocks import FORMAT_VERSION, BlockText
from realm_jax.data.chunking import pack, split_at, split_sentences
from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import Span, Tagger
from realm_jax.data.wordpiece import WordPiece


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


def chunk_each(
    documents: Sequence[Document],
    vocabulary: WordPiece,
    tagger: Tagger,
    chunk_length: int,
) -> list[list[Block]]:
    """Returns the blocks of each document; a block has at least one wordpiece.

    Its wordpieces are the concatenation of those of its sentences, which equals the
    wordpieces of its body as a whole (see `split_sentences`).
    """
    sentences = [_sentences(document) for document in documents]
    titles = vocabulary.encode_batch([document.title for document in documents])
    encodings = iter(
        vocabulary.encode_batch(
            [
                document.text[start:end]
                for document, ranges in zip(documents, sentences, strict=True)
                for start, end in ranges
            ]
        )
    )
    drafts: list[_Draft] = []
    counts = []
    for document, ranges, title in zip(documents, sentences, titles, strict=True):
        before = len(drafts)
        pieces = [encoding.ids for encoding in itertools.islice(encodings, len(ranges))]
        for block in pack(len(title), [len(ids) for ids in pieces], chunk_length):
            body_ids = np.concatenate(pieces[block.start : block.stop])
            if len(body_ids):
                ranges_here = ranges[block.start : block.stop]
                drafts.append(_Draft(document, ranges_here, title.ids, body_ids))
        counts.append(len(drafts) - before)
    untagged = [draft.body for draft in drafts if draft.document.spans is None]
    tags = iter(tagger.tag(untagged))
    made = (
        draft.finish(next(tags) if draft.document.spans is None else draft.given_spans)
        for draft in drafts
    )
    return [list(itertools.islice(made, count)) for count in counts]


def _sentences(document: Document) -> list[tuple[int, int]]:
    if document.sentences is None:
        return split_sentences(document.text)
    return split_at(document.text, [start for start, _ in document.sentences])


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
