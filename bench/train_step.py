"""Times an update of REALM's pre-training beside the same update in PyTorch.

    make peers
    python -m bench.train_step CORPUS --task my_salient --page docs/benchmarks.md
    python -m bench.train_step CORPUS --task my_salient --lengths real --quick

The peers are the REALM of `transformers`, as it comes and without dropout of attention
weights, and an update tuned for speed, which has none either
(`bench/peers/realm_torch.py`). This project's update is timed with that dropout and
without, and compared with those that do the same work. All start from the same weights
and take the same inputs: random wordpieces that fill every sequence, and, given a
corpus, sentences and passages of their real lengths. Where PACK_DOCUMENTS would let two
of its documents share a row, an update that does so is timed, too. All have the same
two cores.

Without dropout all must compute the same loss, or the command fails. Each measurement
is a process of its own, so that none holds another's memory; they take turns.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from bench.command import command_line, make_parser, publish, reporting
from bench.machine import machine, peak_gib, today
from bench.processes import (
    PEERS_PYTHON,
    medians,
    pin_to_cores,
    require_peers,
    run_json,
)
from bench.tables import table
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.data.layout import NULL_DOCUMENT_LENGTH
from realm_jax.errors import BadInputError
from realm_jax.index.candidates import num_neighbours, pretrain_candidates
from realm_jax.metrics.means import compute
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.prepare.examples import examples_folder
from realm_jax.training.initialization import initial_params
from realm_jax.training.optimizers import OptimizerConfig, make_optimizer
from realm_jax.training.packed_updates import PackedLengths, choose_packed_lengths
from realm_jax.training.pretrain_loss import PretrainInputs, PretrainLoss
from realm_jax.training.state import create_state
from realm_jax.training.step import make_step
from realm_jax.types import NULL_BLOCK, Candidates, Lengths, Neighbours, PretrainBatch
from realm_jax.weights.bert import save_bert, save_masked_lm

_VOCABULARY, _CANDIDATES, _MASKS = 30_522, 8, 10
_CLS, _SEP, _MASK, _FIRST_WORD = 101, 102, 103, 1000
_TOLERANCE, _CORES = 1e-4, 2
_PACKING_FILE = "packing.json"
OURS_AS_BERT = "realm_jax"
OURS = f"{OURS_AS_BERT}, no dropout of attention"
_PACKED = f"{OURS}, packed"
_LENGTHS = ["full", "real"]


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of each encoder, of documents and queries in wordpieces, and of a batch."""

    layers: int
    hidden: int
    heads: int
    document: int
    batch: int
    query: int = 64

    def __str__(self) -> str:
        return f"L{self.layers}/H{self.hidden}"

    @property
    def lengths(self) -> Lengths:
        """Padded lengths."""
        return Lengths(self.query, self.document, self.query + self.document)

    def bert(self, **settings: Any) -> BertConfig:
        """Returns the encoder of towers and reader."""
        return BertConfig(
            vocab_size=_VOCABULARY,
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            mlp_size=4 * self.hidden,
            **{"scan_unroll": self.layers} | settings,
        )


SIZES = {
    "small": Size(4, 256, 4, document=128, batch=8),
    "paper": Size(6, 384, 6, document=288, batch=4),
    "base": Size(12, 768, 12, document=288, batch=1),
}
TUNED = "tuned torch"
PEERS = {
    "transformers": ["transformers", "--attention_dropout=0.1"],
    "transformers, no dropout of attention": ["transformers"],
    TUNED: ["tuned"],
}
_COLUMNS = (*PEERS, OURS_AS_BERT, OURS, _PACKED)
_KEEPS = {"attention_dropout_rate": 0.0}
_PRODUCTS = {"products": "bfloat16"}
ARMS = {
    "float32": {OURS_AS_BERT: {}, OURS: _KEEPS, _PACKED: _KEEPS},
    "bfloat16": {
        OURS_AS_BERT: _PRODUCTS,
        OURS: _PRODUCTS | _KEEPS,
        _PACKED: _PRODUCTS | _KEEPS,
    },
}


def write_case(
    folder: pathlib.Path,
    size: Size,
    inputs: PretrainInputs,
    packing: PackedLengths | None = None,
) -> None:
    """Writes inputs and random weights of a comparison, for all that take part.

    `packing` has the lengths of rows that two documents share; None for no packed
    updates.
    """
    batch, candidates = inputs.batch, inputs.candidates
    arrays = {
        field.name: np.asarray(getattr(part, field.name))
        for part in (batch, candidates)
        for field in dataclasses.fields(part)
    }
    np.savez(folder / "inputs.npz", **arrays)
    params, _ = initial_params(*models(size), size.lengths, seed=0)
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
    if packing is not None:
        (folder / _PACKING_FILE).write_text(json.dumps(dataclasses.asdict(packing)))


