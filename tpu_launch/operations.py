"""What a launch does, as values: configuration in, operations out.

Nothing is done here. A backend carries operations out, `up --dry_run` prints them, and
the reconcile loop makes those of later attempts by the same functions.
"""

import dataclasses
import math
import uuid
from collections.abc import Mapping

from tpu_launch.job import Job, Role, resource_name
from tpu_launch.startup import startup_script
from tpu_launch.worker_state import attempt_folder, role_folder

# Labels of every slice. Labels of Google Cloud are lowercase.
RUN, ROLE, ATTEMPT, EXPIRES = (
    "realm-run",
    "realm-role",
    "realm-attempt",
    "realm-expires",
)


@dataclasses.dataclass(frozen=True)
class ShipBundle:
    """The code goes to the model directory.

    Attributes:
      url: of the object.
      sha256: of its contents.
    """

    url: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class CreateSlice:
    """Slices are asked for, as one queued resource.

    Attributes:
      name: of the queued resource, and of the TPU; with several slices what their
        names begin with.
      request_id: the same whenever this very creation is asked for again.
      project: of Google Cloud.
      zone: where.
      accelerator_type: of each slice.
      runtime: software version of their VMs.
      slices: how many.
      provisioning: "on-demand", "spot" or "reserved".
      valid_seconds: a request that is not granted after so long fails.
      labels: run, role, attempt, and when all of it expires in Unix seconds.
      network: VPC network, or "".
      subnetwork: or "".
      service_account: or "".
      external_ips: whether workers have addresses of their own.
      startup_script: run by every host at every boot.
    """

    name: str
    request_id: str
    project: str
    zone: str
    accelerator_type: str
    runtime: str
    slices: int
    provisioning: str
    valid_seconds: int
    labels: Mapping[str, str]
    network: str
    subnetwork: str
    service_account: str
    external_ips: bool
    startup_script: str


@dataclasses.dataclass(frozen=True)
class AwaitDone:
    """The launcher waits, and replaces slices that are lost, until a role is done.

    Attributes:
      role: which.
      marker: URL of the object that says so.
      until: when it gives up, in Unix seconds.
    """

    role: str
    marker: str
    until: int


@dataclasses.dataclass(frozen=True)
class Collect:
    """What the workers of a role said last is read.

    Attributes:
      role: which.
      folder: URL of their files.
    """

    role: str
    folder: str


@dataclasses.dataclass(frozen=True)
class DeleteSlice:
    """A queued resource and its slices are deleted, whatever their state.

    Attributes:
      name: of the queued resource.
      zone: where.
    """

    name: str
    zone: str


Operation = ShipBundle | CreateSlice | AwaitDone | Collect | DeleteSlice


def launch(job: Job, bundle: ShipBundle, now: float) -> tuple[Operation, ...]:
    """Returns all operations of a run that nothing happens to, in order.

    Args:
      job: the run.
      bundle: its code.
      now: Unix seconds.
    """
    until = deadline(job, now)
    creates = [create_slice(job, role, 1, bundle, now, until) for role in job.roles]
    operations: list[Operation] = [bundle, *creates]
    for role, create in zip(job.roles, creates, strict=True):
        marker = f"{_url(job)}/{role_folder(job.run, role.name)}/done.json"
        folder = f"{_url(job)}/{attempt_folder(job.run, role.name, 1)}"
        operations += [
            AwaitDone(role.name, marker, until),
            Collect(role.name, folder),
            DeleteSlice(create.name, create.zone),
        ]
    return tuple(operations)


def deadline(job: Job, now: float) -> int:
    """Returns when an `up` that begins now is over, in Unix seconds."""
    return math.ceil(now + job.config.deadline_hours * 3600)


def create_slice(
    job: Job, role: Role, attempt: int, bundle: ShipBundle, now: float, until: int
) -> CreateSlice:
    """Returns the operation that begins an attempt.

    Args:
      job: the run.
      role: whose slices.
      attempt: its number.
      bundle: the code.
      now: Unix seconds.
      until: deadline of the run.
    """
    config = job.config
    name = resource_name(job.run, role.name, attempt)
    return CreateSlice(
        name=name,
        request_id=_request_id(config.project, role.zone, name),
        project=config.project,
        zone=role.zone,
        accelerator_type=role.machines.accelerator_type,
        runtime=role.machines.runtime,
        slices=role.slices,
        provisioning=role.provisioning,
        valid_seconds=max(1, math.floor(until - now)),
        labels={
            RUN: job.run,
            ROLE: role.name,
            ATTEMPT: str(attempt),
            EXPIRES: str(until),
        },
        network=config.network,
        subnetwork=config.subnetwork,
        service_account=config.service_account,
        external_ips=config.external_ips,
        startup_script=startup_script(
            name=name,
            run=job.run,
            role=role.name,
            attempt=attempt,
            slices=role.slices,
            hosts=role.machines.num_hosts,
            model_dir=job.model_dir,
            bundle_url=bundle.url,
            bundle_digest=bundle.sha256,
            deadline=until,
            fetch=config.fetch,
            command=role.command,
            site=job.site,
        ),
    )


def _request_id(project: str, zone: str, name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{project}/{zone}/{name}"))


def _url(job: Job) -> str:
    return job.model_dir.rstrip("/")
