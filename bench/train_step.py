"""Times an update of REALM's pre-training beside the same update in PyTorch.

    make peers
    python -m bench.train_step CORPUS --task my_salient --page docs/benchmarks.md
    python -m bench.train_step --quick

The peers are the REALM of `transformers`, as it comes and without dropout of attention
weights, and an update tuned for speed (`bench/peers/realm_torch.py`). All start from
the same weights and take the same inputs: random wordpieces that fill every sequence,
and, given a corpus, sentences and passages of their real lengths. Without dropout all
must compute the same loss, or the command fails. Each measurement is a process of its
own, so that none holds another's memory; they take turns.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from bench.machine import machine, today
from bench.tables import replace_place, table
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.layout import NULL_DOCUMENT_LENGTH
from realm_jax.errors import BadInputError
from realm_jax.index.candidates import num_neighbours, pretrain_candidates
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.prepare.examples import examples_folder
from realm_jax.training.initialization import Lengths, initial_params
from realm_jax.training.losses import PretrainInputs, PretrainLoss
from realm_jax.training.optimizers import OptimizerConfig, make_optimizer
from realm_jax.training.state import create_state
from realm_jax.training.step import make_step
from realm_jax.types import NULL_BLOCK, Candidates, Neighbours, PretrainBatch
from realm_jax.weights.bert import save_bert, save_masked_lm

_VOCABULARY, _CANDIDATES, _QUERY, _MASKS = 30_522, 8, 64, 10
_CLS, _SEP, _MASK, _FIRST_WORD = 101, 102, 103, 1000
_PYTHON = pathlib.Path(".cache/peers/bin/python")
_TOLERANCE = 1e-4
# Whether glibc gives memory back after every update; see docs/benchmarks.md.
_ALLOCATOR = "GLIBC_TUNABLES"


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a comparison.

    Attributes:
      layers, hidden, heads: of each encoder.
      document: wordpieces of a document.
      batch: sentences of an update.
    """

    layers: int
    hidden: int
    heads: int
    document: int
    batch: int

    def __str__(self) -> str:
        return f"L{self.layers}/H{self.hidden}"

    @property
    def lengths(self) -> Lengths:
        """Padded lengths."""
        return Lengths(_QUERY, self.document, _QUERY + self.document)

    def bert(self, **settings: Any) -> BertConfig:
        """Returns the encoder of towers and reader."""
        return BertConfig(
            vocab_size=_VOCABULARY,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            mlp_size=4 * self.hidden,
            scan_unroll=self.layers,
            **settings,
        )


SIZES = {
    "small": Size(4, 256, 4, document=128, batch=8),
    "paper": Size(6, 384, 6, document=288, batch=4),
    "base": Size(12, 768, 12, document=288, batch=1),
}
PEERS = {
    "transformers": ["transformers", "--attention_dropout=0.1"],
    "transformers, no dropout of attention": ["transformers"],
    "tuned torch": ["tuned"],
}
OURS = {
    "float32": {"realm_jax": {}},
    "bfloat16": {"realm_jax": {"products": "bfloat16"}},
}


def write_case(folder: pathlib.Path, size: Size, inputs: PretrainInputs) -> None:
    """Writes inputs and random weights of a comparison, for all that take part."""
    batch, candidates = inputs.batch, inputs.candidates
    arrays = {
        field.name: np.asarray(getattr(part, field.name))
        for part in (batch, candidates)
        for field in dataclasses.fields(part)
    }
    np.savez(folder / "inputs.npz", **arrays)
    params, _ = initial_params(*_models(size), size.lengths, seed=0)
    retriever = jax.device_get(params["retriever"]["tower"])
    config = size.bert()
    save_bert(folder / "tower.safetensors", retriever["bert"], config)
    tensors = safetensors.numpy.load_file(folder / "tower.safetensors")
    projection, norm = retriever["projection"], retriever["projection_norm"]
    safetensors.numpy.save_file(
        {
            **{f"bert.{name}": tensor for name, tensor in tensors.items()},
            "cls.dense.weight": np.ascontiguousarray(projection["kernel"].T),
            "cls.dense.bias": projection["bias"],
            "cls.LayerNorm.weight": norm["scale"],
            "cls.LayerNorm.bias": norm["bias"],
        },
        folder / "retriever.safetensors",
    )
    reader = jax.device_get(params["reader"])
    save_masked_lm(folder / "reader.safetensors", reader, config)
    shape = {
        **dataclasses.asdict(size),
        "mlp": config.mlp_size,
        "projection": 128,
        "candidates": candidates.block_ids.shape[1],
        "vocabulary": _VOCABULARY,
    }
    (folder / "shape.json").write_text(json.dumps(shape))


