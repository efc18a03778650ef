"""Runs the quick forms of the benches, and prints one table of figures and targets.

    make bench

Prepares a few hundred articles, runs each bench on them in a process of its own, and
compares what it measured with what this project aims at. Quick forms repeat little: the
tables of docs/benchmarks.md are made by the full ones. A bench that cannot run here is
a row that says why.
"""

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench import train_step
from bench.command import make_parser, one_line_errors
from bench.machine import machine, today
from bench.processes import PEERS_PYTHON, require_peers
from bench.tables import table
from realm_jax.errors import BadInputError

_ARTICLES = pathlib.Path(".cache/data/quickstart_articles.jsonl")
_MINILM = pathlib.Path(".cache/data/minilm-l6")
_RUN = pathlib.Path("runs/quickstart")
_NUM_ARTICLES = 200


@dataclasses.dataclass(frozen=True)
class Figure:
    """A measured figure and its target, a bound from above if `at_most`."""

    what: str
    value: float | None
    target: float
    at_most: bool = False
    why: str = ""

    @property
    def ratio(self) -> float:
        """How far the target is met: 1 or more if it is."""
        assert self.value is not None
        if self.at_most:
            return self.target / max(self.value, 1e-9)
        return self.value / self.target


Bench = Callable[["Inputs"], Iterator[Figure]]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the benches are given."""

    folder: pathlib.Path
    corpus: pathlib.Path
    articles: pathlib.Path
    peers: pathlib.Path

    def run(self, module: str, *arguments: object) -> Any:
        """Runs a bench, and returns the JSON that it wrote."""
        output = self.folder / f"{module}.json"
        command = [sys.executable, "-m", f"bench.{module}", *map(str, arguments)]
        _run([*command, f"--output={output}"])
        return json.loads(output.read_text())


def of_updates(inputs: Inputs) -> Iterator[Figure]:
    """An update beside transformers' and a tuned one."""
    (result,) = inputs.run(
        "train_step",
        inputs.corpus,
        "--task=bench_salient",
        "--quick",
        "--lengths=real",
        f"--peers={inputs.peers}",
    )
    measured = result["measured"]
    # Those of this project that drop out the same as the peer.
    same = (train_step.OURS_AS_BERT, train_step.OURS, train_step.OURS)
    for peer, name, target in zip(train_step.PEERS, same, (2.0, 2.0, 1.0), strict=True):
        times = measured[peer]["seconds"] / measured[name]["seconds"]
        yield Figure(f"update: faster than {peer}", times, target)
    ours, tuned = (measured[n] for n in (train_step.OURS, train_step.TUNED))
    memory = ours["peak_gib"] / tuned["peak_gib"]
    yield Figure("update: memory to tuned torch", memory, 1.2, at_most=True)


def of_embedding(inputs: Inputs) -> Iterator[Figure]:
    """Embedding beside transformers and tuned torch."""
    result = inputs.run("embed", inputs.corpus, "--quick", f"--peers={inputs.peers}")
    speeds = {name: of["blocks_per_second"] for name, of in result["measured"].items()}
    best = max(speed for name, speed in speeds.items() if "realm_jax" in name)
    for peer, target in (("transformers bfloat16", 1.2), ("tuned torch float32", 1.0)):
        yield Figure(f"embedding: faster than {peer}", best / speeds[peer], target)


def of_search(inputs: Inputs) -> Iterator[Figure]:
    """ScaNN's recall and speed at 100,000 blocks."""
    result = inputs.run(
        "index",
        "--parts",
        "search",
        "--blocks",
        100_000,
        "--searchers",
        "scann",
        "--repetitions",
        1,
    )
    (searched,) = result["search"]
    found = searched["searchers"]["scann"]
    recall = found["recall_at_8"]
    yield Figure("search: recall@8 of ScaNN, 100,000 blocks", recall, 0.95)


def of_tokenizers(inputs: Inputs) -> Iterator[Figure]:
    """Our way to tokenize beside `tokenizers`' own."""
    vocabulary = f"--vocabulary={_MINILM / 'vocab.txt'}"
    result = inputs.run("tokenize", inputs.articles, vocabulary, "--quick")
    yield Figure("tokenizing: faster than tokenizers", result["ratio"], 1.0)
    different = result["different"]
    yield Figure("tokenizing: texts with other ids", different, 0, at_most=True)


