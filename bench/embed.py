"""Times the embedding of a corpus beside PyTorch and ONNX Runtime.

    make peers
    python -m bench.embed CORPUS --page docs/benchmarks.md

MiniLM embeds blocks spread over CORPUS, which `realm prepare` made with its vocabulary,
as `realm build-index` does. The peers (`bench/peers/embed_torch.py`) encode the same
wordpieces with the same weights, and must find the same embeddings but for rounding, or
the command fails. Each measurement is a process of its own; they take turns.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from bench.command import command_line, make_parser, publish, reporting
from bench.index_embed import random_params, spread_blocks
from bench.machine import machine, peak_gib, today
from bench.processes import PEERS_PYTHON, medians, require_peers, run_json
from bench.tables import table
from realm_jax.data.blocks import BlockStore
from realm_jax.errors import BadInputError
from realm_jax.index.embed import EmbedConfig, document_embedder, embed_blocks
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.weights.bert import config_from_json, load_bert

_MINILM = pathlib.Path(".cache/data/minilm-l6")
_BATCH = 32

# Arguments of each that takes part; "realm_jax" ones are settings of the encoder.
PEERS = {
    "transformers float32": ["transformers", "--dtype=float32"],
    "transformers bfloat16": ["transformers", "--dtype=bfloat16"],
    "tuned torch float32": ["tuned", "--dtype=float32"],
    "tuned torch bfloat16": ["tuned", "--dtype=bfloat16"],
    "ONNX Runtime float32": ["onnx", "--dtype=float32"],
    "ONNX Runtime int8": ["onnx", "--dtype=int8"],
}
OURS = {
    "realm_jax float32": {},
    "realm_jax bfloat16 products": {"products": "bfloat16"},
}
# Least cosine to the float32 embeddings of `transformers`.
_COSINES = {"float32": 0.999_99, "bfloat16": 0.999, "int8": 0.9}


def _retriever(weights: pathlib.Path, **settings: Any) -> RetrieverConfig:
    bert = dataclasses.replace(config_from_json(weights), **settings)
    return RetrieverConfig(bert, pooling="mean")


def time_ours(case: pathlib.Path, flags: argparse.Namespace) -> dict[str, Any]:
    """Embeds as the index builder does, and writes the embeddings."""
    config = _retriever(flags.weights, **flags.settings)
    store = BlockStore.open(flags.corpus)
    embed = document_embedder(config)
    params = jax.device_put(_params(flags.weights))
    block_ids = spread_blocks(store, flags.blocks)
    sizes = EmbedConfig(flags.document_length, _BATCH)
    # Compiles every length; the blocks of a corpus are embedded by the shard.
    embeddings = embed_blocks(embed, params, store, block_ids, sizes)
    seconds = []
    for _ in range(flags.repetitions):
        began = time.perf_counter()
        embeddings = embed_blocks(embed, params, store, block_ids, sizes)
        seconds.append(time.perf_counter() - began)
    np.save(case / "ours.npy", embeddings)
    return {"seconds": seconds, "peak_gib": peak_gib()}


def _params(weights: pathlib.Path) -> Any:
    """Returns MiniLM with a random projection, the same in every process."""
    config = _retriever(weights)
    tower = jax.device_get(random_params(config)["retriever"]["tower"])
    loaded = load_bert(weights, config.bert, needs_pooler=False)
    return {"tower": tower | {"bert": tower["bert"] | loaded}}


def _projected(
    means: Float[np.ndarray, "block hidden"], tower: Mapping[str, Any]
) -> Float[np.ndarray, "block projection"]:
    """Returns the embeddings that belong to the peers' means over wordpieces."""
    dense, norm = tower["projection"], tower["projection_norm"]
    x = means @ dense["kernel"] + dense["bias"]
    x = x - x.mean(-1, keepdims=True)
    return x / x.std(-1, keepdims=True) * norm["scale"] + norm["bias"]


