"""Runs work in named parts with Apache Beam; finished parts are kept.

A part is an object in a scratch folder, which may be gs:// where workers are on other
machines. It appears whole or not at all, so a run that was killed resumes with the
missing parts. The content of a part does not depend on which worker makes it, or when.
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from realm_jax.errors import BadInputError, StoppedError
from realm_jax.prepare.block_parts import read_part, write_part
from realm_jax.storage import open_store

_DONE = "done"
_STOP = "stop"
_REFUSED = "refused.json"
_POLL_SECONDS = 0.2
_BEAM_SAYS_KILLED = "Worker subprocess exited"


class MakePart(Protocol):
    """Makes parts on a worker; instances are pickled."""

    def __call__(self, name: str, check: Callable[[], None]) -> bytes:
        """Returns the bytes of a part, a function of its name alone.

        Args:
          check: to be called regularly; raises `StoppedError` when work is to end.
        """
        ...


class Parts:
    """The parts of one job."""

    def __init__(self, url: str):
        """Sets the scratch folder, without creating it."""
        self.url = url
        self._store = open_store(url)

    def done(self) -> set[str]:
        """Returns the names of the finished parts; whether they are sound, `read` says.

        They are read once, when all are there, as a bucket or a large corpus would take
        long to read twice.
        """
        return {name.removeprefix(f"{_DONE}/") for name in self._store.list(_DONE)}

    def read(self, name: str) -> bytes | None:
        """Returns the content of a finished part, None if it is missing or damaged."""
        return read_part(self._store, f"{_DONE}/{name}")

    def write(self, name: str, part: bytes) -> None:
        """Writes a finished part."""
        write_part(self._store, f"{_DONE}/{name}", part)

    def make(
        self,
        names: Sequence[str],
        make_part: MakePart,
        *,
        workers: int,
        beam_flags: Sequence[str] = (),
        report: Callable[[int, int], None],
        stop: threading.Event,
    ) -> None:
        """Makes the missing parts.

        Args:
          names: all parts; valid file names.
          workers: processes on this machine, if no other runner is chosen.
          report: called with the number of finished parts and of all parts.
          stop: set to end the work soon; parts in progress are lost.

        Raises:
          BadInputError: a worker found bad input, with its message, or was killed.
          StoppedError: `stop` was set.
        """
        missing = sorted(set(names) - self.done())
        for marker in (_STOP, _REFUSED):
            self._store.delete(marker)
        if missing:
            options = pipeline_options(beam_flags, min(workers, len(missing)))
            job = _Job(functools.partial(_run, missing, make_part, self.url, options))
            with _quiet_workers():
                self._follow(job, names, report, stop)
            if self._store.exists(_REFUSED):
                raise BadInputError(json.loads(self._store.read(_REFUSED)))
            if stop.is_set():
                raise StoppedError("stopped; the same command goes on from here")
            job.raise_error()
        report(len(names), len(names))

    def _follow(
        self,
        job: "_Job",
        names: Sequence[str],
        report: Callable[[int, int], None],
        stop: threading.Event,
    ) -> None:
        """Runs a job to its end and reports its progress."""
        told = -1
        job.start()
        while not job.wait(_POLL_SECONDS):
            if job.killed_worker is not None:
                self._store.write(_STOP, b"")
                raise BadInputError(
                    f"expected workers to stay alive, but one was killed "
                    f"({job.killed_worker}), "
                    "perhaps out of memory; run the same command again, which "
                    "goes on from here, or use fewer --workers"
                )
            if stop.is_set():
                self._store.write(_STOP, b"")
            done = len(names) - len({*names} - self.done())
            if told < done < len(names):
                told = done
                report(done, len(names))


def pipeline_options(flags: Sequence[str], workers: int) -> PipelineOptions:
    """Returns Beam's options, with local processes unless the flags name a runner."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for group in PipelineOptions.__subclasses__():
        group._add_argparse_args(parser)  # pyright: ignore[reportArgumentType]
    _, unknown = parser.parse_known_args(list(flags))
    if unknown:
        raise BadInputError(
            f"expected options of realm prepare or of Apache Beam, got "
            f"{' '.join(unknown)}; see realm prepare --help"
        )
    if any(flag.partition("=")[0] == "--runner" for flag in flags):
        return PipelineOptions(list(flags))
    mode = "multi_processing" if workers > 1 else "in_memory"
    return PipelineOptions(
        [
            *flags,
            "--runner=DirectRunner",
            f"--direct_num_workers={workers}",
            f"--direct_running_mode={mode}",
            "--default_sdk_harness_log_level=CRITICAL",
        ]
    )


def _run(
    names: Sequence[str], make_part: MakePart, url: str, options: PipelineOptions
) -> None:
    with beam.Pipeline(options=options) as pipeline:
        _ = (
            pipeline
            | "parts" >> beam.Create(names)
            # Distributes parts; fused with the step before, one worker would get all.
            | "spread" >> beam.Reshuffle()
            | "make" >> beam.ParDo(_Make(make_part, url))
        )


class _Make(beam.DoFn):
    """Makes a part if it is missing, and records bad input in the scratch folder."""

    def __init__(self, make_part: MakePart, url: str):
        self._make_part = make_part
        self._url = url

    def process(self, element: str) -> Iterator[str]:
        store, parts = open_store(self._url), Parts(self._url)

        def check() -> None:
            if store.exists(_STOP):
                raise StoppedError("stopped")

        try:
            check()
            if not store.exists(f"{_DONE}/{element}"):
                parts.write(element, self._make_part(element, check))
        except StoppedError:
            return
        except BadInputError as error:
            # Beam would wrap it in a traceback of its own.
            store.write(_REFUSED, json.dumps(str(error)).encode())
            store.write(_STOP, b"")
            return
        yield element


class _Job(threading.Thread):
    """Runs a function in a thread, so that the main thread can handle signals.

    Processes that it starts inherit its signal mask: Ctrl-C in a terminal only reaches
    the main thread, which asks them to end.

    Attributes:
      killed_worker: Beam's message on a worker process that was killed, or None. Beam
        raises it in a thread of its own, and then waits for that process forever.
    """

    def __init__(self, function: Callable[[], None]):
        super().__init__(daemon=True)
        self.killed_worker: str | None = None
        self._function = function
        self._error: BaseException | None = None

    def run(self) -> None:
        before = threading.excepthook

        def note(hook: threading.ExceptHookArgs) -> None:
            if str(hook.exc_value).startswith(_BEAM_SAYS_KILLED):
                self.killed_worker = str(hook.exc_value)
            else:
                before(hook)

        threading.excepthook = note
        try:
            self._run()
        finally:
            threading.excepthook = before

    def _run(self) -> None:
        stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, stops)
        try:
            self._function()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds`, and returns whether the function has ended."""
        self.join(seconds)
        return not self.is_alive()

    def raise_error(self) -> None:
        """Raises the exception that the function raised, if any."""
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def _quiet_workers() -> Iterator[None]:
    """Suppresses the messages that workers log when they start and end.

    Workers inherit this process's standard error, and log to it before their log level
    is set. Errors in their work are returned through Beam.
    """
    sys.stderr.flush()
    screen = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(screen, 2)
            os.close(screen)


def default_workers() -> int:
    """Returns the number of cores available to this process."""
    return len(os.sched_getaffinity(0))
