"""Compares examples that refer to their corpus with whole rows: bytes, and time.

    python -m bench.examples CORPUS --page docs/data.md

The masked sentences and inverse cloze pairs of a prepared corpus, at the paper's
lengths, are written both ways to a folder that is dropped. Batches of random rows take
turns. The bytes for Wikipedia follow from the types that its 13 million blocks need.
"""

import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from bench.command import command_line, make_parser, publish, reporting
from bench.machine import machine, today
from bench.tables import table
from realm_jax.data.blocks import BlockStore
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.data.examples import CORPUS_FINGERPRINT, Examples, write_examples
from realm_jax.data.features import SENTENCE_ID, Example, in_chunks
from realm_jax.data.inverse_cloze import (
    DOCUMENT_LENGTH,
    QUERY_LENGTH,
    PairRows,
    inverse_cloze_rows,
)
from realm_jax.data.masking import MAX_MASKS, SpanRows, salient_rows
from realm_jax.data.masking import QUERY_LENGTH as MASKED_LENGTH
from realm_jax.data.references import References, SentenceRows

_BATCH, _BLOCKS_AT_ONCE = 512, 64
_WIKIPEDIA, _SENTENCES = CorpusSize().num_blocks, 82_000_000
_TASKS = {
    "masked sentences": (SpanRows(MASKED_LENGTH, MAX_MASKS), salient_rows),
    "inverse cloze": (PairRows(QUERY_LENGTH, DOCUMENT_LENGTH), inverse_cloze_rows),
}


class Measured(NamedTuple):
    """One task's rows, stored in one way.

    Attributes:
      stored: "whole" or "references".
      row_bytes: bytes of a row, without the places where sentences begin.
      wikipedia_bytes: the same for the blocks of Wikipedia.
      milliseconds: time of the fastest batch of 512 rows; other work on the machine
        only adds to it.
    """

    name: str
    stored: str
    rows: int
    row_bytes: float
    wikipedia_bytes: int
    milliseconds: float


def measure(store: BlockStore, repeat: int, folder: pathlib.Path) -> list[Measured]:
    """Writes both tasks of a corpus in both ways, and times batches of them."""
    found = []
    for name, (layout, make_rows) in _TASKS.items():
        ids = in_chunks(np.arange(store.num_blocks), _BLOCKS_AT_ONCE)
        rows = [make_rows(store, some) for some in ids]
        metadata = {CORPUS_FINGERPRINT: store.fingerprint}
        place = folder / name.replace(" ", "_")
        references = References(layout, store)
        sets = {
            "whole": write_examples(
                f"{place}_whole", _whole(store, layout, rows), metadata
            ),
            "references": write_examples(
                f"{place}_references", rows, metadata, references=references
            ),
        }
        wikipedia = {
            "whole": sum(
                np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape))
                for spec in layout.specs.values()
            ),
            "references": layout.row_bytes(_WIKIPEDIA, DOCUMENT_LENGTH),
        }
        times = _time(sets, repeat)
        for stored, examples in sets.items():
            count = len(examples)
            size = _array_bytes(examples) / count
            found.append(
                Measured(name, stored, count, size, wikipedia[stored], times[stored])
            )
    return found


def _whole(
    store: BlockStore, layout: SentenceRows, rows: list[Example]
) -> Iterator[Example]:
    for some in rows:
        ids = {SENTENCE_ID: some[SENTENCE_ID]} if SENTENCE_ID in some else {}
        yield {**layout.lay_out(store, some), **ids}


def _array_bytes(examples: Examples) -> int:
    paths = examples.directory.glob("*.npy")
    return sum(p.stat().st_size for p in paths if p.stem != "sentence_starts")


def _time(sets: Mapping[str, Examples], repeat: int) -> dict[str, float]:
    """Returns the milliseconds of the fastest batch of each set; they take turns."""
    random = np.random.default_rng(0)
    times: dict[str, list[float]] = {name: [] for name in sets}
    for _ in range(repeat):
        for name, examples in sets.items():
            indices = random.integers(len(examples), size=_BATCH)
            began = time.perf_counter()
            examples.batch(indices)
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: min(of) for name, of in times.items()}


def as_text(measured: list[Measured], command: str) -> str:
    """Returns a table in Markdown with what was measured, and where."""
    rows = [
        (
            *(one.name, one.stored, f"{one.rows:,}", f"{one.row_bytes:,.1f}"),
            f"{one.wikipedia_bytes:,}",
            f"{one.wikipedia_bytes * _SENTENCES / 1e9:,.1f} GB",
            f"{one.milliseconds:.1f} ms",
        )
        for one in measured
    ]
    heads = ("examples", "stored", "rows", "bytes a row", "the same of Wikipedia")
    last = (f"of {_SENTENCES:,} rows", f"a batch of {_BATCH}, fastest")
    where = f"{today()}, {machine()}, one process."
    return f"    {command}\n\n{table((*heads, *last), rows)}\n\n{where}"


def main() -> None:
    """Prints the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("corpus", help="a prepared corpus")
    parser.add_argument("--repeat", type=int, default=50, help="batches of each")
    parser.add_argument("--scratch", help="folder for what is built and dropped")
    flags = parser.parse_args()
    with reporting("examples", flags):
        store = BlockStore.open(flags.corpus)
        with tempfile.TemporaryDirectory(dir=flags.scratch) as folder:
            measured = measure(store, flags.repeat, pathlib.Path(folder))
        command = command_line("examples", {"CORPUS": flags.corpus})
        publish("examples", as_text(measured, command), measured, flags)


if __name__ == "__main__":
    main()
