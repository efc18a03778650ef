"""Compiles the search and the whole pre-training step for a TPU slice, without a TPU.

    python -m bench.tpu_compile search --topology v3:4x8
    python -m bench.tpu_compile step --topology v3:4x8 --remat full

The compiler is the real one (libtpu, the extra `tpu`); it says how many bytes each
device needs, or that the program does not fit. Nothing is run and nothing is allocated:
the arrays have shapes only.
"""

import argparse
import datetime
import json
import os
from typing import Any

# Compiled for a TPU, on the host: no TPU is looked for.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from realm_jax import axes
from realm_jax.index import device_search
from realm_jax.index.candidates import num_neighbours
from realm_jax.index.device_search import EmbeddingTable, Precision
from realm_jax.index.device_tokens import DocumentLayout, TokenTable
from realm_jax.models.bert import BertConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.training import initialization, partitioning
from realm_jax.training.initialization import Lengths
from realm_jax.training.losses import PretrainLoss
from realm_jax.training.optimizers import OptimizerConfig, make_optimizer
from realm_jax.training.renewal import Renewal, make_renewing_step
from realm_jax.training.retrieving import RetrievingInputs, RetrievingLoss
from realm_jax.training.state import create_state, state_shardings
from realm_jax.training.step import make_step
from realm_jax.types import PretrainBatch

# REALM, section 4 and the authors' code.
_BLOCKS = 13_353_728
_DIMENSION = 128
_LENGTHS = Lengths(query=96, document=288, joined=384)
_MASKS = 10
_MIB = 1 << 20


def slice_mesh(topology: str) -> Mesh:
    """The devices of a slice, all along `data`."""
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    return Mesh(
        np.array(devices).reshape(-1, 1, 1),
        axes.MESH_AXES,
        axis_types=(AxisType.Auto,) * 3,
    )


def abstract_embeddings(
    num_blocks: int, mesh: Mesh, precision: Precision
) -> EmbeddingTable:
    """The embeddings of a corpus, as shapes."""
    num_rows = device_search.rows_per_device(num_blocks, mesh) * mesh.size
    exact = jnp.float32 if precision is Precision.FLOAT32 else jnp.bfloat16
    codes = scales = None
    if precision is Precision.INT8:
        codes = _rows((num_rows, _DIMENSION), jnp.int8, mesh)
        scales = _rows((num_rows,), jnp.float32, mesh)
    count = _place((), jnp.int32, NamedSharding(mesh, PartitionSpec()))
    rows = _rows((num_rows, _DIMENSION), exact, mesh)
    return EmbeddingTable(rows, codes, scales, count)


def abstract_tokens(num_blocks: int, mesh: Mesh) -> TokenTable:
    """The wordpieces of a corpus of 288 wordpieces a block, as shapes."""
    num_rows = device_search.rows_per_device(num_blocks, mesh) * mesh.size
    lengths = _rows((num_rows,), jnp.uint16, mesh)
    width = _LENGTHS.document - 3
    return TokenTable(_rows((num_rows, width), jnp.uint16, mesh), lengths, lengths)


def compile_search(arguments: argparse.Namespace) -> dict[str, Any]:
    """The search alone."""
    mesh = slice_mesh(arguments.topology)
    table = abstract_embeddings(arguments.blocks, mesh, Precision(arguments.precision))
    queries = _batch((arguments.batch, _DIMENSION), jnp.float32, mesh)

    def search(table, queries):
        return device_search.search(
            table,
            queries,
            num_neighbours(arguments.candidates),
            mesh=mesh,
            approximate=arguments.approximate,
        )

    return _memory(jax.jit(search), mesh, table, queries)


def compile_step(arguments: argparse.Namespace) -> dict[str, Any]:
    """Search, candidates, both towers, reader, gradient and update, as one program."""
    mesh = slice_mesh(arguments.topology)
    # BERT-base, as gin/models/base.gin has it.
    bert = BertConfig(
        vocab_size=30_522,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        mlp_size=3072,
        dropout_rate=0.1,
        dtype="bfloat16",
        remat=arguments.remat,
    )
    retriever = Retriever(RetrieverConfig(bert, projection_size=_DIMENSION))
    reader = KnowledgeEncoder(bert)
    layout = DocumentLayout(_LENGTHS.document, _LENGTHS.joined, cls=101, sep=102)
    loss = RetrievingLoss(
        PretrainLoss(retriever, reader),
        arguments.candidates,
        layout,
        mesh,
        arguments.approximate,
    )
    optimizer = make_optimizer(OptimizerConfig(3e-5, 10_000, 200_000), ())
    state, names = jax.eval_shape(lambda: _initial_state(retriever, reader, optimizer))
    places = state_shardings(state, partitioning.parameter_shardings(mesh, names), mesh)
    state = jax.tree.map(
        lambda array, place: _place(array.shape, array.dtype, place), state, places
    )
    table = abstract_embeddings(arguments.blocks, mesh, Precision(arguments.precision))
    step = make_step(loss, optimizer)
    if arguments.write_back:
        renewal = Renewal(None, write_back=True)
        step = make_renewing_step(loss, optimizer, renewal)
        state, table = state.replace(index=table), None
    size = arguments.batch
    batch = PretrainBatch(
        _batch((size, _LENGTHS.query), jnp.int32, mesh),
        _batch((size, _MASKS), jnp.int32, mesh),
        _batch((size, _MASKS), jnp.int32, mesh),
        _batch((size, _MASKS), jnp.float32, mesh),
        _batch((size,), jnp.int32, mesh),
    )
    inputs = RetrievingInputs(batch, table, abstract_tokens(arguments.blocks, mesh))
    return _memory(step, mesh, state, inputs)


def _initial_state(retriever, reader, optimizer):
    params, names = initialization.initial_params(retriever, reader, _LENGTHS, 0)
    return create_state(params, optimizer, 0), names


def _memory(function, mesh: Mesh, *inputs) -> dict[str, Any]:
    with jax.set_mesh(mesh):
        compiled = function.trace(*inputs).lower(lowering_platforms=("tpu",)).compile()
    memory = compiled.memory_analysis()
    return {
        "devices": mesh.size,
        "mib_per_device": {
            "arguments": round(memory.argument_size_in_bytes / _MIB, 1),
            "outputs": round(memory.output_size_in_bytes / _MIB, 1),
            "aliased": round(memory.alias_size_in_bytes / _MIB, 1),
            "temporaries": round(memory.temp_size_in_bytes / _MIB, 1),
        },
    }


def _rows(shape: tuple[int, ...], dtype, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return _place(shape, dtype, device_search.row_sharding(mesh))


def _batch(shape: tuple[int, ...], dtype, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return _place(shape, dtype, NamedSharding(mesh, axes.partition_spec("batch")))


def _place(shape, dtype, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in {"search": compile_search, "step": compile_step}.items():
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("--topology", default="v3:4x8")
        command.add_argument("--blocks", type=int, default=_BLOCKS)
        command.add_argument("--batch", type=int, default=512)
        command.add_argument("--candidates", type=int, default=8)
        command.add_argument(
            "--precision",
            default="bfloat16",
            choices=[precision.value for precision in Precision],
        )
        command.add_argument("--approximate", action="store_true")
    command.add_argument("--remat", default="full", choices=["none", "dots", "full"])
    command.add_argument("--write_back", action="store_true")
    return parser


def main() -> None:
    """Compiles one program and prints what it needs."""
    arguments = _parser().parse_args()
    settings = {k: v for k, v in vars(arguments).items() if k != "run"}
    measured = {
        "date": datetime.date.today().isoformat(),
        **settings,
        **arguments.run(arguments),
    }
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
