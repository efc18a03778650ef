"""Measures the memory of importing block embeddings and their blocks.

    python -m bench.import_memory --rows 1000000

Generates `encoded.ckpt` and `blocks.tfr` of as many rows as are asked for, imports them
with a small embedder, and prints the peak of each part as it goes: the published model
has 13,353,718 rows, so what grows with rows must grow little.
"""

import argparse
import pathlib
import struct
import tempfile
import time

import google_crc32c
import jax
import numpy as np

from bench.machine import peak_gib
from realm_jax.data.block_records import write_corpus
from realm_jax.data.wordpiece import WordPiece
from realm_jax.index.embed import EmbedConfig
from realm_jax.index.imported import import_index
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.storage import open_store
from realm_jax.weights.stored import StoredTensor

WORDS = ("river", "town", "mill", "bridge", "stone", "king", "queen", "north", "bank")
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
WIDTH, WORDS_PER_BLOCK, TEXTS, AT_ONCE = 128, 12, 997, 10_000


def write_records(path: pathlib.Path, rows: int) -> None:
    """Writes TFRecords of random words."""
    rng = np.random.default_rng(0)
    records = []
    for _ in range(TEXTS):
        text = " ".join(rng.choice(WORDS, WORDS_PER_BLOCK)).encode()
        header = struct.pack("<Q", len(text))
        records.append(header + masked(header) + text + masked(text))
    with path.open("wb") as file:
        for row in range(rows):
            file.write(records[row % TEXTS])


def masked(data: bytes) -> bytes:
    """Returns the checksum that TFRecords have."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write_rows(path: pathlib.Path, rows: int) -> StoredTensor:
    """Writes random rows as a checkpoint's data file has them."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, rows, AT_ONCE):
            some = rng.normal(size=(min(AT_ONCE, rows - start), WIDTH))
            file.write(some.astype(np.float32).tobytes())
    return StoredTensor(path, 0, np.dtype("<f4"), (rows, WIDTH))


def random_retriever() -> TrainedRetriever:
    """Returns a retriever of one small layer."""
    bert = BertConfig(len(PIECES), 16, 1, 2, 16, max_positions=288)
    config = RetrieverConfig(bert, projection_size=WIDTH)
    ids = np.zeros((1, 8), np.int32)
    variables = Retriever(config).init(jax.random.key(0), ids, ids, ids)
    return TrainedRetriever(0, config, variables["params"], "")


def main() -> None:
    """Prints peaks and times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=pathlib.Path)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        measure(pathlib.Path(folder), flags.rows)


def measure(folder: pathlib.Path, rows: int) -> None:
    """Imports generated files and prints what it took."""
    write_records(folder / "blocks.tfr", rows)
    stored = write_rows(folder / "rows", rows)
    retriever = random_retriever()
    vocabulary = WordPiece(list(PIECES))
    print(f"{rows:,} rows; {1024 * peak_gib():,.0f} MiB before the import")
    began = time.monotonic()
    corpus = write_corpus(str(folder / "corpus"), folder / "blocks.tfr", vocabulary)
    print(f"corpus: {1024 * peak_gib():,.0f} MiB, {time.monotonic() - began:,.0f} s")
    began = time.monotonic()
    done = []

    def read(start: int, stop: int) -> np.ndarray:
        done.append(stop)
        if len(done) % max(1, rows // EmbedConfig().shard_blocks // 4) == 0:
            print(f"  {stop:,} rows: {1024 * peak_gib():,.0f} MiB")
        return stored.rows(start, stop)

    store = open_store(folder / "model")
    import_index(store, corpus, retriever, EmbedConfig(), rows, read)
    print(f"index: {1024 * peak_gib():,.0f} MiB, {time.monotonic() - began:,.0f} s")


if __name__ == "__main__":
    main()