def of_pipeline(inputs: Inputs) -> Iterator[Figure]:
    """What of the quickstart's pre-training is not its update."""
    what = "pre-training: share of time outside the update"
    if not (_RUN / "pretrain").exists():
        yield Figure(what, None, 0.05, at_most=True, why="run `make quickstart` first")
        return
    result = inputs.run("pipeline", _RUN, "--quick")
    yield Figure(what, 1 - result["pretrain"]["executing"], 0.05, at_most=True)


def of_accelerator(inputs: Inputs) -> Iterator[Figure]:
    """The utilisation of an accelerator; on a CPU the quick form's."""
    result = inputs.run("gpu", "--quick")
    on = f"{result['device']}, tiny model"
    update = result["update"]
    utilisation, share = update["utilisation"], update["search_share"]
    yield Figure(f"utilisation of matrix rate ({on})", utilisation, 0.45)
    yield Figure(f"search, of an update ({on})", share, 0.05, at_most=True)


BENCHES: Sequence[Bench] = (
    of_updates,
    of_embedding,
    of_search,
    of_tokenizers,
    of_pipeline,
    of_accelerator,
)


def prepare(folder: pathlib.Path, peers: pathlib.Path) -> Inputs:
    """Prepares a small corpus of the quickstart's articles."""
    if not _ARTICLES.exists():
        raise BadInputError(
            f"expected articles in {_ARTICLES}, got none; run `make data`"
        )
    articles, corpus = folder / "articles.jsonl", folder / "corpus"
    with _ARTICLES.open() as lines:
        articles.write_text("".join(itertools.islice(lines, _NUM_ARTICLES)))
    settings = {
        "CORPUS": corpus,
        "SOURCE": articles,
        "NAME": "bench",
        "VOCABULARY": _MINILM / "vocab.txt",
        "TAGGER": "rules",
        "QUERY_LENGTH": 64,
        "EXAMPLES": '["salient"]',
    }
    _run(
        [
            *(sys.executable, "-m", "realm_jax.cli.main", "prepare"),
            "--gin_file=gin/runs/prepare.gin",
            *(f"--gin.{name}={value}" for name, value in settings.items()),
        ]
    )
    return Inputs(folder, corpus, articles, peers)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise BadInputError(
            f"expected {' '.join(command[1:4])} to succeed, got exit code "
            f"{done.returncode}: {said[-1] if said else 'nothing was said'}"
        )


def row(figure: Figure) -> list[str]:
    """Returns the row of a figure: what, measured, target, ratio."""
    sign = "at most" if figure.at_most else "at least"
    target = f"{sign} {figure.target:g}"
    if figure.value is None:
        return [figure.what, figure.why, target, ""]
    ratio = "" if figure.target == 0 else f"{figure.ratio:.2f}"
    return [figure.what, f"{figure.value:.3g}", target, ratio]


def measure(inputs: Inputs, benches: Sequence[Bench]) -> Iterator[Figure]:
    """Yields figures; a bench that fails is one without a value."""
    for bench in benches:
        print(f"{bench.__name__.removeprefix('of_')} ...", file=sys.stderr, flush=True)
        try:
            yield from bench(inputs)
        except BadInputError as error:
            yield Figure(bench.__name__.removeprefix("of_"), None, 0, why=str(error))


def markdown(figures: Sequence[Figure]) -> str:
    """Returns the table, with machine and date."""
    heads = ["", "measured", "target", "target met, times"]
    return (
        f"{machine()}, {today()}; quick forms.\n\n{table(heads, map(row, figures))}\n"
    )


def main() -> None:
    """Runs all benches, and prints the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--peers", type=pathlib.Path, default=PEERS_PYTHON)
    flags = parser.parse_args()
    with one_line_errors():
        require_peers(flags.peers)
        with tempfile.TemporaryDirectory() as folder:
            inputs = prepare(pathlib.Path(folder), flags.peers)
            print(markdown(list(measure(inputs, BENCHES))))


if __name__ == "__main__":
    main()
