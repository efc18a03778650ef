"""Determines which worker of an attempt this machine is, and its command's environment.

Cloud TPU provides it in the metadata of the machine, from the attributes that JAX reads
too (`jax._src.clusters.cloud_tpu_cluster`): `agent-worker-number`,
`worker-network-endpoints`, and `tpu-env`, lines of NAME: 'value' with the MEGASCALE_*
of this queued resource.
"""

import dataclasses
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from realm_jax.errors import BadInputError

# The default of JAX, 8482, is blocked by the automatic firewall on v6e.
_COORDINATOR_PORT = "8476"
_MEGASCALE_PORT = "8080"
_STALE = "MEGASCALE_"
_TRIES, _RETRY_SECONDS, _TIMEOUT_SECONDS = 6, 2.0, 20.0


@dataclasses.dataclass(frozen=True)
class WorkerIdentity:
    """Position of a worker among those of its role.

    Attributes:
      host: number of the host in its slice.
      slice: number of the slice.
      hosts: number of hosts of a slice.
      slices: number of slices that work together.
      coordinator: host name or address of the first worker of all.
    """

    host: int
    slice: int
    hosts: int
    slices: int
    coordinator: str

    @property
    def number(self) -> int:
        """Number of the worker among all hosts, counted slice by slice."""
        return self.slice * self.hosts + self.host


def find_identity(
    slices: int, hosts: int, environment: Mapping[str, str], stop: threading.Event
) -> WorkerIdentity:
    """Returns the position of this machine.

    Args:
      slices: number of slices that work together.
      hosts: number of hosts of each slice.
      environment: environment of this process.
      stop: set when asked to stop, which ends waiting for the metadata server.

    Raises:
      BadInputError: the position is not available, or the numbers of slices or hosts
        differ from the expected ones.
    """

    def told(name: str) -> str:
        return _metadata(name, environment, stop)

    megascale = _parse(told("tpu-env")) if slices > 1 else {}
    host = _number("agent-worker-number", told("agent-worker-number"), hosts)
    # Host names, or in the older form name:id:address.
    names = told("worker-network-endpoints").split(",")
    names = [name.rpartition(":")[2].strip() for name in names]
    if len(names) != hosts or not all(names):
        raise _missing("worker-network-endpoints", f"{hosts} hosts", ",".join(names))
    if slices == 1:
        return WorkerIdentity(host, 0, hosts, 1, names[0])

    def of_slices(name: str) -> str:
        return megascale.get(name, "")

    found = of_slices("MEGASCALE_NUM_SLICES")
    if found != str(slices):
        raise _missing("MEGASCALE_NUM_SLICES", str(slices), found)
    number = of_slices("MEGASCALE_SLICE_ID")
    coordinator = of_slices("MEGASCALE_COORDINATOR_ADDRESS").partition(":")[0]
    if not coordinator:
        raise _missing("MEGASCALE_COORDINATOR_ADDRESS", "an address", "")
    number = _number("MEGASCALE_SLICE_ID", number, slices)
    return WorkerIdentity(host, number, hosts, slices, coordinator)


def command_environment(
    identity: WorkerIdentity, given: Mapping[str, str]
) -> dict[str, str]:
    """Returns the environment of the command.

    MEGASCALE_* are not inherited, because stale ones make a slice hang.

    Args:
      identity: position of this worker.
      given: environment of this process.
    """
    made = {name: v for name, v in given.items() if not name.startswith(_STALE)}
    made["JAX_COORDINATOR_PORT"] = _COORDINATOR_PORT
    if identity.slices > 1:
        made |= {
            "MEGASCALE_COORDINATOR_ADDRESS": (
                f"{identity.coordinator}:{_MEGASCALE_PORT}"
            ),
            "MEGASCALE_NUM_SLICES": str(identity.slices),
            "MEGASCALE_SLICE_ID": str(identity.slice),
            "MEGASCALE_PORT": _MEGASCALE_PORT,
        }
    return made


def _metadata(name: str, environment: Mapping[str, str], stop: threading.Event) -> str:
    """Returns a metadata attribute of the machine, "" if it has none of that name."""
    path = f"attributes/{name}"
    return _patiently(lambda: open_metadata(path, environment, _TIMEOUT_SECONDS), stop)


def open_metadata(path: str, environment: Mapping[str, str], seconds: float) -> Any:
    """Requests a value of the metadata server; returns the response.

    Args:
      path: path of the value below `instance/`.
      environment: environment of this process.
      seconds: time after which the request fails.

    Raises:
      OSError: there is no such value, or no server.
    """
    server = environment.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # A proxy set in the environment cannot reach this machine's metadata.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(request, timeout=seconds)


def _patiently(ask: Callable[[], Any], stop: threading.Event) -> str:
    reason = ""
    for _ in range(_TRIES):
        try:
            with ask() as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            reason = str(error)
        except OSError as error:
            reason = str(error)
        if stop.wait(_RETRY_SECONDS):
            break
    raise BadInputError(
        f"expected the metadata server of a TPU VM, got none ({reason}); run this on "
        "one"
    )


def _parse(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}


def _number(name: str, text: str, bound: int) -> int:
    if not text.strip().isdecimal() or int(text) >= bound:
        raise _missing(name, f"a number below {bound}", text)
    return int(text)


def _missing(name: str, expected: str, found: str) -> BadInputError:
    return BadInputError(
        f"expected {name} of {expected}, got {found or 'nothing'!r}; a worker learns "
        "its place from the metadata of its TPU VM"
    )
