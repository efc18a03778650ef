"""`python -m tpu_launch status`: shows a run live, from its model directory alone.

Give it the flags of `up`, or --gin.MODEL_DIR=gs://my-bucket/my/pretrain alone. It
shows trainer and builder, step, loss, age of the index, attempts and costs so far,
until the run is over or Ctrl-C, which ends the view but not the run. Where the output
is not a terminal it prints them once.

Exit code 1: the model directory does not answer (--once).
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from realm_jax.cli import configuration
from realm_jax.errors import BadInputError, StoppedError
from realm_jax.storage import Store, UnavailableStoreError, open_store
from tpu_launch.cancellation import unless_stopped
from tpu_launch.watching.cached_store import CachedStore
from tpu_launch.watching.run_status import RunStatus, find_run, read_status
from tpu_launch.watching.status_table import as_json, render

UNAVAILABLE = 1

# Polling a bucket takes several requests.
_FOLDER_SECONDS, _BUCKET_SECONDS = 5.0, 15.0
_LOCAL_SECONDS = 1.0
_LINE_SECONDS = 30.0
_STOPPED = "stopped looking; the run goes on"


def main(argv: Sequence[str], stop: threading.Event) -> int:
    """Runs the command; returns 0, or 1 where the model directory does not answer.

    Raises:
      BadInputError: no MODEL_DIR is given, or no run was launched there.
      StoppedError: `stop` was set.
    """
    parser = configuration.make_parser("python -m tpu_launch status", __doc__)
    parser.add_argument("--once", action="store_true", help="print it and end")
    parser.add_argument(
        "--json", action="store_true", help="once, as one object in plain units"
    )
    flags, model_dir = configuration.parse_for_macro(parser, argv, "MODEL_DIR")
    console = Console()
    store = open_store(model_dir)
    try:
        run = unless_stopped(lambda: find_run(store), stop, _STOPPED)
        looked_at = CachedStore(store, f"launch/{run}")
        if not (flags.once or flags.json) and console.is_terminal:
            return _watch(looked_at, run, stop, console)
        status = unless_stopped(lambda: _look(looked_at, run), stop, _STOPPED)
    except UnavailableStoreError as error:
        print(f"error: the model directory does not answer: {error}", file=sys.stderr)
        return UNAVAILABLE
    if flags.json:
        print(as_json(status))
    else:
        console.print(render(status))
    return 0


def pause_seconds(store: Store) -> float:
    """Returns the interval for polling a store, in seconds."""
    is_bucket = store.url().startswith("gs://")
    return _BUCKET_SECONDS if is_bucket else _FOLDER_SECONDS


class LiveView(contextlib.ExitStack):
    """Context manager that shows a local run's status.

    A terminal has a table that is kept up to date, anything else a line every half a
    minute.
    """

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
        seconds, show = _LINE_SECONDS, self._print
        if self._console.is_terminal:
            # Transient, because the outcome is printed in words at the end.
            live = Live(console=self._console, auto_refresh=False, transient=True)
            self.enter_context(live)
            seconds = _LOCAL_SECONDS

            def show(status: RunStatus) -> None:
                live.update(render(status), refresh=True)

        arguments = (seconds, show)
        thread = threading.Thread(target=self._watch, args=arguments, daemon=True)
        thread.start()
        self.callback(thread.join)
        self.callback(self._ended.set)
        return self

    def _watch(self, seconds: float, show: Callable[[RunStatus], None]) -> None:
        while not self._ended.wait(seconds):
            with contextlib.suppress(BadInputError, UnavailableStoreError):
                self._store.look()
                show(read_status(self._store, self._run, time.time()))

    def _print(self, status: RunStatus) -> None:
        text = in_one_line(status)
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def in_one_line(status: RunStatus) -> str:
    """Returns how far trainer and builder are, for a log."""
    parts = []
    if status.step is not None and status.step >= 0:
        total = "" if status.total_steps is None else f"/{status.total_steps:,}"
        parts.append(f"step {status.step:,}{total}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.index_step is not None:
        parts.append(f"index @{status.index_step}")
    for role in status.roles:
        doing = role.activity or role.state.value
        share = "" if role.share is None else f" {role.share:.0%}"
        parts.append(f"{role.name} {doing}{share}")
    return "  ".join(parts) or "starting"


def _watch(
    store: CachedStore, run: str, stop: threading.Event, console: Console
) -> int:
    """Shows the status of a run until it is over."""
    seconds = pause_seconds(store)
    hint = f"every {seconds:.0f} s; Ctrl-C ends the view, not the run"
    shown: RenderableType = Text("looking ...", style="dim")
    with Live(shown, console=console, auto_refresh=False) as live:
        while True:
            try:
                status = unless_stopped(lambda: _look(store, run), stop, _STOPPED)
            except UnavailableStoreError as error:
                problem = f"the model directory does not answer: {error}"
                live.update(Group(shown, _line(problem, "bold red")), refresh=True)
            else:
                shown = render(status)
                is_over = status.is_over
                under = [] if is_over else ["", _line(hint, "dim")]
                live.update(Group(shown, *under), refresh=True)
                if is_over:
                    return 0
            if stop.wait(seconds):
                raise StoppedError(_STOPPED)


def _look(store: CachedStore, run: str) -> RunStatus:
    store.look()
    return read_status(store, run, time.time())


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
