"""Defines a run as it is launched: its names, roles, machines and commands."""

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Mapping, Sequence

from realm_jax.hardware import LaunchConfig
from tpu_launch.slices import Slice

TRAINER = "trainer"
BUILDER = "builder"
_HASH_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class Role:
    """A job of a run, with its own machines.

    Attributes:
      name: "trainer" or "builder".
      machines: one of its slices.
      slices: number of slices that work together.
      provisioning: how they are provisioned: "on-demand", "spot" or "reserved".
      command: arguments of `realm`; relative paths of gin files are those of the code.
      zone: zone of the slices, where Cloud TPU is asked for them.
      left_out: gs:// folder -> regular expression, which paths in that folder begin
        with that the role does not read, so that its workers do not copy them.
    """

    name: str
    machines: Slice
    slices: int
    provisioning: str
    command: tuple[str, ...]
    zone: str = ""
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.slices} x {self.machines.accelerator_type}"

    @property
    def num_workers(self) -> int:
        """Number of hosts, over all slices."""
        return self.slices * self.machines.num_hosts


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as it is launched.

    Attributes:
      id: its name, and a hash of the model directory. The same directory is the same
        run.
      model_dir: the model directory, through which all jobs communicate.
      roles: trainer, and builder if it has its own machines.
      code: checksum of the bundle that the workers run (`bundle.py`).
      config: where machines come from, and when they are given back.
    """

    id: str
    model_dir: str
    roles: tuple[Role, ...]
    code: str
    config: LaunchConfig

    @property
    def code_url(self) -> str:
        """Where the bundle is."""
        return f"{self.model_dir.rstrip('/')}/{bundle_name(self.code)}"


def bundle_name(sha256: str) -> str:
    """Returns the name of a bundle of code in the model directory."""
    return f"launch/bundles/{sha256}.tar.gz"


def outcome_name(role: str) -> str:
    """Returns the name of the object that says how a role has ended."""
    return f"launch/{role}.json"


def run_id(name: str, model_dir: str) -> str:
    """Returns the id of the run of a model directory.

    The hash distinguishes runs of the same name in a project, of one or several users.
    """
    digest = hashlib.sha256(model_dir.rstrip("/").encode()).hexdigest()
    return f"{name}-{digest[:_HASH_DIGITS]}"


def unread_examples(
    fetch: Mapping[str, str], corpus: str, tasks: Sequence[str]
) -> dict[str, str]:
    """Returns what is not copied of a corpus that workers fetch, as `Role.left_out`.

    Of the examples in the corpus, a folder of the worker, only those of the tasks are.
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


@dataclasses.dataclass(frozen=True)
class EngineState:
    """What an engine says, in its own words, of one of a run's objects.

    The message says why, in one line; it is "" if all is well.
    """

    role: str
    name: str
    state: str
    message: str = ""


class RunFailedError(Exception):
    """Raised for a run that has failed and is not created again; one line."""