def random_inputs(size: Size) -> PretrainInputs:
    """Returns random sentences and documents without padding, and the null document."""
    random = np.random.default_rng(0)

    def words(*shape: int) -> np.ndarray:
        return random.integers(_FIRST_WORD, _VOCABULARY, shape, dtype=np.int32)

    query = words(size.batch, size.query)
    query[:, 0], query[:, -1] = _CLS, _SEP
    places = [
        np.sort(random.choice(np.arange(1, size.query - 1), _MASKS, replace=False))
        for _ in query
    ]
    positions = np.array(places, np.int32)
    targets = np.take_along_axis(query, positions, axis=1)
    np.put_along_axis(query, positions, _MASK, axis=1)
    slots = (size.batch, _CANDIDATES)
    documents = words(*slots, size.document)
    documents[..., 0], documents[..., -1] = _CLS, _SEP
    asked = np.broadcast_to(query[:, None], (*slots, size.query))
    joined = np.concatenate([asked, documents], axis=-1)
    segments = np.zeros_like(joined)
    segments[..., size.query :] = 1
    # The null document.
    documents[:, 0, 1:] = 0
    documents[:, 0, 1:NULL_DOCUMENT_LENGTH] = _SEP
    joined[:, 0, size.query :], segments[:, 0, size.query :] = 0, 0
    joined[:, 0, size.query], segments[:, 0, size.query] = _SEP, 1
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
    """Returns masked sentences of a corpus with the null document and random blocks."""
    store = BlockStore.open(corpus)
    examples = Examples.open(examples_folder(corpus, task, "train"))
    random = np.random.default_rng(0)
    rows = random.choice(len(examples), size.batch, replace=False)
    batch = PretrainBatch(**examples.batch(rows))
    if batch.query_ids.shape[1] != size.query:
        raise BadInputError(
            f"expected sentences of {size.query} wordpieces in {corpus}, got "
            f"{batch.query_ids.shape[1]}; prepare it with "
            f"--gin.QUERY_LENGTH={size.query}"
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


def packed_lengths(size: Size, corpus: str, task: str) -> PackedLengths | None:
    """Returns the lengths that a run with PACK_DOCUMENTS chooses for a corpus."""
    examples = Examples.open(examples_folder(corpus, task, "train"))
    num_packed = size.batch * (_CANDIDATES - 1)
    return choose_packed_lengths(
        BlockStore.open(corpus),
        examples.features["query_ids"],
        size.lengths,
        num_documents=num_packed,
        num_joined=num_packed,
        num_queries=size.batch,
    )


def time_ours(
    folder: pathlib.Path,
    size: Size,
    steps: int,
    settings: Mapping[str, Any],
    packs: bool = False,
) -> dict[str, Any]:
    """Returns loss, seconds of each update, peak memory and operations of an update.

    The folder is one that `write_case` wrote. With `packs` two documents share a row,
    at the lengths that are there. The settings are further ones of the encoders.
    """
    arrays = np.load(folder / "inputs.npz")
    batch, candidates = (
        kind(**{field.name: arrays[field.name] for field in dataclasses.fields(kind)})
        for kind in (PretrainBatch, Candidates)
    )
    inputs = jax.device_put(PretrainInputs(batch, candidates))
    packing = None
    if packs:
        packing = PackedLengths(**json.loads((folder / _PACKING_FILE).read_text()))

    def make_loss(dropout_rate: float) -> PretrainLoss:
        both = models(size, dropout_rate=dropout_rate, **settings)
        return PretrainLoss(*both, Marginalization.PER_TOKEN, packing=packing)

    loss = make_loss(dropout_rate=0.1)
    params, _ = initial_params(loss.retriever, loss.reader, size.lengths, seed=0)
    value, metrics = jax.jit(make_loss(dropout_rate=0.0))(
        params, inputs, jax.random.key(0)
    )
    optimizer = make_optimizer(OptimizerConfig(1e-5, 0, 1000))
    state = create_state(params, optimizer, seed=0)
    flops = loss.update_flops(state, inputs)
    step, seconds = make_step(loss, optimizer), []
    for _ in range(steps + 1):  # The first one compiles.
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, inputs))
        seconds.append(time.perf_counter() - began)
    return {
        "loss": float(value),
        "seconds": seconds[1:],
        "peak_gib": peak_gib(),
        "teraflop": flops / 1e12,
        **({"packed": compute(metrics)["packed"]} if packs else {}),
    }


def models(size: Size, **settings: Any) -> tuple[Retriever, KnowledgeEncoder]:
    """Returns retriever and reader of a comparison, with settings of their encoder."""
    bert = size.bert(**settings)
    # Dropout of embeddings is this project's own: the peers have none there.
    towers = RetrieverConfig(bert, projection_dropout=0.0)
    return Retriever(towers), KnowledgeEncoder(bert)


