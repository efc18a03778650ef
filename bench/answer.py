"""Times the answers to questions, one at a time and in batches.

    python -m bench.answer PASSAGES QUESTIONS --output FOLDER --page docs/benchmarks.md

PASSAGES are JSON lines for `realm prepare`, QUESTIONS those of `realm evaluate`. A
model of MiniLM's size searches all blocks and reads five. Its parameters and the
embeddings of the blocks are random, so the five are any five, and no answer means
anything: times depend on sizes and lengths alone. The blocks are those of PASSAGES,
made once in FOLDER and kept there; a run that was ended goes on.
"""

import argparse
import contextlib
import dataclasses
import gzip
import itertools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bench import minilm
from bench.command import command_line, make_parser, publish, reporting
from bench.index_corpus import read_questions
from bench.machine import machine, today
from bench.tables import table
from realm_jax.answering.reader import Answerer, Spans
from realm_jax.data.blocks import BlockStore
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.index.searchers import make_searcher
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.prepare.blocks import BlocksConfig, prepare_blocks
from realm_jax.training.initialization import initial_params
from realm_jax.types import Array, Lengths, Neighbours

_VOCABULARY = pathlib.Path(".cache/data/minilm-l6/vocab.txt")
_NUM_READ = 5
_BATCH = 8

