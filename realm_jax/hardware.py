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

# With role, attempt and slice number appended, it is a name of Cloud TPU (63 at most).
_LONGEST_NAME = 30
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
    host_disk_gib: float = 0.0

    def __post_init__(self):
        ranges.require_ranges(
            self,
            trainer=ranges.TEXT,
            trainer_slices=ranges.whole(1),
            chip_hour_prices=_PRICES,
            peak_tflops=ranges.POSITIVE,
            utilization=ranges.SHARE_ABOVE_0,
            host_disk_gib=ranges.NOT_NEGATIVE,
        )


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Settings for obtaining the slices of a run, and for deleting them.

    Attributes:
      project: project of Google Cloud.
      zone: zone of the trainer's slices, and of the builder's unless `builder_zone` is
        set.
      builder_zone: zone of the builder's slice.
      name: readable name of the run; its id appends a hash of the model directory.
      provisioning: "on-demand", "spot" or "reserved".
      builder_provisioning: provisioning of the builder's slice; "" for the trainer's.
      network: VPC network; "" for the project's default.
      subnetwork: subnetwork of the network; "" for the zone's.
      service_account: account that the workers use; "" for the project's default.
      external_ips: whether workers have external addresses. Without them, the network
        needs Cloud NAT, because workers install packages.
      deadline_hours: time after which one `up` deletes everything, and the workers end.
      max_attempts: number of slices of a role that one `up` creates in succession.
      backoff_seconds: delay before the second attempt; doubled while there is no
        progress.
      max_backoff_seconds: maximum delay between attempts.
      quota_seconds: delay between two requests while the quota is exhausted.
      startup_minutes: time an active worker may take until its first report.
      silence_minutes: time without a report after which a worker counts as lost.
      provisioning_minutes: time after which a slice in provisioning is given up.
      settling_seconds: time during which a requested slice may not be listed yet, or
        may be created although the response was lost.
      poll_seconds: interval between two polls.
      fetch: gs:// folder -> folder of each worker to which it is copied beforehand,
        such as the corpus.
      builder_gin_files: gin files of the builder, after those of the run.
      builder_bindings: gin bindings of the builder, after those of the run.
      stalled_minutes: time without an update of the trainer, or a block of the builder,
        after which active slices count as failed; a second time at the same place ends
        the run. Compilation, and the training of ScaNN, take less.
    """

    project: str = ""
    zone: str = ""
    builder_zone: str = ""
    name: str = "realm"
    provisioning: str = ON_DEMAND
    builder_provisioning: str = ""
    network: str = ""
    subnetwork: str = ""
    service_account: str = ""
    external_ips: bool = True
    deadline_hours: float = 24.0
    max_attempts: int = 50
    backoff_seconds: float = 30.0
    max_backoff_seconds: float = 900.0
    quota_seconds: float = 600.0
    startup_minutes: float = 30.0
    silence_minutes: float = 10.0
    provisioning_minutes: float = 60.0
    settling_seconds: float = 120.0
    poll_seconds: float = 30.0
    fetch: Mapping[str, str] = dataclasses.field(default_factory=dict)
    builder_gin_files: Sequence[str] = ("gin/runs/build_index.gin",)
    builder_bindings: Sequence[str] = ()
    stalled_minutes: float = 120.0

    def __post_init__(self):
        ranges.require_ranges(
            self,
            deadline_hours=ranges.POSITIVE,
            max_attempts=ranges.whole(1),
            backoff_seconds=ranges.NOT_NEGATIVE,
            max_backoff_seconds=ranges.NOT_NEGATIVE,
            quota_seconds=ranges.NOT_NEGATIVE,
            startup_minutes=ranges.POSITIVE,
            silence_minutes=ranges.POSITIVE,
            provisioning_minutes=ranges.POSITIVE,
            settling_seconds=ranges.NOT_NEGATIVE,
            poll_seconds=ranges.POSITIVE,
            stalled_minutes=ranges.POSITIVE,
        )
        known = (ON_DEMAND, SPOT, RESERVED)
        builder = self.builder_provisioning
        for value in (self.provisioning, ON_DEMAND if builder == "" else builder):
            if value not in known:
                raise BadInputError(
                    f"expected provisioning of {', '.join(known)}, got {value!r}; "
                    "choose one of these"
                )

    def require_valid(self) -> None:
        """Checks settings that a launch needs and planning does not.

        Raises:
          BadInputError: a setting is missing or invalid.
        """
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
        if len(self.name) > _LONGEST_NAME or not _NAME.fullmatch(self.name):
            raise BadInputError(
                "expected hardware.LaunchConfig.name of lowercase letters, digits and "
                f"hyphens, a letter first, at most {_LONGEST_NAME}, got {self.name!r}; "
                "choose another name"
            )