def compare(case: pathlib.Path, flags: argparse.Namespace) -> dict[str, Any]:
    """Returns what was measured of each; they take turns."""
    store = BlockStore.open(flags.corpus)
    block_ids = spread_blocks(store, flags.blocks)
    ids, segments = store.document_ids(block_ids, flags.document_length)
    np.savez(case / "inputs.npz", ids=ids, segments=segments)
    for file in ("config.json", "model.safetensors"):
        (case / file).symlink_to((flags.weights / file).resolve())
    tower = _params(flags.weights)["tower"]
    found: dict[str, Any] = {name: [] for name in (*PEERS, *OURS)}
    embeddings: dict[str, np.ndarray] = {}
    for _ in range(flags.rounds):
        for name, arguments in PEERS.items():
            output = case / "theirs.npy"
            command = [
                *(str(flags.peers), "-m", "bench.peers.embed_torch"),
                *(arguments[0], str(case), *arguments[1:], f"--batch={_BATCH}"),
                *(f"--repetitions={flags.repetitions}", f"--output={output}"),
            ]
            found[name].append(run_json(command))
            embeddings[name] = _projected(np.load(output), tower)
        for name, settings in OURS.items():
            command = [
                *(sys.executable, "-m", "bench.embed", flags.corpus),
                *(f"--case={case}", f"--weights={flags.weights}"),
                *(f"--settings={json.dumps(settings)}", f"--blocks={flags.blocks}"),
                f"--document_length={flags.document_length}",
                f"--repetitions={flags.repetitions}",
            ]
            found[name].append(run_json(command))
            embeddings[name] = np.load(case / "ours.npy")
    expected = embeddings["transformers float32"]
    measured = {name: medians(runs) for name, runs in found.items()}
    for name, array in embeddings.items():
        cosine = float(_cosines(array, expected).min())
        least = next(least for kind, least in _COSINES.items() if kind in name)
        if cosine < least:
            raise BadInputError(
                f"expected {name} to find the embeddings of transformers (cosine "
                f"{least}), got {cosine:.5f}; one of them computes something else"
            )
        measured[name]["cosine"] = cosine
        measured[name]["blocks_per_second"] = len(ids) / measured[name]["seconds"]
    return {
        "blocks": len(ids),
        "document_length": flags.document_length,
        "mean_length": float((ids != 0).sum(-1).mean()),
        "measured": measured,
    }


def _cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    return (left * right).sum(-1) / lengths


def rows(measured: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the rows of the table."""
    best = max(of["blocks_per_second"] for name, of in measured.items() if name in OURS)
    for name, of in measured.items():
        yield [
            name,
            f"{of['blocks_per_second']:.1f}",
            f"{of['least']:.2f} to {of['most']:.2f}",
            f"{best / of['blocks_per_second']:.2f}",
            f"{of['cosine']:.5f}",
            f"{of['peak_gib']:.1f}",
        ]


def markdown(result: Mapping[str, Any], command: str) -> str:
    """Returns the table with its command, machine and date."""
    heads = [
        *("", "blocks/s", "seconds, least to most"),
        *("our faster one to it", "least cosine", "GiB at most"),
    ]
    return (
        f"    {command}\n\n{machine()}, {today()}. {result['blocks']:,} "
        f"blocks of {result['mean_length']:.0f} wordpieces on average, at most "
        f"{result['document_length']}; medians.\n\n"
        f"{table(heads, rows(result['measured']))}\n"
    )


def main() -> None:
    """Compares, or runs this project's part of a comparison."""
    parser = make_parser(__doc__, "page", "output")
    parser.add_argument(
        "corpus", help="as `realm prepare` made, in MiniLM's vocabulary"
    )
    parser.add_argument("--weights", type=pathlib.Path, default=_MINILM)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--document_length", type=int, default=288)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--peers", type=pathlib.Path, default=PEERS_PYTHON)
    parser.add_argument("--quick", action="store_true", help="64 blocks, one round")
    # This project's part of a comparison, which is started by the others.
    parser.add_argument("--case", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.case:
        print(json.dumps(time_ours(flags.case, flags)))
        return
    if flags.quick:
        flags.blocks, flags.rounds, flags.repetitions = 64, 1, 1
    with reporting("embed", flags):
        require_peers(flags.peers)
        with tempfile.TemporaryDirectory() as folder:
            result = compare(pathlib.Path(folder), flags)
        text = markdown(result, command_line("embed", {"CORPUS": flags.corpus}))
        publish("embed", text, result, flags)


if __name__ == "__main__":
    main()
