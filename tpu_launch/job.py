"""Defines a launched run, its roles, and the names derived from them."""

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Mapping, Sequence

from realm_jax.errors import BadInputError
from realm_jax.hardware import HardwareConfig, LaunchConfig
from tpu_launch import slices
from tpu_launch.slices import Slice
from tpu_launch.startup import TPU_VM, Site

TRAINER = "trainer"
BUILDER = "builder"
_HASH_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class Role:
    """A job of a run, with its own slices.

    Attributes:
      name: "trainer" or "builder".
      machines: one of its slices.
      slices: number of slices that work together.
      zone: zone of the slices.
      provisioning: how the slices are provisioned.
      command: arguments of `realm`; paths are relative to the checkout.
      left_out: gs:// folder -> regular expression of what in it the role does not read,
        so that its workers do not copy it.
    """

    name: str
    machines: Slice
    slices: int
    zone: str
    provisioning: str
    command: tuple[str, ...]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        """Number of hosts, over all slices."""
        return self.slices * self.machines.num_hosts


@dataclasses.dataclass(frozen=True)
class Job:
    """A run as it is launched.

    Attributes:
      run: id of the run: its name, and a hash of the model directory. The same
        directory is the same run.
      model_dir: the model directory, through which all jobs communicate.
      roles: trainer, and builder if it has its own machines.
      config: where and how slices are obtained.
      site: environment of the machines.
      total_steps: total steps of the training, or None; for display.
    """

    run: str
    model_dir: str
    roles: tuple[Role, ...]
    config: LaunchConfig
    site: Site = TPU_VM
    total_steps: int | None = None

    @property
    def zones(self) -> list[str]:
        """Zones in which slices of the run may be."""
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
    corpus: str = "",
    tasks: Sequence[str] = (),
) -> Job:
    """Returns the job of a run.

    Args:
      config: where and how slices are obtained.
      hardware: accelerator types and prices.
      model_dir: model directory of the run.
      trainer_command: arguments of `realm`.
      builder_command: the builder's; None if the trainer embeds the corpus itself.
      corpus: the corpus, which may be in a folder that workers fetch.
      tasks: the tasks whose examples the trainer reads. The builder reads none.

    Raises:
      BadInputError: a setting is missing or invalid, or a machine is no TPU slice.
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
            unread_examples(config.fetch, corpus, tasks),
        )
    ]
    if builder_command is not None:
        if not hardware.builder:
            raise BadInputError(
                "expected machines for the index builder, got none; set "
                "hardware.HardwareConfig.builder, or REFRESH_MODE to another than async"
            )
        roles.append(
            Role(
                BUILDER,
                _tpu(hardware.builder),
                1,
                config.builder_zone or config.zone,
                config.builder_provisioning or config.provisioning,
                tuple(builder_command),
                unread_examples(config.fetch, corpus, ()),
            )
        )
    return Job(run_id(config.name, model_dir), model_dir, tuple(roles), config)


def unread_examples(
    fetch: Mapping[str, str], corpus: str, tasks: Sequence[str]
) -> dict[str, str]:
    """Returns what is not copied of a corpus that workers fetch.

    Args:
      fetch: gs:// folder -> folder of the worker.
      corpus: the corpus on a worker.
      tasks: the tasks whose examples are read.

    Returns:
      gs:// folder of the corpus, or of what it lies in -> regular expression of the
      examples of other tasks.
    """
    found = {}
    names = "|".join(map(re.escape, tasks))
    for url, folder in fetch.items():
        path = pathlib.PurePosixPath(corpus)
        if corpus and path.is_relative_to(folder):
            examples = str(path.relative_to(folder) / "examples")
            but = f"(?!({names})/)" if tasks else ""
            found[url] = f"{re.escape(examples)}/{but}"
    return found


def run_id(name: str, model_dir: str) -> str:
    """Returns the id of the run of a model directory.

    The hash distinguishes runs of the same name in a project, of one or several users.
    """
    digest = hashlib.sha256(model_dir.rstrip("/").encode()).hexdigest()
    return f"{name}-{digest[:_HASH_DIGITS]}"


def attempt_id(attempt: int) -> str:
    """Formats the number of an attempt for names and folders."""
    return f"{attempt:03d}"


def resource_name(run: str, role: str, attempt: int) -> str:
    """Returns the name of the slices of an attempt; no two attempts share one."""
    return f"{run}-{role}-{attempt_id(attempt)}"


def hourly_price(role: Role, hardware: HardwareConfig) -> float | None:
    """Returns the price of a role's slices per hour on demand; None if not known."""
    price = role.machines.hourly_price(hardware)
    return None if price is None else price * role.slices


def _tpu(accelerator_type: str) -> Slice:
    machines = slices.parse(accelerator_type)
    if not machines.runtime:
        raise BadInputError(
            f"expected a TPU slice to launch on, got {accelerator_type!r}; give a "
            "hardware file of one, such as gin/hardware/v4_64.gin, or use `local`"
        )
    return machines
