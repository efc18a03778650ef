"""Writes the embeddings of a corpus for other software: NumPy, Parquet or FAISS.

    embeddings.npy       float32 [num_blocks, size]; ids.jsonl has a line for each row
    embeddings.parquet   id, source_id, title and embedding of each block
    embeddings.faiss     an exact index by inner product; its ids are lines of ids.jsonl

Rows are read, and those of files written, a part at a time; FAISS needs all of them in
memory.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from realm_jax.data.blocks import BlockStore
from realm_jax.data.store_files import write_header
from realm_jax.extras import require_extra
from realm_jax.index.snapshots import SnapshotArray

NPY, PARQUET, FAISS = "npy", "parquet", "faiss"
FORMATS = (NPY, PARQUET, FAISS)
IDS_NAME = "ids.jsonl"

_PART = 1 << 14

_Add = Callable[[Sequence[dict[str, Any]], np.ndarray], object]
"""Appends blocks, with their embeddings [block, size], to a file.

The file is complete when the context that gave this ends without an error.
"""


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
    files = {NPY: _npy, PARQUET: _parquet, FAISS: _faiss}
    num_blocks, size = rows.shape
    with contextlib.ExitStack() as stack:
        adders = [
            stack.enter_context(files[form](folder, num_blocks, size))
            for form in formats
        ]
        if set(formats) - {PARQUET}:
            adders.append(stack.enter_context(_id_lines(folder)))
        for start in range(0, num_blocks, _PART):
            part = slice(start, min(start + _PART, num_blocks))
            embeddings = rows[part].astype(np.float32) * np.float32(scale)
            ids = list(_ids(corpus, range(part.start, part.stop)))
            for add in adders:
                add(ids, embeddings)


def _ids(corpus: BlockStore, blocks: range) -> Iterator[dict[str, Any]]:
    texts = corpus.texts(np.asarray(blocks))
    for block, text in zip(blocks, texts, strict=True):
        yield {"id": block, "source_id": text.source_id, "title": text.title}


@contextlib.contextmanager
def _npy(folder: Path, num_blocks: int, size: int) -> Iterator[_Add]:
    # A full disk ends a process that writes to a mapped file.
    with (folder / "embeddings.npy").open("wb") as file:
        write_header(file, np.float32, (size,), num_blocks)
        yield lambda ids, embeddings: file.write(np.ascontiguousarray(embeddings).data)


@contextlib.contextmanager
def _id_lines(folder: Path) -> Iterator[_Add]:
    with (folder / IDS_NAME).open("w", encoding="utf-8") as file:
        yield lambda ids, embeddings: file.writelines(
            json.dumps(line, ensure_ascii=False) + "\n" for line in ids
        )


@contextlib.contextmanager
def _parquet(folder: Path, num_blocks: int, size: int) -> Iterator[_Add]:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        {
            "id": pyarrow.int64(),
            "source_id": pyarrow.string(),
            "title": pyarrow.string(),
            "embedding": pyarrow.list_(pyarrow.float32(), size),
        }
    )

    def add(ids: Sequence[dict[str, Any]], embeddings: np.ndarray) -> None:
        values = pyarrow.array(embeddings.reshape(-1))
        vectors = pyarrow.FixedSizeListArray.from_arrays(values, size)
        columns = [[line[name] for line in ids] for name in schema.names[:-1]]
        writer.write_table(pyarrow.table([*columns, vectors], schema=schema))

    path = folder / "embeddings.parquet"
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        yield add


@contextlib.contextmanager
def _faiss(folder: Path, num_blocks: int, size: int) -> Iterator[_Add]:
    import faiss

    index = faiss.IndexFlatIP(size)
    yield lambda ids, embeddings: index.add(np.ascontiguousarray(embeddings))
    # Where FAISS opens a file itself, it does not tell that closing it failed.
    with (folder / "embeddings.faiss").open("wb") as file:
        faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))
