"""Configures the machines of a run: their types, their prices, and how to obtain them.

Planner and launcher use it (`tpu_launch`). It is in this package because every command
of a run reads the hardware files, and a trainer should not need the launcher for that.
"""

import dataclasses
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
      deadline_hours: time after which the run is ended and its machines are deleted.
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