# The quickstart's, and those that gin/runs/finetune.gin takes from the paper.
LENGTHS = (
    Lengths(query=40, document=96, joined=112),
    Lengths(query=64, document=288, joined=320),
)
PARTS = ("encode", "search", "read", "spans")
"""Of a question: embedding it; the search; the reader, with its scores of all spans;
and the rest, above all the words of the blocks and the text of the answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedAnswerer(Answerer):
    """An answerer that waits after each part, and says how long it took.

    Attributes:
      seconds: by part, since it was emptied; "spans" is what is left of the whole.
    """

    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[None]:
        began, others = time.perf_counter(), sum(self.seconds.values())
        yield
        # Encoding is a part of what `search` does, and is counted already.
        inner = sum(self.seconds.values()) - others
        seconds = time.perf_counter() - began - inner
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def embed(self, question_ids: np.ndarray) -> np.ndarray:
        """See `CorpusSearch.embed`."""
        with self._part("encode"):
            return super().embed(question_ids)

    def search(self, question_ids: np.ndarray, k: int) -> Neighbours:
        """See `CorpusSearch.search`."""
        with self._part("search"):
            return super().search(question_ids, k)

    def _find_spans(self, *inputs: Array) -> Spans:
        with self._part("read"):
            return jax.block_until_ready(super()._find_spans(*inputs))

    def time(self, question: str) -> dict[str, float]:
        """Returns the seconds of each part of a question, and of all."""
        self.seconds.clear()
        with self._part("spans"):
            self.answer([question])
        return {**self.seconds, "all": sum(self.seconds.values())}


def measure(
    corpus: BlockStore, questions: Sequence[str], lengths: Lengths, rounds: int
) -> dict[str, Any]:
    """Times questions over a corpus by a random model and a random index.

    Each question is asked once alone, and in every round with the others.
    """
    answerer = _random_answerer(corpus, lengths)
    began = time.perf_counter()
    answerer.compile()
    compiling = time.perf_counter() - began
    alone = TimedAnswerer(**{**vars(answerer), "batch_size": 1})
    alone.compile()
    seconds = [alone.time(question) for question in questions]
    together = []
    for _ in range(rounds):
        began = time.perf_counter()
        answerer.answer(questions)
        together.append(len(questions) / (time.perf_counter() - began))
    whole = [of["all"] for of in seconds]
    return {
        "blocks": corpus.num_blocks,
        "lengths": dataclasses.asdict(lengths),
        "questions": len(questions),
        "compile_seconds": compiling,
        "median_ms": 1e3 * float(np.median(whole)),
        "p95_ms": 1e3 * float(np.percentile(whole, 95)),
        "parts_ms": {
            part: 1e3 * float(np.median([of[part] for of in seconds])) for part in PARTS
        },
        "questions_per_second": together,
    }


def _random_answerer(corpus: BlockStore, lengths: Lengths) -> Answerer:
    bert = minilm.models("strong").bert(corpus.vocabulary.size)
    retriever, reader = RetrieverConfig(bert, pooling="mean"), SpanReader(bert)
    params, _ = initial_params(Retriever(retriever), reader, lengths, seed=0)
    shape = corpus.num_blocks, retriever.projection_size
    rows = np.random.default_rng(0).standard_normal(shape, np.float32)
    return Answerer(
        retriever=retriever,
        params=jax.device_put(params),
        corpus=corpus,
        searcher=make_searcher("device", rows),
        lengths=lengths,
        batch_size=_BATCH,
        reader=reader,
        num_read=_NUM_READ,
        marginalization=AnswerMarginalization.PRODUCT,
    )


def _corpus(flags: argparse.Namespace, passages: str, lengths: Lengths) -> BlockStore:
    """Returns the blocks of the passages, which are made if they are not there."""
    folder = flags.output / f"{pathlib.Path(passages).stem}_{lengths.document}"
    config = BlocksConfig(
        corpus=str(folder),
        source=passages,
        vocabulary=WordPiece.load(flags.vocabulary),
        tagger="given",
        chunk_length=lengths.document,
    )
    return prepare_blocks(config)


def _first(flags: argparse.Namespace) -> str:
    """Returns the file of the passages that are asked for."""
    if flags.passages is None:
        return flags.corpus
    chosen = flags.output / f"first_{flags.passages}.jsonl"
    opened = gzip.open if flags.corpus.endswith(".gz") else open
    with opened(flags.corpus, "rt", encoding="utf-8") as lines:
        chosen.write_text("".join(itertools.islice(lines, flags.passages)))
    return str(chosen)


def markdown(runs: Sequence[Mapping[str, Any]], command: str) -> str:
    """Returns the table with its command, machine and date."""
    heads = [
        *("blocks", "wordpieces of a block, and read with a question, at most"),
        *("median of one, ms", "95th percentile", *(f"{part}, ms" for part in PARTS)),
        *(f"questions/s in batches of {_BATCH}", "compiling them, s"),
    ]
    rows = []
    for run in runs:
        lengths, speeds = run["lengths"], run["questions_per_second"]
        rows.append(
            [
                f"{run['blocks']:,}",
                f"{lengths['document']}, {lengths['joined']}",
                f"{run['median_ms']:.0f}",
                f"{run['p95_ms']:.0f}",
                *(f"{run['parts_ms'][part]:.1f}" for part in PARTS),
                f"{np.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})",
                f"{run['compile_seconds']:.0f}",
            ]
        )
    return (
        f"    {command}\n\n{machine()}, {today()}; {runs[0]['questions']} questions, "
        f"{_NUM_READ} blocks read for each; random parameters and a random index.\n\n"
        f"{table(heads, rows)}\n"
    )


def main() -> None:
    """Measures, prints and writes the table."""
    parser = make_parser(__doc__, "page")
    parser.add_argument("corpus", metavar="PASSAGES", help="JSON lines, perhaps .gz")
    parser.add_argument("questions", metavar="QUESTIONS", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, required=True, metavar="FOLDER")
    parser.add_argument("--vocabulary", type=pathlib.Path, default=_VOCABULARY)
    parser.add_argument("--passages", type=int, help="the first so many; all if not")
    parser.add_argument("--count", type=int, default=200, help="questions")
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    written = argparse.Namespace(page=flags.page, output=flags.output / "answer.json")
    with reporting("answer", written):
        if not flags.questions.is_file():
            raise BadInputError(
                f"expected JSON lines of questions, found no {flags.questions}; name "
                "a file of them"
            )
        questions = read_questions(flags.questions, flags.count)
        passages = _first(flags)
        runs = [
            measure(_corpus(flags, passages, lengths), questions, lengths, flags.rounds)
            for lengths in LENGTHS
        ]
        places = {"PASSAGES": flags.corpus, "QUESTIONS": flags.questions}
        text = markdown(
            runs, command_line("answer", {**places, "FOLDER": flags.output})
        )
        publish("answer", text, runs, written)


if __name__ == "__main__":
    main()
