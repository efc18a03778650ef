"""What is launched: a run, its roles, and the names that follow from them."""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence

from realm_jax.errors import BadInputError
from tpu_launch import slices
from tpu_launch.slices import HardwareConfig, Slice
from tpu_launch.startup import TPU_VM, Site

TRAINER = "trainer"
BUILDER = "builder"
ON_DEMAND, SPOT, RESERVED = "on-demand", "spot", "reserved"

# With role, attempt and the number of a slice behind it, a name of Cloud TPU (63).
_LONGEST_NAME = 30
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_HASH_DIGITS = 6


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
                    f"--gin.{macro}='\"...\"' (job.LaunchConfig.{field})"
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
                "expected job.LaunchConfig.name of lowercase letters, digits and "
                f"hyphens, a letter first, at most {_LONGEST_NAME}, got {self.name!r}; "
                "choose another name"
            )
        for field in ("deadline_hours", "max_attempts", "poll_seconds"):
            if getattr(self, field) <= 0:
                raise BadInputError(
                    f"expected job.LaunchConfig.{field} above 0, got "
                    f"{getattr(self, field)}; raise it"
                )


@dataclasses.dataclass(frozen=True)
class Role:
    """One of the jobs of a run, with slices of its own.

    Attributes:
      name: "trainer" or "builder".
      machines: one of its slices.
      slices: how many of them work together.
      zone: where.
      provisioning: how they are had.
      command: arguments of `realm`; paths are relative to the checkout.
    """

    name: str
    machines: Slice
    slices: int
    zone: str
    provisioning: str
    command: tuple[str, ...]

    @property
    def num_workers(self) -> int:
        """Hosts, of all slices together."""
        return self.slices * self.machines.num_hosts


@dataclasses.dataclass(frozen=True)
class Job:
    """A run as it is launched.

    Attributes:
      run: its id: name, and a hash of the model directory. The same directory is the
        same run.
      model_dir: where everything meets.
      roles: trainer, and builder where it has machines of its own.
      config: where and how.
      site: what its machines have.
      total_steps: of the training, or None; for whoever watches.
    """

    run: str
    model_dir: str
    roles: tuple[Role, ...]
    config: LaunchConfig
    site: Site = TPU_VM
    total_steps: int | None = None

    @property
    def zones(self) -> list[str]:
        """Where slices of the run may be."""
        return sorted({role.zone for role in self.roles})

    def role(self, name: str) -> Role:
        """Returns a role by its name."""
        return next(role for role in self.roles if role.name == name)


def make_job(
    config: LaunchConfig,
    hardware: HardwareConfig,
    model_dir: str,
    trainer_command: Sequence[str],
    builder_command: Sequence[str] | None,
) -> Job:
    """Returns the job of a run.

    Args:
      config: where and how.
      hardware: which slices.
      model_dir: of the run.
      trainer_command: arguments of `realm`.
      builder_command: the builder's; None where the trainer embeds itself.

    Raises:
      BadInputError: a setting is missing or unknown, or a machine is no TPU slice.
    """
    config.require_valid()
    roles = [
        Role(
            TRAINER,
            _tpu(hardware.trainer),
            hardware.trainer_slices,
            config.zone,
            config.provisioning,
            tuple(trainer_command),
        )
    ]
    if builder_command is not None:
        if not hardware.builder:
            raise BadInputError(
                "expected machines for the index builder, got none; set "
                "slices.HardwareConfig.builder, or REFRESH_MODE to another than async"
            )
        roles.append(
            Role(
                BUILDER,
                _tpu(hardware.builder),
                1,
                config.builder_zone or config.zone,
                config.builder_provisioning or config.provisioning,
                tuple(builder_command),
            )
        )
    return Job(run_id(config.name, model_dir), model_dir, tuple(roles), config)


def run_id(name: str, model_dir: str) -> str:
    """Returns the id of the run of a model directory.

    The hash keeps runs of one name apart, of one person or of several in a project.
    """
    digest = hashlib.sha256(model_dir.rstrip("/").encode()).hexdigest()
    return f"{name}-{digest[:_HASH_DIGITS]}"


def attempt_id(attempt: int) -> str:
    """Returns how an attempt is written in names and folders."""
    return f"{attempt:03d}"


def resource_name(run: str, role: str, attempt: int) -> str:
    """Returns the name of the slices of an attempt; no two attempts share one."""
    return f"{run}-{role}-{attempt_id(attempt)}"


def hourly_price(role: Role, hardware: HardwareConfig) -> float | None:
    """Returns what a role's slices cost an hour on demand; None if not known."""
    price = hardware.price(role.machines)
    return None if price is None else price * role.slices


def _tpu(accelerator_type: str) -> Slice:
    machines = slices.parse(accelerator_type)
    if not machines.runtime:
        raise BadInputError(
            f"expected a TPU slice to launch on, got {accelerator_type!r}; give a "
            "hardware file of one, such as gin/hardware/v4_64.gin, or use `local`"
        )
    return machines
