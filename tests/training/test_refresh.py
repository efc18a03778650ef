import itertools
import json
import types

import numpy as np
import pytest

from realm_jax.errors import NotReadyError, StoppedError
from realm_jax.index.source import Staleness
from realm_jax.training.refresh import (
    Refresher,
    RefreshMode,
    StalenessBound,
    WhenStale,
)
from tests.refused import refused


class Index:
    """Stands for a loaded index of a step."""

    def __init__(self, step):
        self.manifest = types.SimpleNamespace(step=step)

    def staleness(self, step):
        return Staleness(steps=step - self.manifest.step, seconds=1.5)


class RecordingClient:
    """Answers like the model directory, and writes down what it was asked.

    Attributes:
      in_use: step of the index that was said to be in use.
      on_disk: steps of the indexes that are there.
      arrivals: steps of those that come, by how often it was looked before.
      waits: what each wait ends with: a step, or an error; after these the step of what
        was published last.
    """

    def __init__(self, on_disk=(), arrivals=(), waits=()):
        self.calls, self.looks = [], itertools.count()
        self.on_disk, self.arrivals, self.waits = on_disk, dict(arrivals), [*waits]

    def use(self, index_step):
        self.in_use = index_step

    def build(self, step, params):
        self.calls.append(("build", step, params))
        return Index(step)

    def load(self, step):
        self.calls.append(("load", step))
        return Index(step) if step in self.on_disk else None

    def forget_after(self, step):
        self.calls.append(("forget_after", step))

    def publish(self, step, params):
        self.calls.append(("publish", step, params))

    def follow(self, newer_than):
        self.calls.append(("follow", newer_than))

    def wait(self, seconds):
        published = [call[1] for call in self.calls if call[0] == "publish"]
        self.calls.append(("wait", seconds))
        end = self.waits.pop(0) if self.waits else published[-1]
        if isinstance(end, Exception):
            raise end
        return Index(end)

    def has_newer(self):
        """Whether one is committed that has not been loaded yet."""
        return bool(self.waits)

    def take(self):
        arrived = self.arrivals.get(next(self.looks))
        return None if arrived is None else Index(arrived)


def refresher_of(client, mode="rolling", period=3, **others):
    return Refresher(RefreshMode(mode), period, client, wait_seconds=9.0, **others)


def run(mode, client, *, first=0, last=7, saved=None, period=3, bound=None):
    """Returns the index step that each update searched, and the swaps."""
    refresher = refresher_of(client, mode, period, bound=bound)
    refresher.start(first, f"p{first}", saved)
    swaps, used = [(first, client.in_use)], []
    for step in range(first, last):
        used.append(refresher.before_step(step, f"p{step}").manifest.step)
        if client.in_use != swaps[-1][1]:
            swaps.append((step, client.in_use))
    return used, swaps, refresher


def test_off_keeps_the_first_index():
    client = RecordingClient()
    used, swaps, refresher = run("off", client)
    assert used == [0] * 7
    assert swaps == [(0, 0)]
    assert refresher.num_swaps == 0
    assert client.calls == [("forget_after", 0), ("build", 0, "p0")]


def test_blocking_builds_of_the_very_parameters_that_search_next():
    client = RecordingClient()
    used, swaps, refresher = run("blocking", client)
    assert used == [0, 0, 0, 3, 3, 3, 6]
    assert swaps == [(0, 0), (3, 3), (6, 6)]
    assert refresher.num_swaps == 2
    builds = [call for call in client.calls if call[0] == "build"]
    assert builds == [("build", 0, "p0"), ("build", 3, "p3"), ("build", 6, "p6")]


def test_async_publishes_and_takes_what_comes_without_building():
    client = RecordingClient(arrivals={5: 3})
    used, swaps, refresher = run("async", client)
    assert used == [0, 0, 0, 0, 0, 3, 3]
    assert swaps == [(0, 0), (5, 3)]
    assert refresher.num_swaps == 1
    began = [("forget_after", 0), ("publish", 0, "p0"), ("follow", -1), ("wait", 9.0)]
    assert client.calls == [*began, ("publish", 3, "p3"), ("publish", 6, "p6")]
    ages = {"index_age_steps": 3, "index_age_seconds": 1.5}
    assert refresher.staleness(6) == {"index_step": 3, **ages}


def test_a_resumed_run_searches_the_index_of_its_checkpoint():
    for mode in ("off", "blocking", "async"):
        client = RecordingClient(on_disk={3})
        used, swaps, refresher = run(mode, client, first=4, last=6, saved=3)
        assert used == [3, 3]
        assert swaps == [(4, 3)]
        assert refresher.num_swaps == 0
        # Later steps are forgotten before anything is loaded or followed.
        expected = [("forget_after", 4), ("load", 3)]
        assert client.calls == expected + [("follow", 3)] * (mode == "async")


