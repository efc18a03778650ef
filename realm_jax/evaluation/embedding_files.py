"""Writes the embeddings of a corpus for other software: NumPy, Parquet or FAISS.

    embeddings.npy       float32 [num_blocks, size]; ids.jsonl has a line for each row
    embeddings.parquet   id, source_id, title and embedding of each block
    embeddings.faiss     an exact index by inner product; its ids are lines of ids.jsonl

Rows are read, and those of files written, a part at a time; FAISS needs all of them in
memory.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.store_files import write_header
from realm_jax.extras import require_extra
from realm_jax.index.snapshots import SnapshotArray

NPY, PARQUET, FAISS = "npy", "parquet", "faiss"
FORMATS = (NPY, PARQUET, FAISS)
IDS_NAME = "ids.jsonl"

_PART = 1 << 14


def require_libraries(formats: Sequence[str]) -> None:
    """Checks that the libraries of the formats are installed."""
    if set(formats) - {NPY}:
        require_extra("export", f"--embeddings_format={','.join(formats)}")


def write_embeddings(
    folder: Path,
    formats: Sequence[str],
    rows: SnapshotArray,
    corpus: BlockStore,
    scale: float,
) -> None:
    """Writes the embeddings, and which block each of them is of, into a folder.

    `formats` are of `FORMATS`. `rows` [num_blocks, size], of any floating-point type,
    are in the order of the blocks, and multiplied by `scale`.
    """
    makers = {NPY: _Npy, PARQUET: _Parquet, FAISS: _Faiss}
    num_blocks, size = rows.shape
    with contextlib.ExitStack() as stack:
        files: list[_File] = [
            stack.enter_context(makers[form](folder, num_blocks, size))
            for form in formats
        ]
        if set(formats) - {PARQUET}:
            files.append(stack.enter_context(_Ids(folder)))
        for start in range(0, num_blocks, _PART):
            part = slice(start, min(start + _PART, num_blocks))
            embeddings = rows[part].astype(np.float32) * np.float32(scale)
            ids = list(_ids(corpus, range(part.start, part.stop)))
            for file in files:
                file.add(ids, embeddings)


def _ids(corpus: BlockStore, blocks: range) -> Iterator[dict[str, Any]]:
    texts = corpus.texts(np.asarray(blocks))
    for block, text in zip(blocks, texts, strict=True):
        yield {"id": block, "source_id": text.source_id, "title": text.title}


class _File(Protocol):
    """A file that is complete when its context ends without an error."""

    def add(self, ids: Sequence[dict[str, Any]], embeddings: np.ndarray) -> None:
        """Appends blocks with their embeddings [len(ids), size]."""


class _Npy(contextlib.AbstractContextManager):
    def __init__(self, folder: Path, num_blocks: int, size: int) -> None:
        # A full disk ends a process that writes to a mapped file.
        self._file = (folder / "embeddings.npy").open("wb")
        write_header(self._file, np.float32, (size,), num_blocks)

    def add(self, ids: Sequence[dict[str, Any]], embeddings: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(embeddings).data)

    def __exit__(self, *error: object) -> None:
        self._file.close()


class _Ids(contextlib.AbstractContextManager):
    def __init__(self, folder: Path) -> None:
        self._file = (folder / IDS_NAME).open("w", encoding="utf-8")

    def add(self, ids: Sequence[dict[str, Any]], embeddings: np.ndarray) -> None:
        for line in ids:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def __exit__(self, *error: object) -> None:
        self._file.close()


class _Parquet(contextlib.AbstractContextManager):
    def __init__(self, folder: Path, num_blocks: int, size: int) -> None:
        import pyarrow
        import pyarrow.parquet

        self._size = size
        self._schema = pyarrow.schema(
            {
                "id": pyarrow.int64(),
                "source_id": pyarrow.string(),
                "title": pyarrow.string(),
                "embedding": pyarrow.list_(pyarrow.float32(), size),
            }
        )
        path = folder / "embeddings.parquet"
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema)

    def add(self, ids: Sequence[dict[str, Any]], embeddings: np.ndarray) -> None:
        import pyarrow

        values = pyarrow.array(embeddings.reshape(-1))
        vectors = pyarrow.FixedSizeListArray.from_arrays(values, self._size)
        names = self._schema.names[:-1]
        columns = [[line[name] for line in ids] for name in names]
        table = pyarrow.table([*columns, vectors], schema=self._schema)
        self._writer.write_table(table)

    def __exit__(self, *error: object) -> None:
        self._writer.close()


class _Faiss(contextlib.AbstractContextManager):
    def __init__(self, folder: Path, num_blocks: int, size: int) -> None:
        import faiss

        self._path = folder / "embeddings.faiss"
        self._index = faiss.IndexFlatIP(size)

    def add(self, ids: Sequence[dict[str, Any]], embeddings: np.ndarray) -> None:
        self._index.add(np.ascontiguousarray(embeddings))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        import faiss

        if kind is None:
            # Where FAISS opens a file itself, it does not tell that closing it failed.
            with self._path.open("wb") as file:
                faiss.write_index(self._index, faiss.PyCallbackIOWriter(file.write))
