"""Shows the status of a local run at the bottom of the launcher's terminal."""

import contextlib
import threading
import time

from rich.console import Console
from rich.live import Live

from realm_jax.errors import BadInputError
from realm_jax.storage import Store, UnavailableStoreError
from tpu_launch.watching.cached_store import CachedStore
from tpu_launch.watching.run_status import read_status
from tpu_launch.watching.status_table import render

_LOOK_SECONDS = 1.0


class LiveView(contextlib.ExitStack):
    """Context manager that shows a run's status, if the output is a terminal."""

    def __init__(self, store: Store, run: str, console: Console):
        """Prepares to show a run.

        Args:
          store: the model directory.
          run: id of the run.
          console: the console that also prints other messages, above the view.
        """
        super().__init__()
        self._store, self._run = CachedStore(store, f"launch/{run}"), run
        self._console = console
        self._ended = threading.Event()

    def __enter__(self) -> "LiveView":
        super().__enter__()
        if self._console.is_terminal:
            # Transient, because the outcome is printed in words at the end.
            live = Live(console=self._console, auto_refresh=False, transient=True)
            self.enter_context(live)
            thread = threading.Thread(target=self._show, args=(live,), daemon=True)
            thread.start()
            self.callback(thread.join)
            self.callback(self._ended.set)
        return self

    def _show(self, live: Live) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            with contextlib.suppress(BadInputError, UnavailableStoreError):
                self._store.look()
                status = read_status(self._store, self._run, time.time())
                live.update(render(status), refresh=True)
