"""Writes a JAX profile of ten steps for TensorBoard.

    MODEL_DIR/profile/plugins/profile/<stage>-step-<first>/<process>-<host>.xplane.pb

Every process writes its own file; files in one folder are shown as one run.
"""

import logging
import pathlib
import tempfile
from types import TracebackType

import jax

from realm_jax import multihost
from realm_jax.storage import Store
from realm_jax.training.state import TrainState
from realm_jax.training.step_timing import Stopwatch

FOLDER = "profile"
NUM_STEPS = 10
# The first steps compile, and fill the queue of dispatched work.
_SKIPPED_STEPS = 10

LOG = logging.getLogger(__name__)
"""Logs, at level INFO, where a profile is and how to view it."""


class Profiler:
    """Profiles steps 11 to 20 of a loop, or the last ones; a context manager."""

    def __init__(
        self,
        store: Store,
        stage: str,
        first_step: int,
        total_steps: int,
        stopwatch: Stopwatch,
    ):
        left = total_steps - first_step
        count = min(NUM_STEPS, max(left - 1, 1))
        self._begin = first_step + min(_SKIPPED_STEPS, left - count)
        self._end = self._begin + count
        self._store = store
        self._stage = stage
        self._stopwatch = stopwatch
        self._done = first_step
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Profiler":
        if self._done == self._begin:
            self._start()
        return self

    def __call__(self, step: int, state: TrainState) -> None:
        """Starts or ends the profile, if it is time; called after each update."""
        self._done = step
        if step == self._begin:
            self._stopwatch.wait_for(state)
            self._start()
        elif step == self._end:
            self._stopwatch.wait_for(state)
            self._finish()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._folder is not None and kind is None:
            self._finish()
        elif self._folder is not None:
            with self._folder:
                jax.profiler.stop_trace()
        elif self._done < self._begin and kind is None and multihost.is_first():
            LOG.info(
                "no profile: training ended after step %d, before those that were to "
                "be profiled (%d to %d)",
                self._done,
                self._begin + 1,
                self._end,
            )

    def _start(self) -> None:
        # The profiler cannot write to buckets: it writes here, then files are copied.
        self._folder = tempfile.TemporaryDirectory()
        jax.profiler.start_trace(self._folder.name)

    def _finish(self) -> None:
        assert self._folder is not None
        with self._folder as folder:
            self._folder = None
            jax.profiler.stop_trace()
            run = f"{FOLDER}/plugins/profile/{self._stage}-step-{self._begin + 1}"
            for path in pathlib.Path(folder).rglob("*"):
                if path.is_file():
                    name = f"{run}/{multihost.number()}-{path.name}"
                    self._store.write(name, path.read_bytes())
        if multihost.is_first():
            where = self._store.url(FOLDER)
            LOG.info(
                "steps %d to %d are profiled in %s; pip install xprof, and "
                "`xprof --logdir %s` shows them",
                self._begin + 1,
                self._done,
                where,
                where,
            )
