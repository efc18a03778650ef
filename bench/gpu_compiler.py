"""Compiles for an H100 without one, and counts the bytes that its programs move.

`make gpu-compiler` fetches JAX's compiler for GPUs. Without a GPU it measures no kernel
against another, so it takes some that a GPU would not; and programs that it has not run
on one are not known to work there.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from unittest import mock

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.sharding import Mesh

from realm_jax.training.partitioning import MeshConfig, make_mesh

# Destination of `make gpu-compiler`.
FETCHED = pathlib.Path(__file__).parents[1] / ".cache/gpu_compiler"

# What the compiler has to know of an NVIDIA H100 SXM.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def enable() -> None:
    """Makes the compiler known to JAX, before JAX looks for devices."""
    sys.path.insert(0, str(FETCHED))
    # The libraries that it would look for are needed to run programs alone.
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    assembler = f"--xla_gpu_cuda_data_dir={FETCHED / 'nvidia/cu13'}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {assembler}"
    jax.config.update("jax_platforms", "cpu")


def h100(config: MeshConfig) -> Mesh:
    """Returns a mesh of one device, for which programs can be compiled."""
    description = topologies.get_topology_desc(
        "h100", platform="cuda", target_config=_H100, topology="1x1x1"
    )
    return make_mesh(config, description.devices)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Traces programs as on an H100, where they ask which device there is."""
    with (
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.multiple(
            fused_attention_stablehlo,
            check_cudnn_version=lambda: 91000,
            check_compute_capability=lambda capability: capability == "9.0",
            is_cuda_compute_capability_equal=lambda capability: capability == "9.0",
        ),
    ):
        yield


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w\-]+)\("
    r"(?P<operands>[^)]*)\)(?P<attributes>.*)$"
)
_ARRAY = re.compile(r"(pred|[a-z]+\d+)[a-z\d]*\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# They name what is there, or what others return.
_MOVES_NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
_READS_A_PART = ("dynamic-slice", "slice", "gather")


def bytes_moved(program: str) -> int:
    """Returns the bytes that the kernels of a compiled program read and write.

    Every kernel reads its operands once and writes its results once, of slices and
    gathers what they take, and of an update in place the update. The body of a loop
    counts as often as it runs.
    """
    computations: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    entry = ""
    for line in program.splitlines():
        if begins := _COMPUTATION.match(line):
            current = computations.setdefault(begins["name"], [])
            entry = begins["name"] if begins["entry"] else entry
        elif found := _INSTRUCTION.match(line):
            operands = tuple(re.findall(r"%([\w.\-]+)", found["operands"]))
            current.append(
                _Instruction(
                    found["name"],
                    found["shape"],
                    found["opcode"],
                    operands,
                    found["attributes"],
                )
            )
    return _moved(computations, entry)


def _moved(computations: dict[str, list[_Instruction]], name: str) -> int:
    by_name = {each.name: each for each in computations[name]}
    total = 0
    for each in computations[name]:
        if each.opcode in _MOVES_NOTHING:
            continue
        if each.opcode == "while":
            trips = _TRIPS.search(each.attributes)
            body = _moved(computations, _called(each, "body"))
            total += body * (int(trips[1]) if trips else 1)
        elif each.opcode == "call":
            total += _moved(computations, _called(each, "to_apply"))
        elif each.opcode == "conditional":
            branches = re.findall(r"%([\w.\-]+)", each.attributes.split("}")[0])
            known = [branch for branch in branches if branch in computations]
            total += max((_moved(computations, one) for one in known), default=0)
        elif each.opcode == "fusion":
            total += sum(_of_fusion(computations[_called(each, "calls")]))
        else:
            read = [by_name[operand].shape for operand in each.operands]
            total += _size(each.shape) + sum(map(_size, read))
    return total


def _of_fusion(body: list[_Instruction]) -> Iterator[int]:
    """Yields the bytes of a fusion's inputs and outputs."""
    by_name = {each.name: each for each in body}
    for each in body:
        if each.opcode == "parameter":
            yield _read(each, body)
    root = body[-1]
    results = [by_name[name] for name in root.operands]
    for result in results if root.opcode == "tuple" else [root]:
        while result.opcode in ("bitcast", "copy"):
            result = by_name[result.operands[0]]
        in_place = result.opcode == "dynamic-update-slice"
        yield _size(by_name[result.operands[1]].shape if in_place else result.shape)


def _read(value: _Instruction, body: list[_Instruction]) -> int:
    """Returns how much of a value its users read, at most all of it."""
    found = 0
    for user in body:
        if value.name not in user.operands:
            continue
        if user.opcode in _READS_A_PART and user.operands[0] == value.name:
            found += _size(user.shape)
        elif user.opcode == "bitcast":
            found += _read(user, body)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != value.name:
            return _size(value.shape)
    return min(found, _size(value.shape))


def _called(instruction: _Instruction, attribute: str) -> str:
    found = re.search(rf"\b{attribute}=%([\w.\-]+)", instruction.attributes)
    assert found, instruction
    return found[1]


def _size(shape: str) -> int:
    """Returns the bytes of an array or of a tuple of them."""
    total = 0
    for kind, sizes in _ARRAY.findall(shape):
        bits = int(re.sub(r"\D", "", kind) or 8)
        count = 1
        for size in filter(None, sizes.split(",")):
            count *= int(size)
        total += count * bits // 8
    return total
