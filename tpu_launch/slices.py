"""Parses accelerator types into the machines that they name.

Cloud TPU names slices by TensorCores ("v4-64": 64 cores, 32 chips) up to v4, for v5p
and TPU7x, and by chips ("v5litepod-64", "v6e-64") otherwise. GPUs are named by kind and
number ("h100-8"), and "cpu" is this machine without an accelerator.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import psutil

from realm_jax.errors import BadInputError
from realm_jax.hardware import CHIPS, CPU, Chip, HardwareConfig

_GPUS = ("a100", "h100", "h200")
_GIB = 1 << 30
# Minimum for rented machines with these GPUs; no data sheet states it.
_HOST_GIB_OF_A_GPU = 150
_CHIPS_PER_HOST = 4


@dataclasses.dataclass(frozen=True)
class _Generation:
    """Layout of a generation of TPUs in Cloud TPU.

    Attributes:
      cores: TensorCores of a chip if names count those, else 1.
      dimensions: dimensions of the torus.
      largest: number of chips in a whole pod.
      host_gib: chips of a single host -> its memory. In larger slices a host has four.
      runtime: software version of its VMs; "" if only GKE has it.
      compiler: the compiler's name for the generation, where it differs.
      gke: label of its nodes on GKE; "" if that has none.
      gke_single_host: the same of a single host, where it differs.
      absent: numbers of chips, below the largest, that are not offered.
      options: options of the compiler, so that its devices are those of the VMs.
    """

    cores: int
    dimensions: int
    largest: int
    host_gib: Mapping[int, int]
    runtime: str = ""
    compiler: str = ""
    gke: str = ""
    gke_single_host: str = ""
    absent: tuple[int, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# cloud.google.com/tpu/docs: the page of each version.
# cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus: labels of nodes.
_GENERATIONS = {
    "v2": _Generation(
        cores=2,
        dimensions=2,
        runtime="tpu-ubuntu2204-base",
        largest=256,
        host_gib={4: 334},
        absent=(8, 32),
    ),
    "v3": _Generation(
        cores=2,
        dimensions=2,
        runtime="tpu-ubuntu2204-base",
        largest=1024,
        host_gib={4: 334},
        gke="tpu-v3-slice",
        gke_single_host="tpu-v3-device",
        absent=(8,),
    ),
    "v4": _Generation(
        cores=2,
        dimensions=3,
        runtime="tpu-ubuntu2204-base",
        largest=4096,
        host_gib={4: 407},
        gke="tpu-v4-podslice",
        # The two cores of a chip are one device, as on the VMs.
        options={"chip_config_name": "megacore"},
    ),
    "v5p": _Generation(
        cores=2,
        dimensions=3,
        runtime="v2-alpha-tpuv5",
        largest=6144,
        host_gib={4: 448},
        gke="tpu-v5p-slice",
    ),
    "v5litepod": _Generation(
        cores=1,
        dimensions=2,
        compiler="v5e",
        runtime="v2-alpha-tpuv5-lite",
        largest=256,
        host_gib={1: 48, 4: 192, 8: 384},
        gke="tpu-v5-lite-podslice",
    ),
    "v6e": _Generation(
        cores=1,
        dimensions=2,
        runtime="v2-alpha-tpuv6e",
        largest=256,
        host_gib={1: 176, 4: 720, 8: 1440},
        gke="tpu-v6e-slice",
    ),
    "tpu7x": _Generation(
        cores=2,
        dimensions=3,
        largest=9216,
        host_gib={4: 960},
        gke="tpu7x",
    ),
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Machines that train or embed together.

    Attributes:
      chip: figures of its devices; None for a CPU.
      num_hosts: number of processes of the job.
      host_memory: memory of each host, in bytes.
      topology: chips along each dimension of a TPU's torus, "" for others.
      runtime: software version of the VMs of a TPU, "" if Cloud TPU does not serve it.
      compiler_topology: the compiler's name for it, with its options.
      gke: label of its nodes on GKE; "" if that has none.
    """

    accelerator_type: str
    chip: Chip | None
    num_chips: int
    num_hosts: int
    host_memory: int
    topology: str = ""
    runtime: str = ""
    compiler_topology: tuple[str, Mapping[str, Any]] | None = None
    gke: str = ""

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
        kind = self.accelerator_type.partition("-")[0]
        return parse(f"{kind}-{_CHIPS_PER_HOST * _GENERATIONS[kind].cores}")


def parse(accelerator_type: str) -> Slice:
    """Returns the machines of an accelerator type."""
    kind, _, number = accelerator_type.partition("-")
    if accelerator_type == CPU:
        return Slice(CPU, None, 1, 1, psutil.virtual_memory().total)
    if kind in _GPUS and (number.isdecimal() or not number):
        count = int(number or 1)
        memory = count * _HOST_GIB_OF_A_GPU * _GIB
        return Slice(accelerator_type, CHIPS[kind], count, 1, memory)
    if kind in _GENERATIONS and number.isdecimal():
        return _tpu(accelerator_type, kind, int(number))
    raise BadInputError(
        "expected an accelerator type such as v4-64, v5litepod-16, h100-8 or cpu, got "
        f"{accelerator_type!r}; known: {', '.join([*_GENERATIONS, *_GPUS])}"
    )


def _tpu(accelerator_type: str, kind: str, number: int) -> Slice:
    generation = _GENERATIONS[kind]
    num_chips, rest = divmod(number, generation.cores)
    topologies = {
        chips: topology
        for chips, topology in _TOPOLOGIES[generation.dimensions].items()
        if min(generation.host_gib) <= chips <= generation.largest
        and chips not in generation.absent
    }
    if rest or num_chips not in topologies:
        names = [f"{kind}-{chips * generation.cores}" for chips in topologies]
        raise BadInputError(
            f"expected one of {', '.join(names)}, got {accelerator_type!r}; choose a "
            "size that exists"
        )
    topology = topologies[num_chips]
    is_single = num_chips in generation.host_gib
    chips_per_host = num_chips if is_single else _CHIPS_PER_HOST
    options = dict(generation.options)
    if chips_per_host != _CHIPS_PER_HOST:
        bounds = [int(side) for side in topology.split("x")]
        options["chips_per_host_bounds"] = (*bounds, 1)[:3]
    return Slice(
        accelerator_type=accelerator_type,
        chip=CHIPS[kind],
        num_chips=num_chips,
        num_hosts=num_chips // chips_per_host,
        host_memory=generation.host_gib[chips_per_host] * _GIB,
        topology=topology,
        runtime=generation.runtime,
        compiler_topology=(f"{generation.compiler or kind}:{topology}", options),
        gke=(is_single and generation.gke_single_host) or generation.gke,
    )


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