def compare(
    flags: argparse.Namespace, folder: pathlib.Path, size: str, dtype: str
) -> dict[str, Any]:
    """Returns seconds, memory and loss of each; they take turns."""
    arguments = [str(folder), f"--steps={flags.steps}"]
    commands = {
        name: [
            *(str(flags.peers), "-m", "bench.peers.realm_torch"),
            *(peer[0], *arguments, f"--dtype={dtype}", *peer[1:]),
        ]
        for name, peer in PEERS.items()
    } | {
        name: [
            *(sys.executable, "-m", "bench.train_step", f"--case={folder}"),
            *(f"--size={size}", f"--settings={json.dumps(settings)}"),
            f"--steps={flags.steps}",
            *(["--packs"] if name == _PACKED else []),
        ]
        for name, settings in ARMS[dtype].items()
        if name != _PACKED or (folder / _PACKING_FILE).exists()
    }
    found: dict[str, Any] = {name: [] for name in commands}
    for _ in range(flags.rounds):
        for name, command in commands.items():
            found[name].append(run_json(command))
    losses = {name: runs[0]["loss"] for name, runs in found.items()}
    spread = max(losses.values()) - min(losses.values())
    if dtype == "float32" and spread > _TOLERANCE:
        raise BadInputError(
            f"expected the same loss from all, got {losses}; one of them computes "
            "something else"
        )
    return {name: medians(runs) for name, runs in found.items()}


def rows(results: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yields the rows of the table."""
    for result in results:
        measured, size = result["measured"], SIZES[result["size"]]
        alike = [measured[name] for name in (OURS, _PACKED) if name in measured]
        best = min(alike, key=lambda each: each["seconds"])
        ratios = [
            measured[peer]["seconds"] / ours["seconds"]
            for peer, ours in zip(
                PEERS, (measured[OURS_AS_BERT], best, best), strict=True
            )
        ]
        yield [
            f"{size}, {size.document}, {size.batch}",
            result["lengths"],
            result["dtype"],
            *(_cell(measured.get(name), "seconds", 2) for name in _COLUMNS),
            *(f"{ratio:.2f}" for ratio in ratios),
            " / ".join(_cell(measured.get(name), "peak_gib", 1) for name in _COLUMNS),
            f"{best['peak_gib'] / measured[TUNED]['peak_gib']:.2f}",
            f"{best['teraflop'] / best['seconds']:.3f}",
        ]


def _cell(measured: Mapping[str, Any] | None, name: str, decimals: int) -> str:
    return f"{measured[name]:.{decimals}f}" if measured else "-"


def markdown(results: Sequence[Mapping[str, Any]], command: str) -> str:
    """Returns the table with its command, machine and date."""
    heads = [
        "size, document wordpieces, batch",
        "lengths",
        "dtype",
        *(f"{name}, s" for name in _COLUMNS),
        *(f"times {name}" for name in PEERS),
        "GiB at most, in the same order",
        "GiB to tuned torch",
        "TFLOP/s",
    ]
    return (
        f"    {command}\n\n{machine()}, {today()}; medians. Times and GiB to a peer "
        "are those of the fastest update of this project that drops out the same.\n\n"
        f"{table(heads, rows(results))}\n"
    )


def main() -> None:
    """Compares, or runs this project's part of a comparison."""
    parser = make_parser(__doc__, "page", "output")
    parser.add_argument("corpus", nargs="?", default="", help="as `realm prepare` made")
    parser.add_argument("--task", default="", help="masked sentences of the corpus")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["small", "paper"])
    parser.add_argument("--dtypes", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--lengths", nargs="+", choices=_LENGTHS, default=_LENGTHS)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", type=pathlib.Path, default=PEERS_PYTHON)
    parser.add_argument("--quick", action="store_true", help="one size, one round")
    # This project's part of a comparison, which is started by the others.
    parser.add_argument("--case", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--packs", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.case:
        size = SIZES[flags.size]
        found = time_ours(
            flags.case, size, flags.steps, flags.settings, packs=flags.packs
        )
        print(json.dumps(found))
        return
    if flags.quick:
        flags.sizes, flags.dtypes, flags.rounds = ["small"], ["float32"], 1
    place = "train_step" if "real" in flags.lengths else "train_step of full length"
    with reporting(place, flags):
        _compare(flags, place)


def _compare(flags: argparse.Namespace, place: str) -> None:
    require_peers(flags.peers)
    pin_to_cores(_CORES)
    if flags.lengths == ["real"] and not flags.corpus:
        raise BadInputError("expected a CORPUS for --lengths real, got none; name one")
    results = []
    for name in flags.sizes:
        size = SIZES[name]
        inputs = {}
        if "full" in flags.lengths:
            inputs["full"] = random_inputs(size)
        if "real" in flags.lengths and flags.corpus:
            inputs["real"] = real_inputs(size, flags.corpus, flags.task)
        for lengths, given in inputs.items():
            with tempfile.TemporaryDirectory() as folder:
                case = pathlib.Path(folder)
                packing = None
                if lengths == "real":
                    packing = packed_lengths(size, flags.corpus, flags.task)
                write_case(case, size, given, packing)
                for dtype in flags.dtypes:
                    found = compare(flags, case, name, dtype)
                    result = {"size": name, "lengths": lengths, "dtype": dtype}
                    results.append({**result, "measured": found})
                    print(json.dumps(results[-1]), flush=True)
    command = command_line("train_step", {"CORPUS": flags.corpus})
    publish(place, markdown(results, command), results, flags)


if __name__ == "__main__":
    main()
