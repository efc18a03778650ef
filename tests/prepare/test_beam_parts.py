"""Parts made by Beam: in any order, by any number of processes, whole or not at all."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import threading
import time

import pytest

from realm_jax.errors import BadInputError, StoppedError
from realm_jax.prepare.beam_parts import Parts, pipeline_options
from tests.refused import refused

NAMES = [f"{i:02d}" for i in range(7)]


@dataclasses.dataclass(frozen=True)
class Squares:
    """Makes the square of a name; leaves a trace of who made what."""

    traces: str
    refused: str = ""
    slow: float = 0.0

    def __call__(self, name, check):
        path = pathlib.Path(self.traces) / f"{name}-{os.getpid()}-{time.monotonic_ns()}"
        path.touch()
        if name == self.refused:
            raise BadInputError(f"expected anything but {name}")
        until = time.monotonic() + self.slow
        while time.monotonic() < until:
            check()
            threading.Event().wait(0.01)
        return str(int(name) ** 2).encode()


def make(parts, make_part, *, names=NAMES, workers=1, report=None, stop=None):
    stop = stop or threading.Event()
    report = report or (lambda *_: None)
    parts.make(names, make_part, workers=workers, report=report, stop=stop)


@pytest.fixture
def parts(tmp_path):
    return Parts(str(tmp_path / "parts"))


@pytest.fixture
def squares(tmp_path):
    (tmp_path / "traces").mkdir()
    return Squares(str(tmp_path / "traces"))


def made(squares):
    """Who made which part."""
    return [path.name.split("-")[:2] for path in pathlib.Path(squares.traces).iterdir()]


def contents(parts):
    return {name: int(parts.read(name)) for name in parts.done()}


def test_every_part_is_made_once_and_told_of(parts, squares):
    make(parts, squares, names=NAMES[:3])
    with refused("^expected anything but 04$"):
        make(parts, dataclasses.replace(squares, refused="04"), names=NAMES[4:5])
    # Once it is mended, nothing of the refusal is left.
    told = []
    make(parts, squares, report=lambda *line: told.append(line))
    assert contents(parts) == {name: int(name) ** 2 for name in NAMES}
    assert sorted(name for name, _ in made(squares)) == sorted([*NAMES, "04"])
    assert told[-1] == (7, 7)
    assert told == sorted(set(told))


@pytest.mark.full
def test_processes_share_the_work_and_make_the_same(parts, squares):
    make(parts, dataclasses.replace(squares, slow=0.5), workers=2)
    assert contents(parts) == {name: int(name) ** 2 for name in NAMES}
    workers = {process for _, process in made(squares)}
    assert len(workers) == 2
    assert str(os.getpid()) not in workers


def test_a_bug_of_a_worker_keeps_its_traceback(parts, squares):
    with pytest.raises(Exception, match="invalid literal"):
        make(parts, squares, names=["no number"])


# Beam's threads end on the connection that broke.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_worker_is_named_and_the_next_run_goes_on(parts, squares):
    def kill_one():
        while len(made(squares)) < 3:
            time.sleep(0.05)
        os.kill(int(made(squares)[-1][1]), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    with refused(r"one was killed .*code 137"):
        make(parts, dataclasses.replace(squares, slow=2.0), workers=2)
    killer.join()
    assert len(parts.done()) < 7
    make(parts, squares)
    assert contents(parts) == {name: int(name) ** 2 for name in NAMES}


@pytest.mark.full
def test_a_stop_ends_soon_and_what_is_done_stays(parts, squares):
    stop = threading.Event()

    def report(done, total):
        if done >= 2:
            stop.set()

    with pytest.raises(StoppedError, match="goes on from here"):
        make(parts, dataclasses.replace(squares, slow=0.5), report=report, stop=stop)
    done = parts.done()
    assert 2 <= len(done) < 7
    make(parts, squares)
    again = [name for name, _ in made(squares)]
    assert all(again.count(name) == 1 for name in done)


def test_beam_refuses_what_it_does_not_know():
    with refused(r"--chunk_lenght=3; see realm prepare"):
        pipeline_options(["--chunk_lenght=3"], 1)
    flags = ["--runner=DataflowRunner", "--region=europe-west4"]
    with contextlib.suppress(ImportError):  # Its options need Google's clients.
        options = pipeline_options(flags, 1).get_all_options()
        assert options["runner"] == "DataflowRunner"
