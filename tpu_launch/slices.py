"""Parses accelerator types into the machines that they name.

Cloud TPU names slices by TensorCores ("v4-64": 64 cores, 32 chips) up to v4, for v5p
and TPU7x, and by chips ("v5litepod-64", "v6e-64") otherwise. GPUs are named by kind and
number ("h100-8"), "cpu" is a machine without an accelerator, and "local-2x4" stands for
two processes of this machine with four simulated devices each.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from typing import Any

from realm_jax.chips import CHIPS, Chip
from realm_jax.errors import BadInputError
from realm_jax.hardware import CPU, HardwareConfig

_GIB = 1 << 30
LOCAL = "local"
_GPUS = ("a100", "h100", "h200")
# Minimum for rented machines with these GPUs; no data sheet states it.
_HOST_MEMORY_OF_A_GPU = 150 * _GIB


@dataclasses.dataclass(frozen=True)
class _Generation:
    """Layout of a generation of TPUs in Cloud TPU.

    Attributes:
      chip: name of the chip in `CHIPS`.
      cores: TensorCores of a chip if names count those, else 1.
      dimensions: dimensions of the torus.
      compiler: the compiler's name for the generation.
      runtime: software version of its VMs; "" if only GKE has it.
      host_memory: memory of a host of four chips, in bytes.
      largest: number of chips in a whole pod.
      options: options of the compiler, so that its devices are those of the VMs.
      single_host: numbers of chips that a single host may have.
      absent: numbers of chips, below the largest, that are not offered.
      other_memory: memory of a single host by its chips, if they are not four.
      gke: accelerator and machine type of GKE, without the number of chips; None if
        it has none.
      gke_single_host: the same of a single host, where it differs.
    """

    chip: str
    cores: int
    dimensions: int
    compiler: str
    runtime: str
    host_memory: int
    largest: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    single_host: tuple[int, ...] = (4,)
    absent: tuple[int, ...] = ()
    other_memory: Mapping[int, int] = dataclasses.field(default_factory=dict)
    gke: tuple[str, str] | None = None
    gke_single_host: tuple[str, str] | None = None


# cloud.google.com/tpu/docs: the page of each version. In larger slices a host has 4
# chips. cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus: machine types.
_GENERATIONS = {
    "v2": _Generation(
        *("v2", 2, 2, "v2", "tpu-ubuntu2204-base", 334 * _GIB, 256),
        absent=(8, 32),
    ),
    "v3": _Generation(
        *("v3", 2, 2, "v3", "tpu-ubuntu2204-base", 334 * _GIB, 1024),
        absent=(8,),
        gke=("tpu-v3-slice", "ct3p-hightpu"),
        gke_single_host=("tpu-v3-device", "ct3-hightpu"),
    ),
    "v4": _Generation(
        *("v4", 2, 3, "v4", "tpu-ubuntu2204-base", 407 * _GIB, 4096),
        # The two cores of a chip are one device, as on the VMs.
        {"chip_config_name": "megacore"},
        gke=("tpu-v4-podslice", "ct4p-hightpu"),
    ),
    "v5p": _Generation(
        *("v5p", 2, 3, "v5p", "v2-alpha-tpuv5", 448 * _GIB, 6144),
        gke=("tpu-v5p-slice", "ct5p-hightpu"),
    ),
    "v5litepod": _Generation(
        *("v5litepod", 1, 2, "v5e", "v2-alpha-tpuv5-lite", 192 * _GIB, 256),
        single_host=(1, 4, 8),
        other_memory={1: 48 * _GIB, 8: 384 * _GIB},
        gke=("tpu-v5-lite-podslice", "ct5lp-hightpu"),
    ),
    "v6e": _Generation(
        *("v6e", 1, 2, "v6e", "v2-alpha-tpuv6e", 720 * _GIB, 256),
        single_host=(1, 4, 8),
        other_memory={1: 176 * _GIB, 8: 1440 * _GIB},
        gke=("tpu-v6e-slice", "ct6e-standard"),
    ),
    "tpu7x": _Generation(
        *("tpu7x", 2, 3, "tpu7x", "", 960 * _GIB, 9216),
        gke=("tpu7x", "tpu7x-standard"),
    ),
}
_CHIPS_PER_HOST = 4


@dataclasses.dataclass(frozen=True)
class GkeNode:
    """A host of a slice as Google Kubernetes Engine knows it.

    Attributes:
      accelerator: the label cloud.google.com/gke-tpu-accelerator of its nodes.
      machine_type: their machine type.
    """

    accelerator: str
    machine_type: str


@dataclasses.dataclass(frozen=True)
class Slice:
    """Machines that train or embed together.

    Attributes:
      accelerator_type: name of the accelerator type.
      chip: figures of its devices; None for a CPU.
      num_chips: number of accelerators.
      num_hosts: number of processes of the job.
      topology: chips along each dimension of a TPU's torus, "" for others.
      host_memory: memory of each host, in bytes.
      runtime: software version of the VMs of a TPU, "" if Cloud TPU does not serve it.
      compiler_topology: the compiler's name for it, with its options.
      gke: its hosts on GKE; None if that has none.
    """

    accelerator_type: str
    chip: Chip | None
    num_chips: int
    num_hosts: int
    topology: str
    host_memory: int
    runtime: str = ""
    compiler_topology: tuple[str, Mapping[str, Any]] | None = None
    gke: GkeNode | None = None

    @property
    def chips_per_host(self) -> int:
        """Number of accelerators of each host."""
        return self.num_chips // self.num_hosts

    @property
    def num_devices(self) -> int:
        """Number of devices, as JAX counts them."""
        return self.num_chips * (self.chip.devices if self.chip else 1)

    def hourly_price(self, hardware: HardwareConfig) -> float | None:
        """Returns the price per hour; None if it is not known."""
        kind = self.accelerator_type.partition("-")[0]
        price = hardware.chip_hour_prices.get(kind)
        return None if price is None else price * self.num_chips

    def flops_per_second(self, hardware: HardwareConfig) -> float:
        """Returns the expected rate of matrix products, in FLOP/s."""
        peak = self.chip.peak_flops if self.chip else hardware.peak_tflops * 1e12
        return self.num_devices * peak * hardware.utilization

    def one_host(self) -> "Slice":
        """Returns the part of the slice that belongs to one host."""
        if self.num_hosts == 1:
            return self
        generation, _, _ = self.accelerator_type.partition("-")
        if generation == LOCAL:
            return parse(f"{LOCAL}-1x{self.chips_per_host}")
        return parse(f"{generation}-{_CHIPS_PER_HOST * _GENERATIONS[generation].cores}")


def parse(accelerator_type: str) -> Slice:
    """Returns the machines of an accelerator type.

    Raises:
      BadInputError: there is no accelerator type of that name.
    """
    kind, _, number = accelerator_type.partition("-")
    if accelerator_type == CPU:
        return Slice(CPU, None, 1, 1, "", _memory_here())
    if kind == LOCAL and (match := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", number)):
        hosts, devices = map(int, match.groups())
        return Slice(accelerator_type, None, hosts * devices, hosts, "", _memory_here())
    if kind in _GPUS and (number.isdecimal() or not number):
        count = int(number or 1)
        host_memory = count * _HOST_MEMORY_OF_A_GPU
        return Slice(accelerator_type, CHIPS[kind], count, 1, "", host_memory)
    if kind not in _GENERATIONS or not number.isdecimal():
        raise BadInputError(
            "expected an accelerator type such as v4-64, v5litepod-16, h100-8 or cpu, "
            f"got {accelerator_type!r}; known: {', '.join([*_GENERATIONS, *_GPUS])}"
        )
    generation = _GENERATIONS[kind]
    num_chips, rest = divmod(int(number), generation.cores)
    smallest, largest = min(generation.single_host), generation.largest
    topologies = {
        chips: topology
        for chips, topology in _TOPOLOGIES[generation.dimensions].items()
        if smallest <= chips <= largest and chips not in generation.absent
    }
    topology = topologies.get(num_chips)
    if rest or topology is None:
        names = [f"{kind}-{chips * generation.cores}" for chips in topologies]
        raise BadInputError(
            f"expected one of {', '.join(names)}, got {accelerator_type!r}; choose a "
            "size that exists"
        )
    is_single = num_chips in generation.single_host
    options = dict(generation.options)
    if is_single and num_chips != _CHIPS_PER_HOST:
        bounds = [int(side) for side in topology.split("x")]
        options["chips_per_host_bounds"] = (*bounds, 1)[:3]
    num_hosts = 1 if is_single else num_chips // _CHIPS_PER_HOST
    return Slice(
        accelerator_type,
        CHIPS[generation.chip],
        num_chips,
        num_hosts,
        topology,
        generation.other_memory.get(num_chips, generation.host_memory),
        generation.runtime,
        (f"{generation.compiler}:{topology}", options),
        _gke_node(generation, is_single, num_chips // num_hosts),
    )


def _gke_node(
    generation: _Generation, is_single: bool, chips_per_host: int
) -> GkeNode | None:
    names = generation.gke_single_host if is_single else None
    if (names := names or generation.gke) is None:
        return None
    accelerator, machine = names
    return GkeNode(accelerator, f"{machine}-{chips_per_host}t")


def _topologies(first: tuple[int, ...], largest: int) -> dict[int, str]:
    """Returns topologies by chips, doubling the shortest side, the last one first."""
    sides, known = list(first), {}
    while (chips := math.prod(sides)) <= largest:
        known[chips] = "x".join(map(str, sides))
        shortest = min(range(len(sides)), key=lambda i: (sides[i], -i))
        sides[shortest] *= 2
    return known


_TOPOLOGIES = {
    2: {1: "1x1"} | _topologies((2, 2), 1024),
    # The whole pod of v5p is no doubling.
    3: _topologies((2, 2, 1), 4096) | {6144: "16x16x24"},
}


def _memory_here() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
