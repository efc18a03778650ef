"""Describes the machines of a run: their devices, prices, and how to obtain them.

Planner and launcher use it (`tpu_launch`). It is in this package because every command
of a run reads the hardware files, and a trainer should not need the launcher for that.

`CHIPS` has published figures of devices, per device as JAX counts devices: a core up to
TPU v3, a chip from v4 on, and half a chip of TPU7x. Sources:
cloud.google.com/tpu/docs/system-architecture-tpu-vm and the pages of each version
there; NVIDIA's data sheets (dense bfloat16, SXM). They give figures of a chip, and none
was found for the bandwidth of v2.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Mapping, Sequence

from realm_jax import ranges
from realm_jax.errors import BadInputError

CPU = "cpu"
"""The accelerator type of a machine without accelerators."""
ON_DEMAND, SPOT, RESERVED = "on-demand", "spot", "reserved"

# Names of the slices and pods append a hash, the role, and numbers; of these there may
# be 63 letters.
_LONGEST_NAME = 28
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
# "us-central2-b", "us-south1-ai1b".
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-(ai[0-9]+)?[a-z]")

_PRICES = ranges.Range(
    "a dictionary of finite prices of at least 0",
    lambda prices: (
        isinstance(prices, Mapping)
        and all(map(ranges.NOT_NEGATIVE.contains, prices.values()))
    ),
)

LIBTPU_FLAGS = "--fibers_default_thread_stack_size=8388608"
"""For LIBTPU_INIT_ARGS: compiling BERT-base's update for v6e overflows the stacks that
the compiler (0.0.42.1) gives its threads by default, and ends the process."""

_GIB = 1 << 30
_TERA = 10**12
_GIGA = 10**9


@dataclasses.dataclass(frozen=True)
class HardwareConfig:
    """The hardware of a run, and its prices.

    Attributes:
      trainer: accelerator type of the training stages.
      trainer_slices: number of such slices that train together.
      builder: accelerator type of the index builder; "" if it runs on the trainer's
        machine.
      chip_hour_prices: price of one chip per hour, by the name before the dash ("v4").
      currency: currency of the prices.
      peak_tflops: peak of a device whose name is not known, in TFLOP/s.
      utilization: share of the peak that programs are expected to reach.
      step_latency_ms: shortest time of an update, in milliseconds, for what the host
        does between two and for small collectives. An assumption; none was measured on
        an accelerator.
      host_disk_gib: room on the disk of each host for corpus and examples, in GiB; 0 if
        it is not known.
    """

    trainer: str = CPU
    trainer_slices: int = 1
    builder: str = ""
    chip_hour_prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    currency: str = "USD"
    peak_tflops: float = 0.1
    utilization: float = 0.45
    step_latency_ms: float = 10.0
    host_disk_gib: float = 0.0

    def __post_init__(self):
        ranges.require_ranges(
            self,
            trainer=ranges.TEXT,
            trainer_slices=ranges.whole(1),
            chip_hour_prices=_PRICES,
            peak_tflops=ranges.POSITIVE,
            utilization=ranges.SHARE_ABOVE_0,
            step_latency_ms=ranges.NOT_NEGATIVE,
            host_disk_gib=ranges.NOT_NEGATIVE,
        )


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Where a run gets its machines, and when it gives them back.

    Attributes:
      name: readable name of the run; its id appends a hash of the model directory.
      deadline_hours: time after which the run is ended and its machines are deleted; on
        GKE without a `queue` it begins anew with each restart.
      fetch: gs:// folder -> folder of each worker to which it is copied beforehand,
        such as the corpus.
      provisioning: "on-demand", "spot" or "reserved".
      builder_provisioning: provisioning of the index builder; "" for the trainer's.
      reservation: name of the reservation, where provisioning is "reserved"; "" for
        any that fits, which only Cloud TPU can find.
      service_account: who the workers are: an account of Google Cloud on TPU VMs, a
        Kubernetes service account on GKE; "" for the default.
      max_restarts: restarts of a worker's process (TPU VM), or of the job set (GKE),
        after which the run has failed. Preemptions do not count.
      grace_seconds: time that a trainer gets to save when its machine is taken away. A
        spot machine is gone after 30.
      builder_gin_files: gin files of the builder, after those of the run.
      builder_bindings: gin bindings of the builder, after those of the run.
      project: project of Google Cloud; TPU VM alone.
      zone: zone of the trainer's slices, and of the builder's unless `builder_zone` is
        set; TPU VM alone.
      builder_zone: zone of the builder's slice.
      network: VPC network; "" for the project's default. TPU VM alone.
      subnetwork: subnetwork of the network; "" for the zone's. TPU VM alone.
      external_ips: whether workers have external addresses. Without them, the network
        needs Cloud NAT, because workers install packages. TPU VM alone.
      namespace: Kubernetes namespace of the job set.
      queue: Kueue's LocalQueue, by which trainer and builder are admitted together; ""
        where the cluster has no Kueue.
      priority: PriorityClass of the pods, or "".
      image: container image. Its pods always run the code of the run; one that has this
        package saves them installing its libraries first.
      ttl_hours: time for which a job set that has ended is kept, to be looked at.
    """

    name: str = "realm"
    deadline_hours: float = 24.0
    fetch: Mapping[str, str] = dataclasses.field(default_factory=dict)
    provisioning: str = ON_DEMAND
    builder_provisioning: str = ""
    reservation: str = ""
    service_account: str = ""
    max_restarts: int = 10
    grace_seconds: int = 60
    builder_gin_files: Sequence[str] = ("gin/runs/build_index.gin",)
    builder_bindings: Sequence[str] = ()
    project: str = ""
    zone: str = ""
    builder_zone: str = ""
    network: str = ""
    subnetwork: str = ""
    external_ips: bool = True
    namespace: str = "default"
    queue: str = ""
    priority: str = ""
    image: str = "python:3.11"
    ttl_hours: float = 24.0

    def __post_init__(self):
        ranges.require_ranges(
            self,
            deadline_hours=ranges.POSITIVE,
            max_restarts=ranges.whole(0),
            builder_gin_files=ranges.TEXTS,
            builder_bindings=ranges.TEXTS,
            grace_seconds=ranges.whole(1),
            namespace=ranges.TEXT,
            image=ranges.TEXT,
            ttl_hours=ranges.NOT_NEGATIVE,
        )
        known = (ON_DEMAND, SPOT, RESERVED)
        builder = self.builder_provisioning
        for value in (self.provisioning, ON_DEMAND if builder == "" else builder):
            if value not in known:
                raise BadInputError(
                    f"expected provisioning of {', '.join(known)}, got {value!r}; "
                    "choose one of these"
                )
        if len(self.name) > _LONGEST_NAME or not _NAME.fullmatch(self.name):
            raise BadInputError(
                "expected hardware.LaunchConfig.name of lowercase letters, digits and "
                f"hyphens, a letter first, at most {_LONGEST_NAME}, got {self.name!r}; "
                "choose another name"
            )

    def require_zone(self) -> None:
        """Checks the settings of TPU VMs that other launches do not need."""
        for field, macro in (("project", "PROJECT"), ("zone", "ZONE")):
            if not getattr(self, field):
                raise BadInputError(
                    f"expected a {field} of Google Cloud, got none; add "
                    f"--gin.{macro}='\"...\"' (hardware.LaunchConfig.{field})"
                )
        for zone in (self.zone, self.builder_zone or self.zone):
            if not _ZONE.fullmatch(zone):
                raise BadInputError(
                    "expected a zone of Google Cloud such as us-central2-b, got "
                    f"{zone!r}; see `gcloud compute tpus locations list`"
                )


