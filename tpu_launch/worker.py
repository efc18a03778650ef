"""Runs the command of a role on one TPU VM; started at boot by the startup script.

    python -m tpu_launch.worker --model_dir=gs://... --role=trainer \\
      --name=my-0a1b2c-trainer-1 --slices=1 --hosts=8 --deadline=1790000000 \\
      --max_restarts=10 --grace=60 --log_dir=/opt/realm -- COMMAND ...

`--name` is that of the queued resource, `--deadline` in Unix seconds, and `--grace` the
seconds that the command has to save.

A command that crashes is started again, and resumes from its checkpoint. The end of the
work, good or bad, is said in the model directory (`records.py`), where the workers of
both roles look for it every minute. The exit code is the command's.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import threading
from collections.abc import Sequence

import requests

from realm_jax.cli import configuration
from realm_jax.cli.main import guard
from realm_jax.errors import BadInputError
from realm_jax.storage import open_store
from tpu_launch.processes import Command, Pace
from tpu_launch.roles import Worker, errors_said

# Left by a libtpu that was killed; the next one refuses to start while it exists.
_LOCKFILE = pathlib.Path("/tmp/libtpu_lockfile")
_REPORT_SECONDS, _LAST_REPORT_SECONDS = 60.0, 30.0
_METADATA_TRIES, _METADATA_SECONDS = 6, 20.0
_RETRY_SECONDS = 2.0
_NOTICE = "preempted?wait_for_change=true&timeout_sec=60"
_NOTICE_SECONDS = 90.0


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command of a role on this worker; returns its exit code."""
    flags = _parse(argv)
    store = open_store(flags.model_dir)
    # Otherwise the next `up` would create the slices again, for the same end.
    with errors_said(store, flags.role):
        number, megascale = find_place(flags.slices, flags.hosts, stop)
        folder = pathlib.Path(flags.log_dir)
        # The startup script gives the slices back from the first worker.
        (folder / "number").write_text(str(number))
        log = folder / f"{flags.name}-{number}.log"
        _LOCKFILE.unlink(missing_ok=True)
        threading.Thread(target=await_preemption, args=(stop,), daemon=True).start()
        worker = Worker(
            store,
            flags.role,
            [Command(flags.command, os.environ | megascale, log)],
            stop,
            _say,
            max_restarts=flags.max_restarts,
            pace=Pace(saving=flags.grace),
            look_seconds=_REPORT_SECONDS,
            deadline=flags.deadline,
            number=number,
            name=flags.name,
        )
        code = worker.run()
    _say(f"code {code}: {worker.over or worker.last_line()}")
    last = threading.Thread(target=worker.try_to_report, daemon=True)
    last.start()
    last.join(_LAST_REPORT_SECONDS)
    return code


def find_place(
    slices: int, hosts: int, stop: threading.Event
) -> tuple[int, dict[str, str]]:
    """Returns the number of this worker, and the environment of several slices.

    It is in the attributes of the machine that JAX reads, too: `agent-worker-number`,
    and `tpu-env`, lines of NAME: 'value' with MEGASCALE_* of this queued resource.
    """
    name = "agent-worker-number"
    host = _number(name, _attribute(name, stop), hosts)
    if slices == 1:
        return host, {}
    lines = _attribute("tpu-env", stop).splitlines()
    pairs = {
        name.strip(): value.strip().strip("'\"")
        for name, _, value in (line.partition(":") for line in lines)
    }
    found = {name: pairs[name] for name in pairs if name.startswith("MEGASCALE_")}
    if not found.get("MEGASCALE_COORDINATOR_ADDRESS"):
        raise _missing("MEGASCALE_COORDINATOR_ADDRESS", "an address", "")
    this = _number("MEGASCALE_SLICE_ID", found.get("MEGASCALE_SLICE_ID", ""), slices)
    return this * hosts + host, found


def _attribute(name: str, stop: threading.Event) -> str:
    """Returns a metadata attribute of the machine, "" if it has none of that name."""
    reason: Exception | None = None
    for _ in range(_METADATA_TRIES):
        try:
            return read_metadata(f"attributes/{name}", _METADATA_SECONDS)
        except requests.RequestException as error:
            reason = error
        if stop.wait(_RETRY_SECONDS):
            break
    raise BadInputError(
        f"expected the metadata server of a TPU VM, got none ({reason}); run this "
        "on one"
    )


def read_metadata(path: str, seconds: float) -> str:
    """Returns a value of the metadata server, below `instance/`; "" if it has none."""
    server = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/{path}"
    with requests.Session() as session:
        # A proxy set in the environment cannot reach this machine's metadata.
        session.trust_env = False
        session.headers["Metadata-Flavor"] = "Google"
        answer = session.get(url, timeout=seconds)
    if answer.status_code == requests.codes.not_found:
        return ""
    answer.raise_for_status()
    return answer.content.decode()


def _number(name: str, text: str, bound: int) -> int:
    if not text.strip().isdecimal() or int(text) >= bound:
        raise _missing(name, f"a number below {bound}", text)
    return int(text)


def _missing(name: str, expected: str, found: str) -> BadInputError:
    return BadInputError(
        f"expected {name} of {expected}, got {found or 'nothing'!r}; a worker learns "
        "its place from the metadata of its TPU VM"
    )


def await_preemption(stop: threading.Event) -> None:
    """Sets `stop` once the metadata server says that the machine is preempted.

    A spot VM has 30 s from then on. The guest's agent does not pass the notice on: its
    unit has KillMode=process, so that a startup script and its children get no signal.
    """
    while not stop.is_set():
        notice = ""
        with contextlib.suppress(requests.RequestException):
            notice = read_metadata(_NOTICE, _NOTICE_SECONDS).strip()
        if notice == "TRUE":
            stop.set()
        elif not notice:
            stop.wait(_RETRY_SECONDS)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = configuration.make_plain_parser("python -m tpu_launch.worker", __doc__)
    for name, kind in (
        ("model_dir", str),
        ("role", str),
        ("name", str),
        ("log_dir", str),
        ("slices", int),
        ("hosts", int),
        ("max_restarts", int),
        ("deadline", float),
        ("grace", float),
    ):
        parser.add_argument(f"--{name}", required=True, type=kind)
    parser.add_argument("command", nargs="+", help="what to run, after --")
    return parser.parse_args(argv)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    code = guard(lambda stop: main(sys.argv[1:], stop))
    sys.stdout.flush()
    sys.stderr.flush()
    # An unavailable store may block the reporter's thread.
    os._exit(code)
