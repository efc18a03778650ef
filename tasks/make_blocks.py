"""Documents to blocks, part by part: what `realm prepare` has its workers do first."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from realm_jax.data.block_parts import Summary, pack_blocks, unpack_blocks
from realm_jax.data.block_writer import Block, BlockWriter
from realm_jax.data.blocks import BlockStore
from realm_jax.data.corpus import chunk_each
from realm_jax.data.document_table import document_rows
from realm_jax.data.documents import Document, LeftOut
from realm_jax.data.records import BadRecord
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from tasks.documents.source import DocumentSource, Shard
from tasks.taggers import loaded_tagger

# Enough for the tokenizer and the tagger to work in batches, little to keep in memory.
_DOCUMENTS_PER_BATCH = 512

PART_VERSION = 2
"""Of the format of parts: a killed run goes on with those of the same one only."""


def part_names(num_shards: int) -> list[str]:
    """Returns the name of the part of each shard of a source, in order."""
    return [f"{i:06d}-of-{num_shards:06d}" for i in range(num_shards)]


@dataclasses.dataclass(frozen=True)
class MakeBlocks:
    """Makes the blocks of a shard; see `tasks.parts.MakePart`.

    Attributes:
      source: of the documents.
      shards: by the name of their part.
      vocabulary: the tokenizer.
      tagger: name of the tagger, which each worker loads for itself.
      chunk_length: wordpieces of a block.
      max_bad_lines: damaged records to bear.
    """

    source: DocumentSource
    shards: Mapping[str, Shard]
    vocabulary: WordPiece
    tagger: str
    chunk_length: int
    max_bad_lines: int

    def __call__(self, name: str, check: Callable[[], None]) -> bytes:
        """Returns the blocks of the shard and what was counted.

        Raises:
          BadInputError: the source cannot be read, or has too many damaged records.
        """
        summary, blocks = Summary(), list[Block]()
        rows = [document_rows([], [])]
        documents = self._documents(self.shards[name], summary)
        tagger = loaded_tagger(self.tagger)
        while batch := list(itertools.islice(documents, _DOCUMENTS_PER_BATCH)):
            check()
            made = chunk_each(batch, self.vocabulary, tagger, self.chunk_length)
            summary.without_text += sum(not of_one for of_one in made)
            blocks += itertools.chain.from_iterable(made)
            rows.append(document_rows(batch, list(map(len, made))))
        return pack_blocks(blocks, np.concatenate(rows), summary)

    def _documents(self, shard: Shard, summary: Summary) -> Iterator[Document]:
        for record in self.source.read(shard):
            match record:
                case Document():
                    summary.documents += 1
                    summary.without_title += not record.title.strip()
                    yield record
                case LeftOut():
                    summary.left_out[record.reason] += 1
                case BadRecord():
                    summary.add_bad(record)
                    require_few_bad(summary, self.max_bad_lines)


def require_few_bad(summary: Summary, max_bad_lines: int) -> None:
    """Checks that there are no more damaged records than can be borne.

    Raises:
      BadInputError: there are; names the first.
    """
    if summary.bad_records > max_bad_lines:
        where, reason = summary.first_bad[0]
        raise BadInputError(
            f"{where}: {reason} ({summary.bad_records} damaged so far, "
            f"--max_bad_lines={max_bad_lines})"
        )


def assemble(
    directory: str,
    parts: Iterator[bytes],
    *,
    vocabulary: WordPiece,
    chunk_length: int,
    max_bad_lines: int,
    metadata: Mapping[str, Any],
) -> BlockStore:
    """Writes the blocks of all parts, in order, as one store, and opens it.

    Raises:
      BadInputError: no document has text, there are too many damaged records, or the
        disk is full.
    """
    total = Summary()
    with BlockWriter(directory, vocabulary, chunk_length) as writer:
        for part in parts:
            blocks, documents, summary = unpack_blocks(part)
            total.add(summary)
            for block in blocks:
                writer.add(block)
            writer.add_documents(documents)
        require_few_bad(total, max_bad_lines)
        writer.metadata |= {
            **metadata,
            "num_documents": total.documents,
            "summary": total.to_json(),
        }
    return BlockStore.open(directory)
