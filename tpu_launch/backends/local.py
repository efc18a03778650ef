"""Emulates slices with processes of this machine.

A host is a process that runs the startup script in a folder of its own, with all its
children. It reads its position from its environment, as on GKE, and multiple devices
are simulated. Hosts end when the launcher does, however it ends.

    <folder>/<slice>/slice.json        the requested slice
    <folder>/<slice>/<host>/           bundle, checkout and log of a host
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping

import psutil

from realm_jax.errors import BadInputError
from realm_jax.manifests import parse_json
from tpu_launch import slices, worker_state
from tpu_launch.backends.backend import FoundSlice, SliceState, has_labels, require_own
from tpu_launch.bundle import CODE
from tpu_launch.operations import CreateSlice, DeleteSlice
from tpu_launch.startup import Site

_COMPILED = "compiled"
_SCRIPT = "startup.sh"
_SLICE = "slice.json"
TOKEN = "REALM_LOCAL_TOKEN"
"""Environment variable that identifies a slice's processes, whatever their parent."""

# Wait for a command that saves when its host is to end; a supervisor waits less.
_STOPPING_SECONDS = 90.0
# Exit codes of a supervisor after its host was asked to end.
_ASKED = worker_state.STOPPED


def site() -> Site:
    """Returns the site of hosts on this machine, with this process's environment."""
    python = shlex.quote(sys.executable)
    return Site(
        home='"$PWD"',
        python=python,
        directory=shlex.quote(os.getcwd()),
        copy=f"{python} -m tpu_launch.bundle",
        flags=("--local",),
    )


@dataclasses.dataclass
class _Local:
    """Record of a slice.

    Attributes:
      found: its description, of which only the state may change.
      token: value of `TOKEN` in the environment of its processes.
      hosts: the initial process of each host, if this backend started them.
      deleting: time of the first deletion request, on the monotonic clock.
    """

    found: FoundSlice
    token: str
    hosts: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)
    deleting: float | None = None


