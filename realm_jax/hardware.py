"""What the hardware files of a run say: its machines, their prices, how they are had.

Planner and launcher go by it (`tpu_launch`). It is here because every command of a run
reads these files, and a trainer that reads them needs nothing of a launcher.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from realm_jax.errors import BadInputError

CPU = "cpu"
"""The accelerator type of a machine that has none."""
ON_DEMAND, SPOT, RESERVED = "on-demand", "spot", "reserved"

# With role, attempt and the number of a slice behind it, a name of Cloud TPU (63).
_LONGEST_NAME = 30
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")


@dataclasses.dataclass(frozen=True)
class HardwareConfig:
    """Where a run is, and what that costs.

    Attributes:
      trainer: accelerator type of the training stages.
      trainer_slices: how many such slices train together.
      builder: accelerator type of the index builder; "" where the trainer's machine
        has it beside.
      chip_hour_prices: by the name before the dash ("v4"), what one chip costs an hour.
      currency: of the prices.
      peak_tflops: of a device, where this is not known by its name.
      utilization: share of the peak that programs are expected to reach.
    """

    trainer: str = CPU
    trainer_slices: int = 1
    builder: str = ""
    chip_hour_prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    currency: str = "USD"
    peak_tflops: float = 0.1
    utilization: float = 0.45


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Where and how the slices of a run are had, and when that ends.

    Attributes:
      project: of Google Cloud.
      zone: of the trainer's slices, and of the builder's unless `builder_zone` is set.
      builder_zone: of the builder's slice.
      name: of the run, for people; its id has a hash of the model directory behind it.
      provisioning: "on-demand", "spot" or "reserved".
      builder_provisioning: of the builder's slice; "" is that of the trainer.
      network: VPC network; "" is the project's default.
      subnetwork: of the network; "" is the zone's.
      service_account: whom the workers act for; "" is the project's default.
      external_ips: whether workers have addresses of their own. Without, the network
        needs Cloud NAT, for they install packages.
      deadline_hours: after so long one `up` deletes everything, and the workers end.
      max_attempts: slices of a role that one `up` creates one after the other.
      backoff_seconds: before the second attempt; doubled while there is no progress.
      max_backoff_seconds: the longest of these.
      quota_seconds: between two tries while the quota is used up.
      startup_minutes: how long an active worker may take to say its first word.
      silence_minutes: a worker that then says nothing for so long is lost.
      provisioning_minutes: a slice that is being provisioned for so long is given up.
      settling_seconds: what was asked for may not be listed yet for so long, and may
        come although the answer was lost.
      poll_seconds: between two looks.
      fetch: gs:// folder -> folder of each worker that it is copied to beforehand, such
        as the corpus.
      builder_gin_files: of the builder, after those of the run.
      builder_bindings: of the builder, after those of the run.
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

    def require_valid(self) -> None:
        """Checks what a launch needs and planning does not.

        Raises:
          BadInputError: something is missing or unknown.
        """
        for field, macro in (("project", "PROJECT"), ("zone", "ZONE")):
            if not getattr(self, field):
                raise BadInputError(
                    f"expected a {field} of Google Cloud, got none; add "
                    f"--gin.{macro}='\"...\"' (hardware.LaunchConfig.{field})"
                )
        known = (ON_DEMAND, SPOT, RESERVED)
        for value in (self.provisioning, self.builder_provisioning or ON_DEMAND):
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
        for field in ("deadline_hours", "max_attempts", "poll_seconds"):
            if getattr(self, field) <= 0:
                raise BadInputError(
                    f"expected hardware.LaunchConfig.{field} above 0, got "
                    f"{getattr(self, field)}; raise it"
                )
