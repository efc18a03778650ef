"""Measures how long fine-tuning's devices wait for the inputs of their updates.

    python -m bench.finetune_inputs

A corpus of random wordpieces in the proportions of a text (the n-th word 1 / n as often
as the first), questions with two answers each, and the retriever's loss over as many
blocks as the paper has. Models are small: it is the host's work that is measured, and
that is the same for larger ones. Arms take turns. The stopwatch of `metrics.jsonl` says
what the training thread does; the labels' time is the CPU time of their thread.
"""

import contextlib
import dataclasses
import json
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np

from bench.command import command_line, make_parser, one_line_errors, write_figures
from bench.machine import machine, today
from bench.tables import table
from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockText
from realm_jax.data.examples import write_examples
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.index.embed import EmbedConfig
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training import finetune
from realm_jax.training.finetune import FinetuneConfig
from realm_jax.training.initialization import ModelFactory
from realm_jax.types import Lengths

_WORDS = 30_000
_BODY = 280
_QUERY = 32
_ANSWERS, _ANSWER_PIECES = 8, 10
_PERIOD = 4
_PARTS = ("search", "device", "host")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is trained.

    Attributes:
      retrieved: blocks in the retriever's loss.
      joined: wordpieces that the reader reads at once.
    """

    blocks: int = 40_000
    retrieved: int = 5_000
    questions: int = 16
    hidden: int = 32
    joined: int = 128


def make_corpus(folder: pathlib.Path, sizes: Sizes) -> None:
    """Writes a corpus and questions below `folder`."""
    rng = np.random.default_rng(0)
    vocabulary = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(_WORDS))])
    first = len(SPECIAL_PIECES)
    share = 1 / np.arange(1, _WORDS + 1)
    cumulative = np.cumsum(share / share.sum())

    def draw(*shape: int) -> np.ndarray:
        places = np.searchsorted(cumulative, rng.random(shape))
        return (first + places.clip(max=_WORDS - 1)).astype(np.int32)

    nothing = np.zeros(0, np.int32)

    def block(number: int) -> Block:
        body = draw(_BODY)
        text = " ".join(vocabulary.pieces[i] for i in body)
        return Block(nothing, body, BlockText("", text, str(number), [], []))

    blocks = map(block, range(sizes.blocks))
    store = write_blocks(folder, blocks, vocabulary=vocabulary, chunk_length=_BODY + 8)
    number = 64 * sizes.questions
    question_ids = draw(number, _QUERY)
    question_ids[:, 0], question_ids[:, -1] = vocabulary.cls, vocabulary.sep
    answer_ids = np.zeros((number, _ANSWERS, _ANSWER_PIECES), np.int32)
    answer_ids[:, 0, :1], answer_ids[:, 1, :2] = draw(number, 1), draw(number, 2)
    arrays = {
        "question_ids": question_ids,
        "answer_ids": answer_ids,
        "question_index": np.arange(number, dtype=np.int32),
    }
    place = folder / "examples" / "questions" / "train"
    place.parent.mkdir(parents=True)
    metadata = {"vocabulary_fingerprint": store.vocabulary.fingerprint}
    write_examples(place, [arrays], metadata)


def models(sizes: Sizes) -> ModelFactory:
    """Returns models of one layer."""

    def bert(vocab_size: int) -> BertConfig:
        return BertConfig(
            vocab_size=vocab_size,
            hidden_size=sizes.hidden,
            num_layers=1,
            num_heads=2,
            mlp_size=4 * sizes.hidden,
            max_positions=512,
        )

    # Documents are embedded once, before anything is measured.
    return ModelFactory(bert, RetrieverConfig, Lengths(_QUERY, 8, sizes.joined))


def measure(
    folder: pathlib.Path, corpus: pathlib.Path, sizes: Sizes, ahead: bool, updates: int
) -> dict[str, float]:
    """Fine-tunes; returns seconds an update of each part, of all, and of the labels."""
    config = FinetuneConfig(
        model_dir=str(folder),
        corpus=str(corpus),
        task="questions",
        train_steps=_PERIOD + updates,
        batch_size=sizes.questions,
        num_retrieved=sizes.retrieved,
        models=models(sizes),
        embed=EmbedConfig(document_length=8, batch_size=512),
        log_period=_PERIOD,
        search_ahead=ahead,
    )
    with _timed_labels() as labels:
        finetune.run(config, lambda *_: None, threading.Event())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    # The first line holds the compiling.
    records = [json.loads(line) for line in lines][1:]
    found = {
        part: statistics.mean(record[f"{part}_seconds"] for record in records)
        for part in _PARTS
    }
    found["update"] = statistics.mean(1 / r["steps_per_second"] for r in records)
    found["labels"] = statistics.median(labels)
    return found


@contextlib.contextmanager
def _timed_labels() -> Iterator[list[float]]:
    seconds: list[float] = []
    blocks = finetune.AnswerLabels.blocks

    def timed(*arguments):
        began = time.thread_time()
        found = blocks(*arguments)
        seconds.append(time.thread_time() - began)
        return found

    with mock.patch.object(finetune.AnswerLabels, "blocks", timed):
        yield seconds


def main() -> None:
    """Measures, and prints the table."""
    parser = make_parser(__doc__, "output")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a corpus of 500 blocks")
    flags = parser.parse_args()
    sizes = Sizes(500, 100, 4, 16, 64) if flags.quick else Sizes()
    arms = {"before the update": False, "while one is running": True}
    with one_line_errors(), tempfile.TemporaryDirectory() as scratch:
        corpus = pathlib.Path(scratch) / "corpus"
        make_corpus(corpus, sizes)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
        for turn in range(flags.rounds):
            for name, ahead in arms.items():
                folder = pathlib.Path(scratch) / f"{turn}-{ahead}"
                found[name].append(measure(folder, corpus, sizes, ahead, flags.updates))
                print(f"{name}: {found[name][-1]}", flush=True)
        print(_markdown(found, sizes))
        if flags.output:
            write_figures(flags.output, found)


def _markdown(found: dict[str, list[dict[str, float]]], sizes: Sizes) -> str:
    columns = ["update", *_PARTS, "labels"]
    rows = [
        [
            name,
            *(f"{statistics.median(r[c] for r in rounds):.2f}" for c in columns),
            ", ".join(f"{r['update']:.2f}" for r in rounds),
        ]
        for name, rounds in found.items()
    ]
    heads = ["inputs are made", *(f"{c}, s" for c in columns), "updates of the rounds"]
    return (
        f"    {command_line('finetune_inputs')}\n\n{machine()}, {today()}; "
        f"{sizes.questions} questions x {sizes.retrieved:,} of {sizes.blocks:,} blocks."
        f"\n\n{table(heads, rows)}\n"
    )


if __name__ == "__main__":
    main()
