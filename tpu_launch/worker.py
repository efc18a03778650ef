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
import math
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import requests

from realm_jax.cli import configuration
from realm_jax.cli.main import guard
from realm_jax.errors import BAD_INPUT, BUG, BadInputError
from realm_jax.storage import Store, UnavailableStoreError, open_store
from tpu_launch import processes, records
from tpu_launch.processes import Command, Ended, Pace
from tpu_launch.run import BUILDER, TRAINER

# Left by a libtpu that was killed; the next one refuses to start while it exists.
_LOCKFILE = pathlib.Path("/tmp/libtpu_lockfile")
_ENDED_EARLY = 1
_REPORT_SECONDS, _LAST_REPORT_SECONDS = 60.0, 30.0
_METADATA_TRIES, _METADATA_SECONDS = 6, 20.0
_RETRY_SECONDS = 2.0
_NOTICE = "preempted?wait_for_change=true&timeout_sec=60"
_NOTICE_SECONDS = 90.0


class Worker:
    """Runs the command of a role, says how its work ended, and hears how others' did.

    Attributes:
      over: why the work must end, "" while it goes on.
      is_done: whether the work of the role is done.
      has_failed: whether it has failed here, and not for what became of others.
    """

    def __init__(
        self,
        store: Store,
        role: str,
        logs: Sequence[pathlib.Path],
        *,
        say: Callable[[str], None],
        number: int = 0,
        name: str = "",
    ):
        """Prepares a worker, without reading or writing anything yet.

        Args:
          store: the model directory, where the workers of both roles look.
          role: the role.
          logs: what its processes write.
          say: prints a message.
          number: its number among all hosts of its role's slices.
          name: name of these, under which its log is uploaded; "" for no upload.
        """
        self.over, self.is_done, self.has_failed = "", False, False
        self._store, self._role, self._logs = store, role, logs
        self._say, self._number, self._name = say, number, name

    def run(
        self,
        commands: Sequence[Command],
        stop: threading.Event,
        *,
        max_restarts: int,
        pace: Pace,
        look_seconds: float,
        deadline: float = math.inf,
    ) -> int:
        """Runs processes to the end of the work; returns their exit code.

        That is 1 where they were asked to end because of the deadline, in Unix seconds,
        or of what became of the other role. The model directory is looked at every
        `look_seconds`.
        """

        def is_over() -> bool:
            return bool(self.over) or time.time() >= deadline

        def is_done() -> bool:
            # Another process that says the same ends a moment later, or crashes.
            until = time.monotonic() + pace.saving
            # Only a store that does not answer may keep a worker whose work is done.
            with contextlib.suppress(UnavailableStoreError, BadInputError):
                while not (self.end(0) or self.over or time.monotonic() >= until):
                    if stop.wait(min(look_seconds, pace.saving)):
                        break
            return self.is_done

        def keep_reporting() -> None:
            while not ended.wait(look_seconds):
                self.try_to_report()

        ended = threading.Event()
        self.try_to_report()
        # A store that does not answer blocks its caller for minutes, but a command must
        # be told of a preemption at once.
        threading.Thread(target=keep_reporting, daemon=True).start()
        try:
            code = processes.keep_running(
                commands,
                is_over=is_over,
                is_done=is_done,
                reached=lambda: records.reached(self._store, self._role),
                stop=stop,
                say=self._say,
                max_restarts=max_restarts,
                pace=pace,
            )
        finally:
            ended.set()
        if self.is_done:
            return 0
        if stop.is_set():
            return code
        if not is_over():
            self.end(code)
        return code if Ended.by(code) is not Ended.STOPPED else _ENDED_EARLY

    def end(self, code: int) -> bool:
        """Says how the work has ended; returns whether it is done.

        An index builder ends with 0 when its trainer says that it has finished, but is
        done only once that has ended with 0, too. Of several workers the first one says
        that the work is done, and any that it has failed. Where that is damaged, any
        says it again.
        """
        if code:
            self.has_failed = True
            records.write_outcome(self._store, self._role, code, self.last_line())
            return False
        ended, damaged = records.readable_outcomes(self._store)
        done = {role for role, outcome in ended.items() if outcome.done}
        if self._role == BUILDER and TRAINER not in done | damaged:
            return False
        if self._number and self._role not in damaged:
            self.report()
            return self.is_done
        records.write_outcome(self._store, self._role, 0)
        self.is_done, self.over = True, "the work is done"
        return True

    def report(self) -> None:
        """Uploads the log, and looks whether the work has ended."""
        if self._name:
            records.write_log(self._store, self._name, self._number, self._logs[0])
        ended, damaged = records.readable_outcomes(self._store)
        failed = [role for role, outcome in ended.items() if not outcome.done]
        if self._role in ended and self._role not in failed:
            self.is_done, self.over = True, "the work is done"
        elif failed:
            self.over = f"the {failed[0]} has failed: {ended[failed[0]].message}"
        elif (
            self._role == BUILDER
            and self._number == 0
            and TRAINER in {*ended, *damaged}
            and records.has_built_all(self._store)
        ):
            self.end(0)

    def last_line(self) -> str:
        """Returns the last line of its processes, "" where none has written any."""
        return next(filter(None, map(records.last_line, self._logs)), "")

    def try_to_report(self) -> None:
        """Reports, whatever error of a store comes."""
        try:
            self.report()
        except Exception as error:
            self._say(f"not reported: {error}")


@contextlib.contextmanager
def errors_said(store: Store, role: str) -> Iterator[None]:
    """Says in the model directory, too, that the work of a role ends with an error."""
    try:
        yield
    except Exception as error:
        code = BAD_INPUT if isinstance(error, BadInputError) else BUG
        message = str(error) or type(error).__name__
        with contextlib.suppress(OSError, BadInputError):
            records.write_outcome(store, role, code, message)
        raise


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
            store, flags.role, [log], say=_say, number=number, name=flags.name
        )
        code = worker.run(
            [Command(flags.command, os.environ | megascale, log)],
            stop,
            max_restarts=flags.max_restarts,
            pace=Pace(saving=flags.grace),
            look_seconds=_REPORT_SECONDS,
            deadline=flags.deadline,
        )
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
        try:
            if read_metadata(_NOTICE, _NOTICE_SECONDS).strip() == "TRUE":
                stop.set()
        except requests.RequestException:
            stop.wait(_RETRY_SECONDS)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = configuration.make_plain_parser("python -m tpu_launch.worker", __doc__)
    for name, kind in (
        *(("model_dir", str), ("role", str), ("name", str), ("log_dir", str)),
        *(("slices", int), ("hosts", int), ("max_restarts", int)),
        *(("deadline", float), ("grace", float)),
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
