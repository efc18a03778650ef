"""A process that has imported what `realm` needs, and forks one command after another.

To import JAX takes seconds, and a soak starts a hundred processes. Each is a process
like any other: it begins JAX itself, and dies alone.

The trainer also writes down every index it loads, as it lies in memory, so that a test
need not believe what it says of itself (of several processes the first writes down its
rows). The file names time, process, step, attempt and the crc32c of the retriever.
"""

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tests import tiny_run

_MODULES = ("realm_jax.cli.pretrain", "realm_jax.cli.build_index")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A signal that a trainer sends to itself.

    Attributes:
      step: after so many updates (or more, if it began with more), before a checkpoint.
      signal: its number.
      delay_seconds: so much later, in the middle of whatever it does then.
      process: which of a job's processes does it.
    """

    step: int
    signal: int
    delay_seconds: float = 0.0
    process: int = 0


class ForkServer:
    """The other side of this module's process; a context manager."""

    def __init__(self, compiled: pathlib.Path):
        """Starts it; `compiled` holds the programs that all processes share."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=tiny_run.ROOT,
            # What is kept of every program is said in tests/conftest.py.
            env=tiny_run.environment() | {"JAX_COMPILATION_CACHE_DIR": str(compiled)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        self._codes: dict[int, int | None] = {}

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        # It ends its children, and then itself.
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(
        self,
        arguments: Sequence[str],
        log: pathlib.Path,
        loaded: pathlib.Path,
        told: Mapping[str, str] = MappingProxyType({}),
        fault: Fault | None = None,
    ) -> int:
        """Starts `realm …`, and returns its process id.

        What it says is added to `log`, and the indexes it loads are written below
        `loaded`. `told` is more of its environment, `fault` what it does to itself.
        """
        planned = None if fault is None else dataclasses.astuple(fault)
        files = [str(log), str(loaded)]
        return self._ask({"start": [list(arguments), *files, dict(told), planned]})

    def code(self, pid: int) -> int | None:
        """The exit code of a process, -9 if it was killed, None while it runs."""
        if self._codes.get(pid) is None:
            self._codes[pid] = self._ask({"code": pid})
        return self._codes[pid]

    def _ask(self, request: dict) -> int | None:
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


def _serve() -> None:
    from jax._src import xla_bridge

    for module in (*_MODULES, "realm_jax.training.pretrain", "google.cloud.storage"):
        importlib.import_module(module)
    # Devices and their threads would not survive a fork; nothing here has any.
    assert not xla_bridge.backends_are_initialized()
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    children = set()
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer = _fork(*request["start"])
            children.add(answer)
        else:
            pid, status = os.waitpid(request["code"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            children.discard(pid)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for child in children:
        os.kill(child, signal.SIGKILL)


def _fork(
    arguments: list[str],
    log: str,
    loaded: str,
    told: dict[str, str],
    fault: list | None,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((nothing, 0), (file, 1), (file, 2)):
            os.dup2(number, target)
        os.environ.update(told)
        from realm_jax.cli.main import main

        _watch(pathlib.Path(loaded))
        if fault is not None:
            _prepare(Fault(*fault))
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(fault: Fault) -> None:
    from realm_jax.training.loop import Loop

    save = Loop.save_if_due
    strike = functools.partial(os.kill, os.getpid(), fault.signal)
    struck = False

    def watched(self):
        nonlocal struck
        if self._stage.step >= fault.step and not struck:
            struck = True
            if fault.delay_seconds:
                threading.Timer(fault.delay_seconds, strike).start()
            else:
                strike()
        save(self)

    Loop.save_if_due = watched


def _watch(folder: pathlib.Path) -> None:
    import numpy as np

    from realm_jax import multihost
    from realm_jax.index.source import IndexSource

    load_manifest = IndexSource.load_manifest

    def watched(source, manifest):
        index = load_manifest(source, manifest)
        if not multihost.is_first():
            return index
        rows = multihost.local_rows(index.searcher.table.rows)[: manifest.count]
        crc = manifest.metadata["retriever_crc32c"]
        facts = [time.time_ns(), os.getpid(), manifest.step, manifest.attempt, crc]
        name = "-".join(map(str, facts))
        with (folder / f".{name}").open("wb") as file:
            np.save(file, rows)
        (folder / f".{name}").rename(folder / f"{name}.npy")
        return index

    IndexSource.load_manifest = watched


if __name__ == "__main__":
    _serve()