def random_inputs(size: Size) -> PretrainInputs:
    """Returns random sentences and documents without padding, and the null document."""
    random = np.random.default_rng(0)

    def words(*shape: int) -> np.ndarray:
        return random.integers(_FIRST_WORD, _VOCABULARY, shape, dtype=np.int32)

    query = words(size.batch, _QUERY)
    query[:, 0], query[:, -1] = _CLS, _SEP
    places = [
        np.sort(random.choice(np.arange(1, _QUERY - 1), _MASKS, replace=False))
        for _ in query
    ]
    positions = np.array(places, np.int32)
    targets = np.take_along_axis(query, positions, axis=1)
    np.put_along_axis(query, positions, _MASK, axis=1)
    slots = (size.batch, _CANDIDATES)
    documents = words(*slots, size.document)
    documents[..., 0], documents[..., -1] = _CLS, _SEP
    asked = np.broadcast_to(query[:, None], (*slots, _QUERY))
    joined = np.concatenate([asked, documents], axis=-1)
    segments = np.zeros_like(joined)
    segments[..., _QUERY:] = 1
    # The null document.
    documents[:, 0, 1:] = 0
    documents[:, 0, 1:NULL_DOCUMENT_LENGTH] = _SEP
    joined[:, 0, _QUERY:], segments[:, 0, _QUERY:] = 0, 0
    joined[:, 0, _QUERY], segments[:, 0, _QUERY] = _SEP, 1
    block_ids = np.arange(np.prod(slots), dtype=np.int32).reshape(slots)
    block_ids[:, 0] = NULL_BLOCK
    return PretrainInputs(
        PretrainBatch(
            query,
            positions,
            targets,
            np.ones(positions.shape, np.float32),
            np.full(size.batch, -1, np.int32),
        ),
        Candidates(
            block_ids,
            documents,
            np.zeros_like(documents),
            joined,
            segments,
            np.ones(slots, bool),
        ),
    )


def real_inputs(size: Size, corpus: str, task: str) -> PretrainInputs:
    """Returns masked sentences of a corpus with the null document and random blocks.

    Raises:
      BadInputError: there are no such examples.
    """
    store = BlockStore.open(corpus)
    examples = Examples.open(examples_folder(corpus, task, "train"))
    random = np.random.default_rng(0)
    rows = random.choice(len(examples), size.batch, replace=False)
    batch = PretrainBatch(**examples.batch(rows))
    if batch.query_ids.shape[1] != _QUERY:
        raise BadInputError(
            f"expected sentences of {_QUERY} wordpieces in {corpus}, got "
            f"{batch.query_ids.shape[1]}; prepare it with --gin.QUERY_LENGTH={_QUERY}"
        )
    ids = random.integers(
        store.num_blocks, size=(size.batch, num_neighbours(_CANDIDATES)), dtype=np.int32
    )
    candidates = pretrain_candidates(
        store,
        Neighbours(ids, np.zeros(ids.shape, np.float32)),
        batch,
        num_candidates=_CANDIDATES,
        document_length=size.document,
        joined_length=size.lengths.joined,
    )
    return PretrainInputs(batch, candidates)


def time_ours(folder: pathlib.Path, size: Size, steps: int, settings: Mapping) -> dict:
    """Returns loss, seconds of each update, peak memory and operations of an update."""
    arrays = np.load(folder / "inputs.npz")
    batch, candidates = (
        kind(**{field.name: arrays[field.name] for field in dataclasses.fields(kind)})
        for kind in (PretrainBatch, Candidates)
    )
    inputs = jax.device_put(PretrainInputs(batch, candidates))
    models = _models(size, dropout_rate=0.1, **settings)
    params, _ = initial_params(*models, size.lengths, seed=0)
    loss = PretrainLoss(*models, Marginalization.PER_TOKEN)
    value = jax.jit(lambda p, x: _without_dropout(loss, p, x))(params, inputs)
    optimizer = make_optimizer(OptimizerConfig(1e-5, 0, 1000))
    state = create_state(params, optimizer, seed=0)
    flops = loss.update_flops(state, inputs)
    step, seconds = make_step(loss, optimizer), []
    for _ in range(steps + 1):  # The first one compiles.
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, inputs))
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "loss": float(value),
        "seconds": seconds[1:],
        "peak_gib": peak,
        "teraflop": flops / 1e12,
    }


def _without_dropout(loss: PretrainLoss, params: Any, inputs: PretrainInputs):
    likelihood, _ = loss.likelihood(params, inputs, None)
    return likelihood.loss_total / likelihood.loss_count


def _models(size: Size, **settings: Any) -> tuple[Retriever, KnowledgeEncoder]:
    bert = size.bert(**settings)
    # Dropout of embeddings is this project's own: the peers have none there.
    towers = RetrieverConfig(bert, projection_dropout=0.0)
    return Retriever(towers), KnowledgeEncoder(bert)


