"""Builds a knowledge corpus: documents to sentences to blocks with salient spans."""

import gzip
import hashlib
import itertools
import json
import os
import re
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from realm_jax.data.block_writer import Block, BlockWriter
from realm_jax.data.blocks import FORMAT_VERSION, BlockStore, BlockText
from realm_jax.data.chunking import pack, split_sentences
from realm_jax.data.salient_spans import Span, Tagger
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError

# Enough for the tokenizer and the tagger to work in batches, little to keep in memory.
_DOCUMENTS_PER_BATCH = 512
_GIVEN = "GIVEN"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """An article.

    Attributes:
      title: its title; may be empty.
      text: its text; one without any wordpiece is left out of the corpus.
      source_id: identifies it; blocks of one article share it.
      spans: salient spans in characters of `text`, or None to have them tagged.
    """

    title: str
    text: str
    source_id: str
    spans: tuple[Span, ...] | None = None


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[Document]:
    """Reads documents from JSON lines, `.gz` or plain.

    Each line is an object with `title` and `text`, perhaps `id` (the title if absent)
    and `spans` (a list of [start, end] or [start, end, label] in characters of the
    text). Other fields are ignored, and so are empty lines.

    Raises:
      BadInputError: the file is missing or empty; while reading: a line is no such
        object. File and line are named.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInputError(
            f"expected a corpus of JSON lines at {path}, found no such file; check the "
            "path."
        )
    if path.stat().st_size == 0:
        raise BadInputError(
            f"expected JSON lines with title and text in {path}, but the file is "
            "empty; check how it was made."
        )
    return _read_documents(path)


def build_corpus(
    documents: Iterable[Document],
    directory: str | os.PathLike[str],
    *,
    vocabulary: WordPiece,
    tagger: Tagger,
    chunk_length: int,
    source: str = "",
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> BlockStore:
    """Builds and opens a block store.

    The same documents and settings give the same bytes. Memory does not grow with the
    corpus but by the offsets of its blocks.

    Args:
      documents: in the order their blocks shall have; consumed once.
      directory: where the store appears when it is complete; absent or empty.
      vocabulary: the tokenizer; it is copied into the store.
      tagger: finds the salient spans of documents that bring none.
      chunk_length: wordpieces of a block with its title and special pieces.
      source: identifies the documents, for `settings_fingerprint`.
      metadata: more values for corpus.json.
      progress: called with the number of documents read so far.

    Raises:
      BadInputError: no document has text, `directory` is taken, `chunk_length` has no
        room, a document is malformed, or the disk is full.
    """
    num_documents = 0
    with BlockWriter(directory, vocabulary, chunk_length) as writer:
        for batch in _batched(documents, _DOCUMENTS_PER_BATCH):
            for block in chunk_documents(batch, vocabulary, tagger, chunk_length):
                writer.add(block)
            num_documents += len(batch)
            if progress is not None:
                progress(num_documents)
        writer.metadata |= {
            **(metadata or {}),
            "num_documents": num_documents,
            "tagger": tagger.name,
            "source": source,
            "settings_fingerprint": settings_fingerprint(
                vocabulary=vocabulary,
                tagger_name=tagger.name,
                chunk_length=chunk_length,
                source=source,
            ),
        }
    return BlockStore.open(directory)


def settings_fingerprint(
    *, vocabulary: WordPiece, tagger_name: str, chunk_length: int, source: str
) -> str:
    """Returns a hash of everything that decides what `build_corpus` writes.

    A store whose corpus.json has this `settings_fingerprint` need not be built again.
    """
    settings: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "vocabulary": vocabulary.fingerprint,
        "tagger": tagger_name,
        "chunk_length": chunk_length,
        "source": source,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def source_fingerprint(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 (hex) of a file, as `source` of `build_corpus`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def chunk_documents(
    documents: Sequence[Document],
    vocabulary: WordPiece,
    tagger: Tagger,
    chunk_length: int,
) -> list[Block]:
    """Returns the blocks of documents, in order; a block has at least one wordpiece.

    Its wordpieces are those of its sentences, one after the other; these are also
    those of its body as a whole (see `split_sentences`).
    """
    sentences = [split_sentences(document.text) for document in documents]
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
    drafts = []
    for document, ranges, title in zip(documents, sentences, titles, strict=True):
        pieces = [encoding.ids for encoding in itertools.islice(encodings, len(ranges))]
        for block in pack(len(title), [len(ids) for ids in pieces], chunk_length):
            body_ids = np.concatenate(pieces[block.start : block.stop])
            if len(body_ids):
                ranges_here = ranges[block.start : block.stop]
                drafts.append(_Draft(document, ranges_here, title.ids, body_ids))
    untagged = [draft.body for draft in drafts if draft.document.spans is None]
    tags = iter(tagger.tag(untagged))
    return [
        draft.finish(next(tags) if draft.document.spans is None else draft.given_spans)
        for draft in drafts
    ]


class _Draft(NamedTuple):
    """A block whose spans are not known yet; sentences count from the document."""

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
        """Returns the block with those of the spans that lie inside a sentence."""
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


def _batched(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _read_documents(path: Path) -> Iterator[Document]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parse_document(line, f"{path}, line {number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInputError(
            f"expected a whole gzip file at {path}, but it is damaged after line "
            f"{number} ({error}); fetch it again."
        ) from error


def _parse_document(line: bytes, where: str) -> Document:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"{where}: expected one JSON object in UTF-8, got something else "
            f"({error}); correct the line."
        ) from error
    if not isinstance(fields, dict):
        fields = {}
    title, text = fields.get("title"), fields.get("text")
    if not isinstance(title, str) or not isinstance(text, str):
        raise BadInputError(
            f"{where}: expected an object with the strings 'title' and 'text', got "
            f"{_shorten(line)}; correct the line."
        )
    # Half of a pair of surrogates is no character and has no UTF-8.
    title, text = _SURROGATE.sub("\ufffd", title), _SURROGATE.sub("\ufffd", text)
    source_id = _SURROGATE.sub("\ufffd", str(fields.get("id", title)))
    spans = None
    if "spans" in fields:
        spans = _parse_spans(fields["spans"], len(text), where)
    return Document(title, text, source_id, spans)


def _parse_spans(value: Any, length: int, where: str) -> tuple[Span, ...]:
    entries = value if isinstance(value, list) else [value]
    if not all(_is_span(entry, length) for entry in entries):
        raise BadInputError(
            f"{where}: expected 'spans' to be a list of [start, end] or [start, end, "
            f"label] within the {length} characters of the text, got "
            f"{_shorten(json.dumps(value))}; correct the line."
        )
    return tuple(
        Span(*(entry if len(entry) > 2 else [*entry, _GIVEN])) for entry in entries
    )


def _is_span(entry: Any, length: int) -> bool:
    match entry:
        case [int(start), int(end)] | [int(start), int(end), str()]:
            return 0 <= start < end <= length
        case _:
            return False


def _shorten(value: bytes | str) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return textwrap.shorten(text, 80, placeholder="…")
