"""Plans the paper's pre-training for TPU slices, with the compiler for each of them.

    make tpu-compiler
    python -m bench.tpu_compile
    python -m bench.tpu_compile --model large --fsdp 8
    python -m bench.tpu_compile --search --slices v3-64

Needs no TPU. Each slice takes minutes; its line is printed as soon as it is known. The
search alone takes seconds, in every precision.
"""

import argparse
import itertools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from bench.command import make_parser
from realm_jax.index.device_search import Precision
from realm_jax.index.searchers import DeviceConfig
from realm_jax.training.partitioning import MeshConfig
from tpu_launch.planner import memory, programs
from tpu_launch.slices import parse

_SLICES = ("v3-64", "v4-128", "v5litepod-64", "v5p-128", "v6e-64")
_GIN = pathlib.Path(__file__).parents[1] / "gin"
_MIB = 1 << 20
# Blocks of the paper's Wikipedia, dimension, queries and candidates of its updates.
_SEARCH = (13_353_718, 128, 512, 8)
_MEMORY = "memory of a device"
_HELD = (
    "parameters",
    "optimizer state",
    "wordpieces of the corpus",
    "embeddings",
    "embeddings, the next",
    "batch",
)


def plan(accelerator_type: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the output of `tpu_launch plan --json` for the paper's run on a slice."""
    files = ("runs/pretrain_paper", f"models/{arguments.model}", "hardware/tpu")
    bindings = (
        'MODEL_DIR="-"',
        'CORPUS=""',
        'TASK="-"',
        'WARM_START=""',
        f'hardware.HardwareConfig.trainer="{accelerator_type}"',
        f"partitioning.MeshConfig.fsdp={arguments.fsdp}",
        f'bert.BertConfig.remat="{arguments.remat}"',
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tpu_launch", "plan", "--json"),
            *(f"--gin_file={_GIN}/{name}.gin" for name in files),
            *(f"--gin.{binding}" for binding in bindings),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if not done.stdout:
        sys.exit(done.returncode)
    return json.loads(done.stdout)["plans"][0]


def row(accelerator_type: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of a slice, in MiB of its fullest device."""
    began = time.monotonic()
    planned = plan(accelerator_type, arguments)
    memory = planned["sections"][_MEMORY]
    held = sum(memory[name]["value"] for name in _HELD)
    return {
        "slice": accelerator_type,
        "model": arguments.model,
        "fsdp": arguments.fsdp,
        "how": memory["temporaries"]["note"],
        "held_mib": round(held / _MIB),
        "temporaries_mib": round(memory["temporaries"]["value"] / _MIB),
        "there_is_mib": round(memory["there is"]["value"] / _MIB),
        "fits": not planned["problems"],
        "seconds_to_plan": round(time.monotonic() - began),
    }


def searches(accelerator_type: str) -> Iterator[dict[str, Any]]:
    """Yields the memory of only the search on a slice, in every precision."""
    machines = parse(accelerator_type)
    mesh = memory.compiler_mesh(machines, MeshConfig())
    for precision, approximate in itertools.product(Precision, (False, True)):
        device = DeviceConfig(precision.value, approximate)
        function, (table, queries) = programs.search(*_SEARCH, device, mesh)
        needed = memory.compiled(function, (table, queries), mesh)
        yield {
            "slice": accelerator_type,
            "precision": precision.value,
            "approximate": approximate,
            "index_mib": round(memory.bytes_per_device(table) / _MIB),
            "temporaries_mib": round(needed.num_bytes / _MIB),
        }


def main() -> None:
    """Plans one slice after the other."""
    parser = make_parser(__doc__)
    parser.add_argument("--slices", default=",".join(_SLICES))
    parser.add_argument("--model", default="base")
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--remat", default="full")
    parser.add_argument("--search", action="store_true", help="the search alone")
    arguments = parser.parse_args()
    for accelerator_type in arguments.slices.split(","):
        if arguments.search:
            for found in searches(accelerator_type):
                print(json.dumps(found), flush=True)
            continue
        print(json.dumps(row(accelerator_type, arguments)), flush=True)


if __name__ == "__main__":
    main()