@dataclasses.dataclass(frozen=True)
class Chip:
    """A type of device.

    Attributes:
      kind: value of `jax.Device.device_kind`, or its beginning.
      peak_flops: bfloat16 operations per second.
      bandwidth: bytes per second between memory and device; None if not published.
      devices: number of JAX devices on one chip; prices are per chip.
    """

    name: str
    kind: str
    peak_flops: float
    memory: int
    bandwidth: float | None
    devices: int = 1


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", "TPU v2", 22.5 * _TERA, 8 * _GIB, None, 2),
        Chip("v3", "TPU v3", 61.5 * _TERA, 16 * _GIB, 450 * _GIGA, 2),
        Chip("v4", "TPU v4", 275 * _TERA, 32 * _GIB, 1200 * _GIGA),
        Chip("v5litepod", "TPU v5 lite", 197 * _TERA, 16 * _GIB, 819 * _GIGA),
        Chip("v5p", "TPU v5", 459 * _TERA, 95 * _GIB, 2765 * _GIGA),
        Chip("v6e", "TPU v6 lite", 918 * _TERA, 32 * _GIB, 1638 * _GIGA),
        Chip("tpu7x", "TPU7x", 1153.5 * _TERA, 96 * _GIB, 3690 * _GIGA, 2),
        Chip("a100", "NVIDIA A100", 312 * _TERA, 80 * _GIB, 2039 * _GIGA),
        Chip("h100", "NVIDIA H100", 989 * _TERA, 80 * _GIB, 3350 * _GIGA),
        Chip("h200", "NVIDIA H200", 989 * _TERA, 141 * _GIB, 4800 * _GIGA),
    )
}


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip of this device kind, None if its figures are not known."""
    # "TPU v5 lite" also starts with "TPU v5", so the longest match is chosen.
    known = [chip for chip in CHIPS.values() if device_kind.startswith(chip.kind)]
    return max(known, key=lambda chip: len(chip.kind), default=None)


@functools.cache
def multiplies_bfloat16(cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Returns whether this machine multiplies bfloat16 faster than float32.

    This concerns products that are accumulated in float32, compiled by XLA for CPUs.
    With AVX512-BF16 an EPYC does, and a Xeon does not (docs/benchmarks.md): its unit
    for bfloat16 is AMX, which a virtual machine may hide. On other machines XLA
    converts the operands, which is slower than float32.
    """
    try:
        processors = pathlib.Path(cpuinfo).read_text()
    except OSError:
        return False
    if "amx_bf16" in processors:
        return True
    return "avx512_bf16" in processors and "AuthenticAMD" in processors
