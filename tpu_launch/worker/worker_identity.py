"""Which of the workers of an attempt this machine is, and what its command is told.

Cloud TPU says it in the metadata of the machine, whose names JAX reads too
(`jax._src.clusters.cloud_tpu_cluster`): `agent-worker-number`,
`worker-network-endpoints`, and `tpu-env`, lines of NAME: 'value' that hold the
MEGASCALE_* of this queued resource. Elsewhere TPU_WORKER_ID is in the environment, as
on GKE; then all of it is, and no metadata are read.
"""

import dataclasses
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from realm_jax.errors import BadInputError
from tpu_launch.clock import Clock

# The default of JAX, 8482, is blocked by the automatic firewall on v6e.
_COORDINATOR_PORT = "8476"
_MEGASCALE_PORT = "8080"
_STALE = "MEGASCALE_"
_IN_ENVIRONMENT = {
    "agent-worker-number": "TPU_WORKER_ID",
    "worker-network-endpoints": "TPU_WORKER_HOSTNAMES",
}
_TRIES, _RETRY_SECONDS, _TIMEOUT_SECONDS = 6, 2.0, 20.0


@dataclasses.dataclass(frozen=True)
class Place:
    """A worker among the others of its role.

    Attributes:
      host: its number in its slice.
      slice: number of the slice.
      hosts: of a slice.
      slices: that work together.
      coordinator: host name or address of the first worker of all.
    """

    host: int
    slice: int
    hosts: int
    slices: int
    coordinator: str

    @property
    def number(self) -> int:
        """Through all hosts of all slices, slice by slice."""
        return self.slice * self.hosts + self.host


def find_place(
    slices: int, hosts: int, environment: Mapping[str, str], clock: Clock
) -> Place:
    """Returns which worker this machine is.

    Args:
      slices: that work together.
      hosts: of each.
      environment: of this process.
      clock: to wait with, where the metadata server is not there yet.

    Raises:
      BadInputError: that is not said, or there are other slices or hosts.
    """
    if "TPU_WORKER_ID" in environment:

        def told(name: str) -> str:
            return environment.get(_IN_ENVIRONMENT[name], "")

        megascale = environment
    else:

        def told(name: str) -> str:
            return _metadata(name, environment, clock)

        megascale = _parse(told("tpu-env")) if slices > 1 else {}
    host = _number("agent-worker-number", told("agent-worker-number"), hosts)
    # Host names, or in the older form name:id:address.
    names = told("worker-network-endpoints").split(",")
    names = [name.rpartition(":")[2].strip() for name in names]
    if len(names) != hosts or not all(names):
        raise _missing("worker-network-endpoints", f"{hosts} hosts", ",".join(names))
    if slices == 1:
        return Place(host, 0, hosts, 1, names[0])

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
    return Place(host, number, hosts, slices, coordinator)


def command_environment(place: Place, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the command.

    Stale MEGASCALE_* hang a slice, so none is inherited.

    Args:
      place: of this worker.
      given: the environment of this process.
    """
    made = {name: v for name, v in given.items() if not name.startswith(_STALE)}
    made["JAX_COORDINATOR_PORT"] = _COORDINATOR_PORT
    if place.slices > 1:
        made |= {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{place.coordinator}:{_MEGASCALE_PORT}",
            "MEGASCALE_NUM_SLICES": str(place.slices),
            "MEGASCALE_SLICE_ID": str(place.slice),
            "MEGASCALE_PORT": _MEGASCALE_PORT,
        }
    return made


def _metadata(name: str, environment: Mapping[str, str], clock: Clock) -> str:
    """Returns an attribute of the machine, "" if it has none of that name."""
    server = environment.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    # A proxy of the environment does not know the metadata of this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return _patiently(lambda: opener.open(request, timeout=_TIMEOUT_SECONDS), clock)


def _patiently(ask: Callable[[], Any], clock: Clock) -> str:
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
        if clock.wait(_RETRY_SECONDS):
            break
    raise BadInputError(
        f"expected the metadata server of a TPU VM, got none ({reason}); run this on "
        "one, or set TPU_WORKER_ID and TPU_WORKER_HOSTNAMES"
    )


def _parse(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}


def _number(name: str, text: str, bound: int) -> int:
    if not text.strip().isdecimal() or int(text) >= bound:
        raise _missing(name, f"a number below {bound}", text)
    return int(text)


def _missing(name: str, expected: str, found: str) -> BadInputError:
    name = f"{_IN_ENVIRONMENT[name]} or {name}" if name in _IN_ENVIRONMENT else name
    return BadInputError(
        f"expected {name} of {expected}, got {found or 'nothing'!r}; a worker learns "
        "its place from the metadata of its TPU VM"
    )