def test_a_lost_index_is_made_anew_and_that_is_said(caplog):
    built, published = [("build", 4, "p4")], [("publish", 4, "p4"), ("follow", -1)]
    published.append(("wait", 9.0))
    for mode, instead in (("off", built), ("blocking", built), ("async", published)):
        client = RecordingClient()
        run(mode, client, first=4, last=5, saved=3)
        assert client.calls == [("forget_after", 4), ("load", 3), *instead]
    assert caplog.text.count("index 3 of the checkpoint is gone") == 3


def test_resumed_where_a_refresh_is_due_it_is_not_skipped():
    used, _, _ = run("blocking", RecordingClient(on_disk={3}), first=6, last=8, saved=3)
    assert used == [6, 6]


def rolled(embedded, step, num_devices, period=3):
    """One slice of each device's rows is embedded again after `step` updates."""
    for rows in np.split(embedded, num_devices):
        count = -(-len(rows) // period)
        start = min(step % period * count, len(rows) - count)
        rows[start : start + count] = step


def rolling(num_devices, client=None):
    return refresher_of(client or RecordingClient(), slices=(num_devices, 3))


@pytest.mark.parametrize("resumes", [{4: 1}, {5: 4, 6: 2}, {3: 4, 8: 1}], ids=str)
def test_no_row_is_older_than_rolling_says_on_whatever_devices_it_goes_on(resumes):
    embedded = np.zeros(12, int)
    refresher, num_devices, changed = rolling(1), 1, -9
    refresher.start(0, "p0", None)
    for step in range(14):
        if step in resumes:
            saved = json.loads(json.dumps(refresher.details()))
            changed = step if resumes[step] != num_devices else changed
            num_devices = resumes[step]
            refresher = rolling(num_devices)
            refresher.adopt(step, Index(0), saved)
        rolled(embedded, step, num_devices)
        said = refresher.staleness(step + 1)["index_age_steps"]
        oldest = step + 1 - embedded.min()
        assert oldest <= said <= 9
        if step + 1 >= changed + 3:
            assert said == oldest


def test_rolling_from_an_index_of_a_checkpoint_is_as_old_as_that_for_a_period():
    refresher = rolling(1, RecordingClient(on_disk={3}))
    refresher.start(5, "p5", 3)
    ages = [refresher.staleness(step)["index_age_steps"] for step in range(6, 10)]
    assert ages == [3, 4, 3, 3]


def test_beyond_the_bound_the_trainer_waits_for_what_it_published_last():
    client = RecordingClient()
    used, swaps, refresher = run("async", client, last=9, bound=StalenessBound(4))
    # At 4 the index of 0 is too old, and 3 is the newest retriever; at 7 so is that.
    assert used == [0, 0, 0, 0, 3, 3, 3, 6, 6]
    assert swaps == [(0, 0), (4, 3), (7, 6)]
    assert refresher.num_swaps == 2
    assert refresher.failure is None


def test_beyond_the_bound_it_warns_once_an_index(caplog):
    bound = StalenessBound(3, WhenStale.WARN)
    used, _, _ = run("async", RecordingClient(arrivals={5: 3}), bound=bound)
    assert used == [0, 0, 0, 0, 0, 3, 3]
    warnings = [line for line in caplog.messages if "as old as it may be" in line]
    assert [line.split(" steps old")[0][-1] for line in warnings] == ["3", "3"]
    assert "index of step 0" in warnings[0]
    assert "index of step 3" in warnings[1]


def test_beyond_the_bound_it_stops_and_says_why_later():
    bound = StalenessBound(5, WhenStale.STOP)
    refresher = refresher_of(RecordingClient(), "async", bound=bound)
    refresher.start(0, "p0", None)
    for step in range(5):
        refresher.before_step(step, f"p{step}")
    with pytest.raises(StoppedError):
        refresher.before_step(5, "p5")
    assert "expected a newer index in time, but the index of step 0" in str(
        refresher.failure
    )
    # The builder is late; a supervisor starts the trainer again.
    assert isinstance(refresher.failure, NotReadyError)


def test_started_again_it_takes_what_was_committed_meanwhile_before_it_stops_anew():
    """The newer index is committed, and not loaded yet."""
    bound = StalenessBound(5, WhenStale.STOP)
    client = RecordingClient(on_disk={0}, waits=[3])
    used, swaps, _ = run("async", client, first=5, last=8, saved=0, bound=bound)
    assert used == [3, 3, 3]
    assert swaps == [(5, 0), (5, 3)]


def test_waiting_in_vain_stops_too():
    gone = NotReadyError("expected an index; the builder is gone")
    with pytest.raises(StoppedError, match="builder is gone"):
        run("async", RecordingClient(waits=[0, gone]), bound=StalenessBound(3))


def test_a_period_or_bound_that_cannot_be_is_refused():
    with refused("REFRESH_PERIOD"):
        run("blocking", RecordingClient(), period=0)
    with refused(r"at least REFRESH_PERIOD \(3\), got 2"):
        run("async", RecordingClient(), bound=StalenessBound(2))
    for mode in ("off", "blocking", "rolling"):  # They use none.
        refresher_of(RecordingClient(), mode, period=3, bound=StalenessBound(2))
