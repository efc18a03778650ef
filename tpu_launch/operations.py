"""Defines the operations of a launch as values, computed from its configuration.

Nothing is executed here. A backend executes operations, `up --dry_run` prints them, and
the reconcile loop creates those of later attempts with the same functions.
"""

import dataclasses
import math
import uuid
from collections.abc import Mapping

from tpu_launch.job import Job, Role, resource_name
from tpu_launch.startup import startup_script
from tpu_launch.worker_state import attempt_folder, role_folder

# Labels of every slice. Google Cloud requires lowercase.
RUN, ROLE, ATTEMPT, EXPIRES = (
    "realm-run",
    "realm-role",
    "realm-attempt",
    "realm-expires",
)


@dataclasses.dataclass(frozen=True)
class ShipBundle:
    """Writes the code to the model directory.

    Attributes:
      url: URL of the object.
      sha256: checksum of its contents.
    """

    url: str
    sha256: str


@dataclasses.dataclass(frozen=True)
class CreateSlice:
    """Requests slices, as one queued resource.

    Attributes:
      name: name of the queued resource, and of the TPU; with several slices, the prefix
        of their names.
      request_id: identical whenever the same creation is requested again.
      project: project of Google Cloud.
      zone: zone of the slices.
      accelerator_type: accelerator type of each slice.
      runtime: software version of their VMs.
      slices: number of slices.
      provisioning: "on-demand", "spot" or "reserved".
      valid_seconds: time after which a request that was not granted fails.
      labels: run, role, attempt, and time of expiry in Unix seconds.
      network: VPC network, or "".
      subnetwork: subnetwork, or "".
      service_account: service account, or "".
      external_ips: whether workers have external addresses.
      startup_script: script that every host runs at every boot.
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
    """Waits, and replaces slices that are lost, until a role is done.

    Attributes:
      role: name of the role.
      marker: URL of the object that marks it as done.
      until: time at which the launcher gives up, in Unix seconds.
    """

    role: str
    marker: str
    until: int


@dataclasses.dataclass(frozen=True)
class Collect:
    """Reads the last reports of a role's workers.

    Attributes:
      role: name of the role.
      folder: URL of their files.
    """

    role: str
    folder: str


@dataclasses.dataclass(frozen=True)
class DeleteSlice:
    """Deletes a queued resource and its slices, whatever their state.

    Attributes:
      name: name of the queued resource.
      zone: zone of the slices.
    """

    name: str
    zone: str


Operation = ShipBundle | CreateSlice | AwaitDone | Collect | DeleteSlice


def launch(job: Job, bundle: ShipBundle, now: float) -> tuple[Operation, ...]:
    """Returns all operations of a run without failures, in order.

    Args:
      job: the run.
      bundle: its code.
      now: time in Unix seconds.
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
    """Returns the deadline of an `up` that begins now, in Unix seconds."""
    return math.ceil(now + job.config.deadline_hours * 3600)


def create_slice(
    job: Job, role: Role, attempt: int, bundle: ShipBundle, now: float, until: int
) -> CreateSlice:
    """Returns the operation that begins an attempt.

    Args:
      job: the run.
      role: the role that the slices are for.
      attempt: number of the attempt.
      bundle: the code.
      now: time in Unix seconds.
      until: deadline of the run, in Unix seconds.
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
            left_out=role.left_out,
            command=role.command,
            site=job.site,
        ),
    )


def _request_id(project: str, zone: str, name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{project}/{zone}/{name}"))


def _url(job: Job) -> str:
    return job.model_dir.rstrip("/")
