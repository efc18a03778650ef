"""Manages the scratch folder for the parts of a corpus, and the workers' settings."""

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from realm_jax import ranges
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.storage import Store, open_store

if TYPE_CHECKING:
    from realm_jax.prepare.beam_parts import MakePart

Report = Callable[[str, int, int | None], None]
"""Progress callback: (kind of output, number done, total number or None)."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """Settings of the workers, on which the output does not depend.

    Attributes:
      count: processes on this machine; 0 for one per core, and for a single one where
        examples are made of few blocks.
      beam_flags: options of Apache Beam, such as --runner=DataflowRunner.
      max_bad_lines: largest number of damaged records that are left out.
    """

    count: int = 0
    beam_flags: Sequence[str] = ()
    max_bad_lines: int = 0

    def __post_init__(self):
        ranges.require_ranges(
            self,
            count=ranges.whole(0)._replace(advice="correct --workers"),
            max_bad_lines=ranges.whole(0)._replace(advice="correct --max_bad_lines"),
        )


ALL_CORES = Workers()
"""One process per core of this machine, where there is work for them."""


@contextlib.contextmanager
def only_writer(corpus: str) -> Iterator[None]:
    """Keeps other processes from making the same corpus meanwhile.

    They would delete each other's parts, and the corpus. The lock is a file beside the
    corpus, which the kernel lets go of however the process ends.
    """
    path = pathlib.Path(corpus)
    lock = path.with_name(f"{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = _hold(lock)
    if held is None:
        raise BadInputError(
            f"expected no other process to prepare {corpus}, but one is at work; wait "
            "for its end, stop it, or choose another folder"
        )
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(held)


def _hold(lock: pathlib.Path) -> int | None:
    """Returns a descriptor of the lock file; None if another process holds it."""
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        # The last holder may have removed the file that was opened here.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(lock), os.fstat(file)):
                return file
        os.close(file)


class Scratch:
    """A folder exclusive to one corpus, removed with its content in the end."""

    def __init__(self, corpus: str, root: str = ""):
        """Determines the folder, without creating it.

        Args:
          root: parent of the folder, local or on gs://; "" places it beside the corpus.
        """
        path = pathlib.Path(corpus)
        self.url = str(path.with_name(f"{path.name}.parts"))
        if root:
            whose = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
            self.url = f"{root.rstrip('/')}/{path.name}-{whose}.parts"

    def folder(self, name: str) -> str:
        """Returns the address of a subfolder."""
        return f"{self.url}/{name}"

    def store(self) -> Store:
        """Opens the folder as a store."""
        return open_store(self.url)

    def clear(self) -> None:
        """Removes the folder and its content."""
        store = self.store()
        for name in store.list():
            store.delete(name)
        # On a disk, empty folders remain.
        shutil.rmtree(self.url, ignore_errors=True)

    def make_parts(
        self,
        folder: str,
        names: Sequence[str],
        make_part: "MakePart",
        *,
        what: str,
        report: Report,
        stop: threading.Event,
        workers: Workers,
    ) -> Callable[[str], bytes]:
        """Makes the missing parts; see `beam_parts.Parts.make`.

        Returns a function that reads a part by its name, and makes a damaged one anew.
        """
        # Beam takes seconds to import, and a complete corpus does not need it. It warns
        # about missing Google Cloud clients, which are not needed.
        logging.disable(logging.WARNING)
        try:
            from realm_jax.prepare.beam_parts import Parts, default_workers
        finally:
            logging.disable(logging.NOTSET)

        parts = Parts(self.folder(folder))
        parts.make(
            names,
            make_part,
            workers=workers.count or default_workers(),
            beam_flags=workers.beam_flags,
            report=lambda done, total: report(what, done, total),
            stop=stop,
        )

        def read_or_make(name: str) -> bytes:
            part = parts.read(name)
            if part is None:
                part = make_part(name, check_of(stop))
                parts.write(name, part)
            return part

        return read_or_make


def check_of(stop: threading.Event) -> Callable[[], None]:
    """Returns a function that raises `StoppedError` once `stop` is set."""

    def check() -> None:
        if stop.is_set():
            raise StoppedError("stopped; the same command goes on from here")

    return check
