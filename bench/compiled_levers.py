"""Shows what each way to save work changes in a program, by the device's compiler.

    make tpu-compiler gpu-compiler
    python -m bench.compiled_levers --page docs/benchmarks.md

Needs neither TPU nor GPU. An update of pre-training at BERT-base's width and the
paper's lengths, with 2 of its 12 layers, which are unrolled, because the compiler for
TPUs counts the body of a loop once. Each row differs from the first of its device.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax

from bench import gpu_compiler
from bench.command import command_line, make_parser, publish, reporting
from bench.machine import today
from bench.tables import table
from realm_jax.data.corpus_size import CorpusSize
from realm_jax.errors import BadInputError
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training.initialization import ModelFactory
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.partitioning import MeshConfig
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.types import Lengths
from tpu_launch.planner import memory, programs
from tpu_launch.slices import parse

_LAYERS, _SENTENCES, _BLOCKS = 2, 8, 1_000_000
_BERT = functools.partial(
    BertConfig,
    hidden_size=768,
    num_layers=_LAYERS,
    num_heads=12,
    mlp_size=3072,
    dropout_rate=0.1,
    dtype="bfloat16",
    scan_unroll=_LAYERS,
)
_AS_IT_IS = "as it is"
_BY_CUDNN = "attention by cuDNN"
_H100 = "h100"

LEVERS: Mapping[str, Mapping[str, Any]] = {
    _AS_IT_IS: {},
    "no dropout of attention": {"attention_dropout_rate": 0.0},
    _BY_CUDNN: {
        "attention_dropout_rate": 0.0,
        "attention_implementation": "cudnn",
    },
    'remat="none"': {"remat": "none"},
    'remat="dots"': {"remat": "dots"},
    'remat="full"': {"remat": "full"},
}
"""Settings of the encoders that differ."""


def measure(machines: str, settings: Mapping[str, Any]) -> dict[str, float]:
    """Returns FLOPs, bytes moved and temporaries of an update on a device.

    The machines are a slice of one host, such as "v4-8", or "h100", whose compiler
    counts no FLOPs; the settings are those of the encoders.
    """
    on_gpu = machines == _H100
    if on_gpu:
        mesh = gpu_compiler.h100(MeshConfig())
    else:
        mesh = memory.compiler_mesh(parse(machines), MeshConfig())
    config = PretrainConfig(
        model_dir="-",
        corpus="-",
        task="-",
        train_steps=1000,
        batch_size=_SENTENCES * mesh.size,
        models=ModelFactory(
            functools.partial(_BERT, **settings),
            functools.partial(RetrieverConfig, projection_size=128),
            Lengths(96, 288, 384),
        ),
        optimizer=OptimizerConfig,
    )
    stage = programs.training(config, CorpusSize(_BLOCKS), mesh)
    tracing = gpu_compiler.tracing if on_gpu else contextlib.nullcontext
    with jax.set_mesh(mesh), tracing():
        traced = cast(Any, stage.step).trace(stage.state, stage.inputs)
        lowered = traced.lower(lowering_platforms=("cuda" if on_gpu else "tpu",))
        compiled = lowered.compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    if on_gpu:
        moved = gpu_compiler.bytes_moved(compiled.as_text())
        return {"bytes": moved, "temporaries": temporaries}
    cost = compiled.cost_analysis()
    return {
        "flops": cost["flops"],
        "bytes": cost["bytes accessed"],
        "temporaries": temporaries,
    }


def rows(measured: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yields a row for each device and lever, with ratios to the update as it is."""
    for found in measured:
        first = next(
            other
            for other in measured
            if other["lever"] == _AS_IT_IS and other["slice"] == found["slice"]
        )
        cells = []
        for name, unit in (("flops", 1e12), ("bytes", 1e9), ("temporaries", 2**30)):
            if name not in found:
                cells.append("")
                continue
            ratio = found[name] / first[name]
            cells.append(f"{found[name] / unit:.2f} ({ratio:.2f})")
        yield [found["slice"], found["lever"], *cells]


def _require_compiler(machines: str) -> None:
    if machines == _H100:
        there, target = gpu_compiler.FETCHED.exists(), "gpu-compiler"
    else:
        there, target = memory.has_compiler(parse(machines)), "tpu-compiler"
    if not there:
        raise BadInputError(
            f"expected a compiler for {machines}, got none; run `make {target}`"
        )


def main() -> None:
    """Compiles, and prints the table."""
    parser = make_parser(__doc__, "page", "output")
    parser.add_argument("--slices", nargs="+", default=["v4-8", "v5litepod-4", _H100])
    parser.add_argument("--levers", nargs="+", choices=LEVERS, default=list(LEVERS))
    flags = parser.parse_args()
    with reporting("compiled_levers", flags):
        if flags.levers[0] != _AS_IT_IS:
            raise BadInputError(
                f"expected {_AS_IT_IS!r} first among --levers, which the others are "
                f"compared with, got {flags.levers[0]!r}; name it first"
            )
        measured = []
        for machines in flags.slices:
            _require_compiler(machines)
        if _H100 in flags.slices:
            gpu_compiler.enable()
        for machines in flags.slices:
            for name in flags.levers:
                if name == _BY_CUDNN and machines != _H100:
                    continue
                found = measure(machines, LEVERS[name])
                measured.append({"slice": machines, "lever": name, **found})
                print(measured[-1], flush=True)
        heads = [
            "device",
            "update",
            "TFLOP",
            "GB read and written",
            "GiB of temporaries",
        ]
        text = (
            f"    {command_line('compiled_levers')}\n\n"
            f"Of each device, by the compiler for it, {today()}; in brackets the ratio "
            f"to the first row of its kind.\n\n{table(heads, rows(measured))}\n"
        )
        publish("compiled_levers", text, measured, flags)


if __name__ == "__main__":
    main()
