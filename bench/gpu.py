"""Measures one accelerator: updates, embedding and search, each beside its limit.

    python -m bench.gpu --output gpu.json
    python -m bench.gpu --quick

BERT-base in bfloat16 takes updates of REALM over an index of the size of Wikipedia, all
on the device: it embeds 16 sentences, searches, lays the documents out, reads, and
updates. Weights, wordpieces and embeddings are random, so it needs no corpus, and no
TensorFlow. The limits are the rates of a large matrix product and of reading memory,
measured in the same run. With `--peers`, the Python of an environment that has PyTorch,
the updates of `bench.train_step`'s peers are timed there too. Below ten minutes on a
GPU; `--quick` has sizes for a CPU.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import train_step
from bench.command import command_line, make_parser, publish, reporting
from bench.encoder_settings import settings_from
from bench.machine import machine, today
from bench.processes import run_json
from bench.tables import table
from realm_jax.errors import BadInputError
from realm_jax.index import device_search
from realm_jax.index.candidates import num_neighbours
from realm_jax.index.device_search import EmbeddingTable
from realm_jax.index.device_tokens import DocumentLayout, TokenTable
from realm_jax.index.embed import document_embedder
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.training import flops
from realm_jax.training.candidate_search import RetrievingInputs, RetrievingLoss
from realm_jax.training.initialization import initial_params
from realm_jax.training.optimizers import OptimizerConfig, make_optimizer
from realm_jax.training.pretrain_loss import PretrainLoss
from realm_jax.training.state import create_state
from realm_jax.training.step import Loss, make_step

_CLS, _SEP, _FIRST_WORD, _WORDS = 101, 102, 1000, 29_000
_CANDIDATES, _PROJECTION = 8, 128
# Twelve layers one after another take a GPU's compiler more than two minutes.
_ENCODER = "dtype=bfloat16,scan_unroll=1"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      update: encoder, lengths and batch of an update.
      embedded: blocks of a call of the document tower.
      matrix: rows and columns of the matrices whose product gives the matrix rate.
      bytes: bytes that are read to measure the bandwidth.
      repetitions: of every measurement; the median counts.
      encoder: settings of towers and reader.
    """

    update: train_step.Size
    blocks: int
    embedded: int
    matrix: int
    bytes: int
    repetitions: int
    encoder: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: settings_from(_ENCODER)
    )


FULL = Sizes(
    train_step.Size(12, 768, 12, document=288, batch=16, query=96),
    blocks=13_353_728,
    embedded=512,
    matrix=8192,
    bytes=8 << 30,
    repetitions=10,
)
QUICK = Sizes(
    train_step.Size(2, 128, 2, document=64, batch=2, query=32),
    blocks=50_000,
    embedded=32,
    matrix=1024,
    bytes=256 << 20,
    repetitions=3,
)


