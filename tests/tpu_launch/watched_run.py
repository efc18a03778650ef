"""A run as its launcher, workers and jobs have written it, to be looked at."""

import io

from rich.console import Console

from realm_jax.index.heartbeat import Heartbeat
from realm_jax.metrics.metrics_file import MetricsFile
from realm_jax.storage import UnavailableStoreError, open_store
from tpu_launch import worker_state
from tpu_launch.attempts import Attempts
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.watching.run_status import read_status
from tpu_launch.watching.status_table import render
from tpu_launch.worker_state import State, WorkerState

RUN = "realm-123456"
HOUR = 3600.0
# When the launcher took the run, and when it is looked at.
BEGAN, NOW = 1_000_000.0, 1_000_000.0 + 10 * HOUR


def written(store, url):
    """A run in its second attempt of the trainer, the builder's slice in the queue."""
    attempts = Attempts(store, RUN, BEGAN, total_steps=2000)
    first = attempts.begin(TRAINER, BEGAN, 100.0, "EUR")
    attempts.note_slices(TRAINER, first, "WAITING_FOR_RESOURCES", BEGAN)
    attempts.activate(TRAINER, first, BEGAN + HOUR)
    attempts.note_slices(TRAINER, first, "ACTIVE", BEGAN + HOUR)
    attempts.end(TRAINER, first, BEGAN + 3 * HOUR, "SUSPENDED: preempted")
    second = attempts.begin(TRAINER, BEGAN + 4 * HOUR, 100.0, "EUR")
    attempts.activate(TRAINER, second, BEGAN + 5 * HOUR)
    attempts.note_slices(TRAINER, second, "ACTIVE", BEGAN + 5 * HOUR)
    builder = attempts.begin(BUILDER, BEGAN, 10.0, "EUR")
    attempts.note_slices(BUILDER, builder, "WAITING_FOR_RESOURCES", NOW - 720)
    speak(store, TRAINER, 2, 0, State.RUNNING, NOW - 5, 1010)
    speak(store, TRAINER, 2, 1, State.RUNNING, NOW - 40)
    Heartbeat(store, "trainer").beat(1020, index_step=900, kept_index_steps=[])
    metrics = MetricsFile(url, "pretrain", 0)
    metrics.write(1000, {"loss": 5.0, "index_step": 900})
    metrics.write(
        1010,
        {
            "loss": 4.25,
            "retrieval_utility": 0.125,
            "steps_per_second": 0.5,
            "examples_per_second": 256.0,
            "index_step": 900,
            "index_age_steps": 110,
            "index_age_seconds": 220.0,
        },
    )
    return attempts


def speak(store, role, attempt, worker, state, time, step=-1, **more):
    word = WorkerState(state, time, step, **more)
    worker_state.write_worker(store, RUN, role, attempt, worker, word)


def make(folder):
    """The store of a model directory that holds the run."""
    store = open_store(folder)
    written(store, str(folder))
    return store


def role(store, name, now=NOW):
    return next(one for one in read_status(store, RUN, now).roles if one.name == name)


def text(renderable, width=80):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(renderable)
    return console.file.getvalue()


def shown(store, width=80):
    return text(render(read_status(store, RUN, NOW)), width)


class AwayStore:
    """A store that is away when told so, and counts what is read."""

    def __init__(self, store):
        self.store, self.is_away, self.reads = store, False, []

    def __getattr__(self, name):
        if self.is_away:
            raise UnavailableStoreError("gs://bucket: 503")
        if name == "read":
            return self._read
        return getattr(self.store, name)

    def _read(self, name):
        self.reads.append(name)
        return self.store.read(name)
