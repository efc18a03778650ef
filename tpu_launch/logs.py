"""`python -m tpu_launch logs`: prints the output of the workers of a run.

Give it the flags of `up`, or --gin.MODEL_DIR=gs://my-bucket/my/pretrain alone. Each
line begins with role and worker. --follow continues with new lines until the run is
over or Ctrl-C. TPU VMs upload the last 256 KiB of their logs every minute.

Exit code 75: the model directory, or the engine, does not answer.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from realm_jax.cli import configuration
from realm_jax.errors import StoppedError
from realm_jax.storage import MissingObjectError, Store, open_store
from tpu_launch import records
from tpu_launch.records import GKE, LOCAL
from tpu_launch.run import BUILDER, TRAINER

MISSING = "[lines may be missing here]"
"""Stands for lines that were overwritten between two reads."""
_LOG = ".log"
_POLL_SECONDS = 5.0


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command; returns 0."""
    parser = configuration.make_parser("python -m tpu_launch logs", __doc__)
    parser.add_argument("--role", choices=(TRAINER, BUILDER), help="only of this role")
    parser.add_argument("--worker", type=int, help="only of this worker")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="continue with new lines"
    )
    flags, model_dir = configuration.parse_for_macro(parser, argv, "MODEL_DIR")
    store = open_store(model_dir)
    record = records.read_record(store)
    wanted = (flags.role, flags.worker, flags.follow, stop)
    if record.backend == GKE:
        lines = record.gke().logs(record.id, *wanted)
    else:
        is_local = record.backend == LOCAL
        logs = open_store(record.where["logs"]) if is_local else store
        folder = "" if is_local else records.LOGS
        lines = stored_lines(
            logs,
            folder,
            *wanted,
            is_over=lambda: records.is_over(records.outcomes(store)),
        )
    try:
        for who, line in lines:
            print(f"{who} | {line}", flush=True)
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe; discard further output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if stop.is_set():
        raise StoppedError("stopped reading; the run goes on")
    return 0


def stored_lines(
    store: Store,
    folder: str,
    role: str | None,
    worker: int | None,
    follow: bool,
    stop: threading.Event,
    is_over: Callable[[], bool],
) -> Iterator[tuple[str, str]]:
    """Yields the lines of logs in a store, such as ("trainer/0", "...").

    They are `<name>-<role>-<number>/<worker>.log` in the folder, of which for each
    worker the one counts that was written last. A role or worker of None is all of
    them. With `follow` it goes on until nothing more will be written (`is_over`).
    """
    tails: dict[str, Tail] = {}
    while True:
        # What is written last is still read.
        was_over = not follow or is_over()
        for (of_role, of_worker), name in _newest(store, folder).items():
            if role not in (None, of_role) or worker not in (None, of_worker):
                continue
            try:
                end = store.read(name)
            except MissingObjectError:
                continue
            for line in tails.setdefault(name, Tail()).see(end, was_over):
                yield f"{of_role}/{of_worker}", line
        if was_over or stop.wait(_POLL_SECONDS):
            return


def _newest(store: Store, folder: str) -> dict[tuple[str, int], str]:
    """Returns the log of each worker that was written last, by role and number."""
    found: dict[tuple[str, int], tuple[float, str]] = {}
    for path, stat in store.stats(folder).items():
        name, _, file = path.rpartition("/")
        parts, number = name.rpartition("/")[2].split("-"), file.removesuffix(_LOG)
        if len(parts) < 2 or not (number.isdecimal() and parts[-1].isdecimal()):
            continue
        key = parts[-2], int(number)
        found[key] = max(found.get(key, (0.0, "")), (stat.modified, path))
    return {key: path for key, (_, path) in sorted(found.items())}


class Tail:
    """A log, reconstructed from its consecutive ends, of which only the last is stored.

    Every minute, a worker replaces its log in the model directory by the last 256 KiB
    of its command's output, from the beginning of a line.
    """

    def __init__(self):
        self._last = b""

    def see(self, end: bytes, is_last: bool) -> list[str]:
        """Returns the lines that are new in the end of a log.

        Unless nothing more is read, an incomplete last line is left for the next call.
        """
        if not is_last:
            end = end[: end.rfind(b"\n") + 1]
        length = _overlap(self._last, end)
        begins_anew = bool(self._last) and not length
        self._last = end
        lines = end[length:].decode(errors="replace").splitlines()
        return [MISSING, *lines] if begins_anew and lines else lines


def _overlap(last: bytes, end: bytes) -> int:
    """Returns the length of the known part of a log's new end, in bytes.

    That is the longest suffix of the last end that is a prefix of the new one. It must
    begin at a line start in both, because the end of a line may equal another line.
    """
    start, seen = 0, memoryview(last)
    while start < len(last):
        if end.startswith(seen[start:]):
            return len(last) - start
        start = last.find(b"\n", start) + 1 or len(last)
    return 0