def seconds_of(run: Callable[[], Any], repetitions: int) -> float:
    """Returns the median time of a call, after one that compiles."""
    jax.block_until_ready(run())
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def limits(sizes: Sizes) -> dict[str, float]:
    """Returns the matrix rate in FLOP/s and the bandwidth in bytes/s."""
    # Of ones the same product is faster, since fewer bits change.
    shape = (sizes.matrix, sizes.matrix)
    matrix = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    numbers = jnp.ones(sizes.bytes // 4, jnp.float32)
    product = jax.jit(lambda x: x @ x)
    total = jax.jit(jnp.sum)
    of_product = seconds_of(lambda: product(matrix), sizes.repetitions)
    return {
        "flops": 2 * sizes.matrix**3 / of_product,
        "bytes": numbers.nbytes / seconds_of(lambda: total(numbers), sizes.repetitions),
    }


def corpus(sizes: Sizes) -> tuple[EmbeddingTable, TokenTable]:
    """Returns random embeddings and wordpieces of blocks that fill their inputs."""
    rows = device_search.rows_per_device(
        sizes.blocks, device_search.single_device_mesh()
    )
    width = sizes.update.document - 3
    title = min(8, width // 2)

    @jax.jit
    def draw(key: jax.Array) -> tuple[EmbeddingTable, TokenTable]:
        of_rows, of_pieces = jax.random.split(key)
        pieces = jax.random.bits(of_pieces, (rows, width), jnp.uint16)
        embeddings = jax.random.normal(of_rows, (rows, _PROJECTION), jnp.bfloat16)
        return (
            EmbeddingTable(
                embeddings, codes=None, scales=None, num_blocks=jnp.int32(sizes.blocks)
            ),
            TokenTable(
                (pieces % _WORDS + _FIRST_WORD).astype(jnp.uint16),
                jnp.full(rows, title, jnp.uint16),
                jnp.full(rows, width - title, jnp.uint16),
            ),
        )

    return draw(jax.random.key(0))


def measure_updates(sizes: Sizes, peak: float) -> dict[str, Any]:
    """Times updates that search, and the same with candidates given."""
    size, mesh = sizes.update, device_search.single_device_mesh()
    models = train_step.models(size, **{"dropout_rate": 0.1} | sizes.encoder)
    params, _ = initial_params(*models, size.lengths, seed=0)
    optimizer = make_optimizer(OptimizerConfig(1e-5, 0, 1000))
    of_candidates = PretrainLoss(*models, Marginalization.PER_TOKEN)
    layout = DocumentLayout(size.document, size.lengths.joined, _CLS, _SEP)
    retrieving = RetrievingLoss(of_candidates, _CANDIDATES, layout, mesh)
    given = jax.device_put(train_step.random_inputs(size))
    embeddings, tokens = corpus(sizes)
    searching = RetrievingInputs(given.batch, embeddings, tokens)

    def seconds(loss: Loss, inputs: Any) -> tuple[float, int]:
        state = create_state(jax.tree.map(jnp.copy, params), optimizer, seed=0)
        operations = loss.update_flops(state, inputs)
        step = make_step(loss, optimizer)

        def update() -> Any:
            nonlocal state
            state, metrics = step(state, inputs)
            return metrics

        return seconds_of(update, sizes.repetitions), operations

    with_search, _ = seconds(retrieving, searching)
    without, operations = seconds(of_candidates, given)
    find = jax.jit(retrieving.candidates)
    search = seconds_of(lambda: find(params["retriever"], searching), sizes.repetitions)
    return {
        "seconds": with_search,
        "seconds_candidates_given": without,
        "seconds_search_and_layout": search,
        "search_share": max(0.0, with_search - without) / with_search,
        "teraflop": operations / 1e12,
        "utilisation": operations / with_search / peak,
        "utilisation_candidates_given": operations / without / peak,
    }


def measure_search(sizes: Sizes, bandwidth: float) -> dict[str, Any]:
    """Times the search of one update's queries over all embeddings."""
    embeddings, _ = corpus(dataclasses.replace(sizes, update=QUICK.update))
    mesh, wanted = device_search.single_device_mesh(), num_neighbours(_CANDIDATES)
    found = {}
    for count in (sizes.update.batch, 512):
        queries = jax.random.normal(jax.random.key(1), (count, _PROJECTION))
        seconds = seconds_of(
            lambda queries=queries: device_search.search(
                embeddings, queries, wanted, mesh=mesh
            ),
            sizes.repetitions,
        )
        found[str(count)] = {
            "seconds": seconds,
            "queries_per_second": count / seconds,
            "of_bandwidth": embeddings.rows.nbytes / seconds / bandwidth,
        }
    return found


def measure_embedding(sizes: Sizes, peak: float) -> dict[str, Any]:
    """Times the document tower on blocks of full length."""
    size = sizes.update
    retriever, reader = train_step.models(size, **sizes.encoder)
    params, _ = initial_params(retriever, reader, size.lengths, seed=0)
    embed = document_embedder(retriever.config)
    random = np.random.default_rng(0)
    shape = (sizes.embedded, size.document)
    ids = jnp.asarray(random.integers(_FIRST_WORD, _WORDS, shape), jnp.int32)
    inputs = (params["retriever"], ids, jnp.zeros_like(ids))
    seconds = seconds_of(lambda: embed(*inputs), sizes.repetitions)
    return {
        "blocks_per_second": sizes.embedded / seconds,
        "utilisation": flops.count(embed, *inputs) / seconds / peak,
    }


def measure_peers(
    sizes: Sizes, python: pathlib.Path, device: str
) -> dict[str, dict[str, Any]]:
    """Times the peers' updates with candidates given, in processes of their own."""
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        case = pathlib.Path(folder)
        train_step.write_case(
            case, sizes.update, train_step.random_inputs(sizes.update)
        )
        for name, peer in train_step.PEERS.items():
            command = [
                *(str(python), "-m", "bench.peers.realm_torch", peer[0], str(case)),
                *(f"--steps={sizes.repetitions}", "--dtype=bfloat16", *peer[1:]),
                f"--device={device}",
            ]
            measured[name] = statistics.median(run_json(command)["seconds"])
            _said(name, {"seconds": measured[name]})
    return measured


def rows(result: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the rows of the table: what, figure, limit or target."""
    update, found = result["update"], result["search"]
    limit = f"{result['limits']['flops'] / 1e12:.1f} TFLOP/s, measured"
    bandwidth = f"{result['limits']['bytes'] / 1e9:.0f} GB/s, measured"
    yield ["updates/s, with search", f"{1 / update['seconds']:.2f}", ""]
    yield [
        "utilisation, with search (target: 45 %)",
        f"{update['utilisation']:.1%}",
        limit,
    ]
    yield [
        "utilisation, candidates given",
        f"{update['utilisation_candidates_given']:.1%}",
        limit,
    ]
    yield [
        "search and layout, of an update (target: 5 %)",
        f"{update['search_share']:.1%}",
        bandwidth,
    ]
    for count, of in found.items():
        yield [
            f"search alone, {count} queries: queries/s",
            f"{of['queries_per_second']:,.0f}",
            f"{of['of_bandwidth']:.0%} of {bandwidth}",
        ]
    embedding = result["embedding"]
    yield [
        "blocks embedded/s",
        f"{embedding['blocks_per_second']:,.0f}",
        f"{embedding['utilisation']:.0%} of {limit}",
    ]
    for name, seconds in result["peers"].items():
        ratio = seconds / update["seconds_candidates_given"]
        yield [f"{name}, updates/s", f"{1 / seconds:.2f}", f"ours {ratio:.2f} times"]


def markdown(result: Mapping[str, Any], command: str) -> str:
    """Returns the table with its command, machine and date."""
    size = result["sizes"]["update"]
    return (
        f"    {command}\n\n{result['device']}, {machine()}, {today()}; medians. "
        f"L{size['layers']}/H{size['hidden']}, {size['batch']} sentences, "
        f"{_CANDIDATES} candidates, {size['query']}/{size['document']}/"
        f"{size['query'] + size['document']} wordpieces, "
        f"{', '.join(f'{k}={v}' for k, v in result['sizes']['encoder'].items())}; "
        f"{result['sizes']['blocks']:,} blocks.\n\n"
        f"{table(['', 'measured', 'limit'], rows(result))}\n"
    )


def measure(
    sizes: Sizes, peers: pathlib.Path | None, torch_device: str
) -> dict[str, Any]:
    """Measures everything, peers first: JAX keeps what it has used of a GPU."""
    of_peers = measure_peers(sizes, peers, torch_device) if peers else {}
    device = jax.devices()[0]
    if torch_device != "cpu" and device.platform == "cpu":
        raise BadInputError(
            "expected an accelerator, got a CPU, which would take hours; give --quick"
        )
    rates = _said("limits", limits(sizes))
    return {
        "device": device.device_kind,
        "sizes": dataclasses.asdict(sizes),
        "limits": rates,
        "embedding": _said("embedding", measure_embedding(sizes, rates["flops"])),
        "search": _said("search", measure_search(sizes, rates["bytes"])),
        "update": _said("updates", measure_updates(sizes, rates["flops"])),
        "peers": of_peers,
    }


def _said(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Prints figures on standard error as soon as they are there, and returns them."""
    print(f"{name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    """Measures, prints the table, and writes what was asked for."""
    parser = make_parser(__doc__, "page", "output")
    parser.add_argument("--quick", action="store_true", help="sizes for a CPU")
    parser.add_argument("--batch", type=int, help="sentences of an update")
    parser.add_argument(
        "--encoder", default=_ENCODER, help="settings of BertConfig, name=value,..."
    )
    parser.add_argument("--peers", type=pathlib.Path, help="a Python with PyTorch")
    flags = parser.parse_args()
    sizes = QUICK if flags.quick else FULL
    if flags.batch:
        update = dataclasses.replace(sizes.update, batch=flags.batch)
        sizes = dataclasses.replace(sizes, update=update)
    with reporting("gpu", flags):
        sizes = dataclasses.replace(sizes, encoder=settings_from(flags.encoder))
        result = measure(sizes, flags.peers, "cpu" if flags.quick else "cuda")
        publish("gpu", markdown(result, command_line("gpu")), result, flags)


if __name__ == "__main__":
    main()
