"""Where the parts of a corpus lie until all are there, and who makes them."""

import dataclasses
import hashlib
import logging
import pathlib
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from realm_jax.storage import Store, open_store

if TYPE_CHECKING:
    from realm_jax.prepare.beam_parts import MakePart, Parts

Report = Callable[[str, int, int | None], None]
"""Called with (what is being made, how many are done, how many there are)."""


@dataclasses.dataclass(frozen=True)
class Workers:
    """Who does the work; nothing that is made depends on it.

    Attributes:
      count: processes on this machine; 0 for one a core.
      beam_flags: options of Apache Beam, such as --runner=DataflowRunner.
      max_bad_lines: damaged records to leave out before giving up.
    """

    count: int = 0
    beam_flags: Sequence[str] = ()
    max_bad_lines: int = 0


ALL_CORES = Workers()
"""Processes on this machine, one a core."""


class Scratch:
    """A folder of one corpus alone: in the end it is removed with all in it.

    Attributes:
      url: where it is.
    """

    def __init__(self, corpus: str, root: str = ""):
        """Names the folder.

        Args:
          corpus: the corpus to be made.
          root: where it gets its folder, perhaps on gs://; "" is beside the corpus.
        """
        path = pathlib.Path(corpus)
        self.url = str(path.with_name(f"{path.name}.parts"))
        if root:
            whose = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
            self.url = f"{root.rstrip('/')}/{path.name}-{whose}.parts"

    def folder(self, name: str) -> str:
        """Returns where a folder in it is."""
        return f"{self.url}/{name}"

    def store(self) -> Store:
        """Returns it as a store."""
        return open_store(self.url)

    def clear(self) -> None:
        """Removes all that is in it."""
        store = self.store()
        for name in store.list():
            store.delete(name)
        # On a disk folders outlive what was in them.
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
    ) -> "Parts":
        """Makes the parts that are missing, see `beam_parts.Parts.make`.

        Raises:
          BadInputError: a worker met bad input, or was killed.
          StoppedError: asked to stop; what is done stays.
        """
        # Beam takes seconds to import; a corpus that is complete does not need it. It
        # warns of clients for Google Cloud that are not there, and not needed.
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
        return parts