class LocalBackend:
    """A backend over one folder, used by one launcher at a time; see `Backend`."""

    def __init__(self, folder: pathlib.Path):
        """Opens a folder, with the slices that another launcher left in it."""
        self._folder = folder
        # No other process gets the write end: the pipe closes when this one ends.
        self._lifeline, self._held = os.pipe()
        self._slices = {
            path.parent.name: _read(path) for path in folder.glob(f"*/{_SLICE}")
        }

    def create(self, operation: CreateSlice) -> None:
        """Starts the hosts of a slice.

        Raises:
          BadInputError: another slice has this name.
        """
        if operation.name in self._slices:
            require_own(self._slices[operation.name].found, operation)
            return
        folder = self._folder / operation.name
        folder.mkdir(parents=True, exist_ok=True)
        found = FoundSlice(
            name=operation.name,
            zone=operation.zone,
            state=SliceState.ACTIVE,
            labels=operation.labels,
            created=time.time(),
            accelerator_type=operation.accelerator_type,
            slices=operation.slices,
        )
        made = _Local(found, uuid.uuid4().hex)
        note = {**dataclasses.asdict(found), "token": made.token}
        # Written atomically, because this process may be killed.
        written = folder / f"{_SLICE}.partial"
        written.write_text(json.dumps(note, indent=2))
        written.replace(folder / _SLICE)
        (folder / _SCRIPT).write_text(operation.startup_script)
        self._slices[operation.name] = made
        machines = slices.parse(operation.accelerator_type)
        port = free_port()
        for number in range(machines.num_hosts):
            made.hosts.append(self._start(folder, number, machines, port, made.token))

    def state(self, name: str, zone: str) -> FoundSlice | None:
        """Returns a slice, or None if there is none of this name."""
        del zone
        one = self._slices.get(name)
        return self._seen(one) if one else None

    def find(self, zone: str, labels: Mapping[str, str | None]) -> list[FoundSlice]:
        """Returns the slices with these labels (None: any value)."""
        del zone
        seen = [self._seen(one) for one in list(self._slices.values())]
        return [found for found in seen if found and has_labels(found, labels)]

    def delete(self, operation: DeleteSlice) -> None:
        """Asks the hosts to save and end; those that do not are killed after 90 s.

        Processes that outlive the initial process of their host are killed at once,
        because the machine that they ran on is gone.
        """
        one = self._slices.get(operation.name)
        if one is None or one.deleting is not None:
            return
        one.deleting = time.monotonic()
        for host in one.hosts:
            if host.poll() is None:
                host.terminate()
        self._seen(one)

    def described(self, operation: CreateSlice | DeleteSlice) -> str:
        """Returns a description of the operation, for users to read."""
        folder = self._folder / operation.name
        if isinstance(operation, DeleteSlice):
            return f"end the processes of {folder}"
        hosts = slices.parse(operation.accelerator_type).num_hosts
        return (
            f"start {hosts} x bash {folder / _SCRIPT}\n\n"
            f"{operation.startup_script.rstrip()}"
        )

    def _start(
        self,
        folder: pathlib.Path,
        number: int,
        machines: slices.Slice,
        port: int,
        token: str,
    ) -> subprocess.Popen[bytes]:
        home = folder / str(number)
        home.mkdir(exist_ok=True)
        hosts = machines.num_hosts
        path = os.environ.get("PYTHONPATH")
        told = {
            **environment(number, hosts, port, machines.num_devices // hosts),
            "TPU_WORKER_ID": str(number),
            "TPU_WORKER_HOSTNAMES": ",".join(["127.0.0.1"] * hosts),
            "PYTHONPATH": f"{CODE}:{path}" if path else str(CODE),
            **compiled_programs(self._folder),
            TOKEN: token,
        }
        with (home / "serial.log").open("ab") as output:
            return subprocess.Popen(
                ["bash", str((folder / _SCRIPT).absolute())],
                cwd=home,
                env={**os.environ, **told},
                stdin=self._lifeline,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches the launcher alone, which then deletes the slice.
                start_new_session=True,
            )

    def _seen(self, one: _Local) -> FoundSlice | None:
        """Returns a slice with its present state, or None after removing a dead one."""
        if one.deleting is None:
            return dataclasses.replace(one.found, **_judge(one))
        left = processes_of(one.token)
        if not left:
            self._forget(one)
            return None
        is_late = time.monotonic() - one.deleting > _STOPPING_SECONDS
        running = {host.pid for host in one.hosts if host.poll() is None}
        for process in left:
            # Kill what outlives its host, as on a machine that is gone. Hosts started
            # by another launcher are already ending, because it is gone.
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if is_late or (one.hosts and os.getsid(process.pid) not in running):
                    process.kill()
        return dataclasses.replace(one.found, state=SliceState.DELETING)

    def _forget(self, one: _Local) -> None:
        for host in one.hosts:
            host.wait()
        folder = self._folder / one.found.name
        for path in folder.glob("*/*"):
            # Remove the checkout, complete or not, and keep the logs.
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name == "bundle.tar.gz":
                path.unlink()
        (folder / _SLICE).unlink(missing_ok=True)
        del self._slices[one.found.name]


def _judge(one: _Local) -> dict[str, object]:
    """Returns state and reason of a slice, suspended if a host was killed or ended."""
    if not one.hosts:
        return {
            "state": SliceState.SUSPENDED,
            "reason": "the launcher that had it is gone",
        }
    for number, host in enumerate(one.hosts):
        code = host.poll()
        if code is not None and (code < 0 or code in _ASKED):
            return {
                "state": SliceState.SUSPENDED,
                "reason": f"host {number} is gone (code {code})",
            }
    return {}


def _read(path: pathlib.Path) -> _Local:
    try:
        values = parse_json(path.read_bytes())
        token = values.pop("token")
        state = SliceState(values.pop("state"))
        return _Local(FoundSlice(state=state, **values), token)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(
            f"expected a slice of this machine in {path}, got something else; delete "
            "the file"
        ) from error


def processes_of(token: str) -> list[psutil.Process]:
    """Returns the processes with this `TOKEN` in their environment."""
    found = []
    for process in psutil.process_iter():
        # A process may end meanwhile, or belong to another user.
        with contextlib.suppress(psutil.Error):
            if process.environ().get(TOKEN) == token:
                found.append(process)
    return found


def free_port() -> int:
    """Returns an unused TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(number: int, processes: int, port: int, devices: int) -> dict[str, str]:
    """Returns the environment that identifies a process of a group on this machine.

    Args:
      number: number of the process.
      processes: number of processes; a single one only needs its devices.
      port: port on which the first of them listens.
      devices: number of devices of each process, simulated on the CPU.
    """
    told = {}
    if processes > 1 or devices > 1:
        told |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    if processes > 1:
        told |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(number),
        }
    return told


def compiled_programs(folder: pathlib.Path) -> dict[str, str]:
    """Returns the environment of JAX's compilation cache.

    The stages of a chain, and restarted processes, share many compiled programs.

    Args:
      folder: folder of the launched slices; the cache is in it unless the environment
        already names one.
    """
    name = "JAX_COMPILATION_CACHE_DIR"
    return {name: os.environ.get(name) or str((folder / _COMPILED).absolute())}