@dataclasses.dataclass
class Runner:
    """Starts measurements.

    Attributes:
      python: interpreter of the peers' environment.
      steps: updates of a measurement.
      rounds: measurements of each that takes part.
    """

    python: pathlib.Path
    steps: int
    rounds: int

    def compare(self, folder: pathlib.Path, size: str, dtype: str) -> dict[str, Any]:
        """Returns seconds, memory and loss of each; they take turns.

        Raises:
          BadInputError: a process failed, or they compute different losses.
        """
        arguments = [str(folder), f"--steps={self.steps}"]
        commands = {
            name: [
                *(str(self.python), "-m", "bench.peers.realm_torch"),
                *(peer[0], *arguments, f"--dtype={dtype}", *peer[1:]),
            ]
            for name, peer in PEERS.items()
        } | {
            name: [
                *(sys.executable, "-m", "bench.train_step", f"--case={folder}"),
                *(f"--size={size}", f"--settings={json.dumps(settings)}"),
                f"--steps={self.steps}",
            ]
            for name, settings in OURS[dtype].items()
        }
        found: dict[str, Any] = {name: [] for name in commands}
        for _ in range(self.rounds):
            for name, command in commands.items():
                found[name].append(_run(command))
        losses = {name: runs[0]["loss"] for name, runs in found.items()}
        spread = max(losses.values()) - min(losses.values())
        if dtype == "float32" and spread > _TOLERANCE:
            raise BadInputError(
                f"expected the same loss from all, got {losses}; one of them computes "
                "something else"
            )
        return {name: _median(runs) for name, runs in found.items()}


def _run(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BadInputError(
            f"expected {' '.join(command)} to succeed, got exit code "
            f"{done.returncode}: {done.stderr.strip()[-400:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _median(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of the repetitions of a measurement."""
    seconds = [s for run in runs for s in run["seconds"]]
    return {
        **runs[0],
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "peak_gib": max(run["peak_gib"] for run in runs),
    }


def rows(results: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yields the rows of the table."""
    for result in results:
        measured = result["measured"]
        ours = measured["realm_jax"]
        speeds = [f"{m['seconds']:.2f}" for m in measured.values()]
        memory = [f"{m['peak_gib']:.1f}" for m in measured.values()]
        ratios = [
            f"{measured[peer]['seconds'] / ours['seconds']:.2f}"
            for peer in list(PEERS)[1:]
        ]
        yield [
            f"{SIZES[result['size']]}, {SIZES[result['size']].document}, "
            f"{SIZES[result['size']].batch}",
            result["lengths"],
            result["dtype"],
            *speeds,
            *ratios,
            " / ".join(memory),
            f"{ours['teraflop'] / ours['seconds']:.3f}",
        ]


def markdown(results: Sequence[Mapping[str, Any]], command: str) -> str:
    """Returns the table with its command, machine and date."""
    heads = [
        "size, document wordpieces, batch",
        "lengths",
        "dtype",
        *(f"{name}, s" for name in (*PEERS, "realm_jax")),
        "to transformers without dropout of attention",
        "to tuned torch",
        "GiB at most, in the same order",
        "TFLOP/s of realm_jax",
    ]
    return (
        f"    {command}\n\n{machine()}, {today()}; medians.\n\n"
        f"{table(heads, rows(results))}\n"
    )


def main() -> None:
    """Compares, or runs this project's part of a comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", nargs="?", default="", help="as `realm prepare` made")
    parser.add_argument("--task", default="", help="masked sentences of the corpus")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "paper"])
    parser.add_argument("--dtypes", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", type=pathlib.Path, default=_PYTHON)
    parser.add_argument("--quick", action="store_true", help="one size, one round")
    parser.add_argument("--page", type=pathlib.Path, help="page to write the table to")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file of the figures")
    # This project's part of a comparison, which is started by the others.
    parser.add_argument("--case", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.case:
        size = SIZES[flags.size]
        print(json.dumps(time_ours(flags.case, size, flags.steps, flags.settings)))
        return
    if flags.quick:
        flags.sizes, flags.dtypes, flags.rounds = ["small"], ["float32"], 1
    try:
        _compare(flags)
    except BadInputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _compare(flags: argparse.Namespace) -> None:
    if not flags.peers.exists():
        raise BadInputError(
            f"expected the peers' Python at {flags.peers}, got none; run `make peers`, "
            "or give --peers"
        )
    if _ALLOCATOR not in os.environ:
        raise BadInputError(
            f"expected {_ALLOCATOR} in the environment, on which the seconds of all "
            "that are compared depend, got none; run it by `make bench`, or copy the "
            "line of the Makefile"
        )
    runner, results = Runner(flags.peers, flags.steps, flags.rounds), []
    for name in flags.sizes:
        size = SIZES[name]
        inputs = {"full": random_inputs(size)}
        if flags.corpus:
            inputs["real"] = real_inputs(size, flags.corpus, flags.task)
        for lengths, given in inputs.items():
            with tempfile.TemporaryDirectory() as folder:
                case = pathlib.Path(folder)
                write_case(case, size, given)
                for dtype in flags.dtypes:
                    found = runner.compare(case, name, dtype)
                    result = {"size": name, "lengths": lengths, "dtype": dtype}
                    results.append({**result, "measured": found})
                    print(json.dumps(results[-1]), flush=True)
    # The corpus is where it is on this machine; the page says what it is.
    said = ["CORPUS" if word == flags.corpus else word for word in sys.argv[1:]]
    text = markdown(results, f"python -m bench.train_step {' '.join(said)}")
    print(text)
    if flags.page:
        replace_place(flags.page, "train_step", text)
    if flags.output:
        flags.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
