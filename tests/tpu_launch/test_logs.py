"""`logs`: what workers wrote, whole and once, from ends of it that overlap."""

import io
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rich.console import Console

from realm_jax.errors import StoppedError
from realm_jax.storage import UnavailableStoreError, open_store
from tpu_launch import __main__ as tpu_launch
from tpu_launch import worker_state
from tpu_launch.attempts import Attempts
from tpu_launch.job import BUILDER, TRAINER
from tpu_launch.watching import logs as logs_command
from tpu_launch.watching import status
from tpu_launch.watching.cached_store import CachedStore
from tpu_launch.watching.logs import MISSING, Logs, Tail, Wanted, overlap
from tpu_launch.worker import reporter
from tpu_launch.worker_state import Done, State, WorkerState, attempt_folder

RUN = "realm-123456"
NOW = 1_000_000.0


# Of a log whose lines differ, seen time and again.


@given(texts=st.lists(st.text(max_size=8), max_size=40), data=st.data())
def test_lines_that_are_seen_in_time_are_seen_once(texts, data):
    """By the real writer, of 256 bytes instead of KiB."""
    lines = [
        f"{number} {''.join(text.splitlines())}" for number, text in enumerate(texts)
    ]
    stream = "".join(f"{line}\n" for line in lines).encode()
    tail, seen = Tail(), []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reporter, "_TAIL_BYTES", 256)
        log = Path(folder, "0.log")
        while stream:
            # At least a line, which has some 40 bytes at most, is seen twice.
            length = data.draw(st.integers(1, 150))
            with log.open("ab") as file:
                file.write(stream[:length])
            stream = stream[length:]
            seen += tail.see(reporter.bounded_tail(log))
    assert seen == lines
    assert tail.rest() == []


@given(stream=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200)))
def test_of_a_log_that_grows_no_byte_is_lost(stream, cuts):
    """Whatever it holds: lines that repeat, and none at all."""
    tail, seen = Tail(), []
    for cut in [*sorted(cuts), len(stream)]:
        seen += tail.see(stream[:cut])
    *whole, last = stream.split(b"\n")
    assert seen == [line.rstrip(b"\r").decode(errors="replace") for line in whole]
    rest = last.rstrip(b"\r").decode(errors="replace")
    assert tail.rest() == ([rest] if last else [])


@given(
    lines=st.lists(st.text("ab1", max_size=4), unique=True, min_size=2, max_size=20),
    data=st.data(),
)
def test_the_overlap_is_that_of_a_slow_twin(lines, data):
    """Where lines differ, and ends begin with one."""
    stream = "".join(f"{line}\n" for line in lines).encode()
    starts = [0, *(i + 1 for i, byte in enumerate(stream[:-1]) if byte == 10)]
    first, second = sorted(
        data.draw(st.tuples(st.sampled_from(starts), st.sampled_from(starts)))
    )
    end = data.draw(st.integers(first, len(stream)))
    # A line of which only the beginning was seen may look like another one's.
    assume(end >= second or stream[:end].endswith(b"\n"))
    last, new = stream[first:end], stream[second:]
    # Where both stand in the stream says how much they share.
    assert overlap(last, new) == max(0, end - second)


def test_a_line_that_ends_like_another_is_not_taken_for_it():
    assert overlap(b"11\n1", b"1\n1x\n") == 1


def test_what_was_not_seen_is_said():
    tail = Tail()
    assert tail.see(b"a\nb\nc") == ["a", "b"]
    assert tail.see(b"x\ny") == ["c", MISSING, "x"]
    assert tail.see(b"x\ny\n") == ["y"]
    # The machine booted, and its log begins anew.
    assert tail.see(b"") == []
    assert tail.see(b"z\n") == ["z"]


# Of a run.


def write_log(store, role, attempt, worker, text):
    name = f"{attempt_folder(RUN, role, attempt)}/{worker}.log"
    store.write(name, text.encode())


def speak(store, role, attempt, worker, state=State.RUNNING):
    word = WorkerState(state, NOW)
    worker_state.write_worker(store, RUN, role, attempt, worker, word)


@pytest.fixture
def store(tmp_path):
    """A trainer in its second attempt, of two workers, and a builder of one."""
    store = open_store(tmp_path)
    attempts = Attempts(store, RUN, NOW)
    first = attempts.begin(TRAINER, NOW, 1.0)
    write_log(store, TRAINER, 1, 0, "before\n")
    attempts.end(TRAINER, first, NOW, "preempted")
    attempts.begin(TRAINER, NOW, 1.0)
    attempts.begin(BUILDER, NOW, 1.0)
    write_log(store, TRAINER, 2, 0, "one\ntwo\nthr")
    write_log(store, TRAINER, 2, 1, "uno\n")
    write_log(store, BUILDER, 1, 0, "embedding\n")
    return store


@pytest.fixture
def said(capsys):
    """Runs the command; returns its exit code, and what it printed."""

    def run(store, *arguments):
        line = ["logs", f'--gin.MODEL_DIR="{store.url()}"', *arguments]
        code = tpu_launch.main(line)
        out, err = capsys.readouterr()
        return code, out.splitlines(), " ".join(err.split())

    return run


ALL = ["trainer/0 | one", "trainer/0 | two", "trainer/1 | uno", "builder/0 | embedding"]
CHOSEN = {
    (): [*ALL, "trainer/0 | thr"],
    ("--role=trainer",): [*ALL[:3], "trainer/0 | thr"],
    ("--role=builder",): ALL[3:],
    ("--worker=1",): ALL[2:3],
    ("--worker=0", "--role=trainer"): [*ALL[:2], "trainer/0 | thr"],
    ("--attempt=1",): ["trainer/0 | before", "builder/0 | embedding"],
    ("--attempt=1", "--role=trainer"): ["trainer/0 | before"],
}


@pytest.mark.parametrize("arguments", CHOSEN)
def test_what_was_asked_for_is_printed(store, said, arguments):
    assert said(store, *arguments) == (0, CHOSEN[arguments], "")


def test_logs_in_a_bucket(bucket, said):
    store = open_store(f"{bucket}/logged")
    Attempts(store, RUN, NOW).begin(TRAINER, NOW, 1.0)
    write_log(store, TRAINER, 1, 0, "one\n")
    assert said(store) == (0, ["trainer/0 | one"], "")


def test_colours_are_for_terminals(store, said, monkeypatch):
    def terminal():
        return Console(file=io.StringIO(), force_terminal=True, color_system="standard")

    monkeypatch.setattr(logs_command, "Console", terminal)
    _, lines, _ = said(store, "--worker=1")
    [line] = lines
    assert line.startswith("\x1b[")
    assert line.endswith("\x1b[0muno")


BAD_LINES = {
    "--role=reader": "invalid choice: 'reader'",
    "--worker=2": "expected a worker of 0, 1, got 2",
    "--worker=-1": "expected a worker of 0, 1, got -1",
    "--worker=first": "invalid int value: 'first'",
    "--attempt=3": "expected an attempt of 1, 2, got 3",
    "--attempt=0": "expected an attempt of 1, 2, got 0",
}


@pytest.mark.parametrize("argument", BAD_LINES)
@pytest.mark.parametrize("more", [(), ("--follow",)])
def test_bad_input_is_one_line(store, said, argument, more):
    code, out, err = said(store, argument, *more)
    assert (code, out) == (2, [])
    assert BAD_LINES[argument] in err


def test_a_run_without_that_role_or_none_at_all(tmp_path, said):
    store = open_store(tmp_path)
    code, _, err = said(store)
    assert code == 2
    assert "expected a launched run in" in err
    Attempts(store, RUN, NOW).begin(TRAINER, NOW, 1.0)
    assert said(store) == (0, [], "")
    code, _, err = said(store, "--role=builder")
    assert code == 2
    assert f"expected a role that {RUN} has, got builder" in err


def look(logs, now=NOW):
    return [f"{who} {line}" for who, line in logs.look(now)]


def following(store, **wanted):
    return Logs(CachedStore(store, f"launch/{RUN}"), RUN, Wanted(**wanted))


def test_what_is_new_is_followed_over_attempts(store):
    logs = following(store, roles=(TRAINER,))
    assert look(logs) == ["trainer/0 one", "trainer/0 two", "trainer/1 uno"]
    assert look(logs) == []
    write_log(store, TRAINER, 2, 0, "two\nthree\nfo")
    assert look(logs) == ["trainer/0 three"]
    # What came last of the old attempt is not lost over the new one.
    write_log(store, TRAINER, 2, 1, "uno\ndos\n")
    attempts = Attempts(store, RUN, NOW)
    attempts.end(TRAINER, attempts.unended(TRAINER), NOW, "preempted")
    assert attempts.begin(TRAINER, NOW, 1.0).number == 3
    write_log(store, TRAINER, 3, 0, "five\n")
    assert look(logs) == [
        "trainer/1 dos",
        "trainer/0 [attempt 3]",
        "trainer/0 five",
        "trainer/0 fo",
    ]
    write_log(store, TRAINER, 2, 1, "uno\ndos\ntoo late\n")
    write_log(store, TRAINER, 3, 1, "seis\n")
    assert look(logs) == ["trainer/1 [attempt 3]", "trainer/1 seis"]
    assert not logs.is_over


def test_an_attempt_that_was_asked_for_is_over_with_the_next(store):
    logs = following(store, roles=(TRAINER,), attempt=2)
    look(logs)
    assert not logs.is_over
    Attempts(store, RUN, NOW).begin(TRAINER, NOW, 1.0)
    write_log(store, TRAINER, 3, 0, "five\n")
    assert look(logs) == []
    assert logs.is_over
    assert logs.rests() == [("trainer/0", "thr")]


def test_logs_are_over_when_all_have_said_their_last_words(store):
    logs = following(store)
    worker_state.mark_done(store, RUN, TRAINER, Done(NOW, 2, 100))
    speak(store, TRAINER, 2, 0, State.DONE)
    speak(store, TRAINER, 2, 1)
    speak(store, BUILDER, 1, 0)
    look(logs)
    worker_state.mark_done(store, RUN, BUILDER, Done(NOW, 1, 100))
    speak(store, BUILDER, 1, 0, State.DONE)
    look(logs)
    assert not logs.is_over
    speak(store, TRAINER, 2, 1, State.DONE)
    look(logs)
    assert not logs.is_over
    # It comes after the word.
    write_log(store, TRAINER, 2, 1, "uno\nadios\n")
    assert look(logs) == ["trainer/1 adios"]
    assert logs.is_over


def test_workers_that_went_before_they_could_say_so_are_not_waited_for(store):
    logs = following(store, roles=(TRAINER,))
    worker_state.mark_done(store, RUN, TRAINER, Done(NOW, 2, 100))
    speak(store, TRAINER, 2, 0)
    look(logs, NOW)
    look(logs, NOW + 90)
    assert not logs.is_over
    look(logs, NOW + 91)
    assert logs.is_over


def test_logs_are_over_with_their_launcher(store):
    logs = following(store)
    look(logs)
    assert not logs.is_over
    Attempts(store, RUN, NOW).close(NOW, "given up")
    look(logs)
    assert logs.is_over


class Flaky:
    """A store that fails at some reads, and counts them."""

    def __init__(self, store):
        self.store, self.reads, self.failing = store, [], ""

    def __getattr__(self, name):
        return getattr(self.store, name)

    def read(self, name):
        self.reads.append(name)
        if self.failing and name.endswith(self.failing):
            raise UnavailableStoreError("503")
        return self.store.read(name)


def test_no_line_is_lost_to_a_store_that_goes_away(store):
    flaky = Flaky(store)
    logs = following(flaky)
    flaky.failing = "trainer/002/1.log"
    with pytest.raises(UnavailableStoreError):
        look(logs)
    flaky.failing = ""
    assert look(logs) == [line.replace(" |", "") for line in ALL]
    assert look(logs) == []


def test_what_has_not_changed_is_not_read_again(store):
    write_log(store, TRAINER, 2, 0, "x" * 100_000 + "\n")
    flaky = Flaky(store)
    logs = following(flaky)
    look(logs)
    flaky.reads.clear()
    write_log(store, TRAINER, 2, 1, "uno\ndos\n")
    assert look(logs) == ["trainer/1 dos"]
    assert flaky.reads == [f"launch/{RUN}/trainer/002/1.log"]


def test_following_as_it_is_typed_until_the_run_is_over(
    store, said, monkeypatch, capsys
):
    monkeypatch.setattr(status, "_FOLDER_SECONDS", 0.01)
    flaky = Flaky(store)
    monkeypatch.setattr(logs_command, "open_store", lambda url: flaky)
    printed, away, pause = [], [], logs_command.Logs.look

    def look_and_go_on(logs, now):
        """Between two looks, what a run would do meanwhile."""
        try:
            found = pause(logs, now)
        except UnavailableStoreError:
            away.append(now)
            if len(away) == 2:
                flaky.failing = ""
            raise
        printed.append(found)
        if len(printed) == 1:
            write_log(store, TRAINER, 2, 0, "one\ntwo\nthree\nfour")
        if len(printed) == 2:
            Attempts(store, RUN, NOW).close(NOW, "given up")
            flaky.failing = "-ended.json"
        return found

    monkeypatch.setattr(logs_command.Logs, "look", look_and_go_on)
    code, out, err = said(store, "-f")
    assert len(away) == 2
    assert (code, out) == (0, [*ALL, "trainer/0 | three", "trainer/0 | four"])
    assert "error" not in err


def test_ctrl_c_ends_following(store, monkeypatch):
    stop = threading.Event()

    def interrupt(logs, now):
        stop.set()
        return []

    monkeypatch.setattr(logs_command.Logs, "look", interrupt)
    line = [f'--gin.MODEL_DIR="{store.url()}"', "--follow"]
    with pytest.raises(StoppedError, match=r"^stopped reading; the run goes on$"):
        logs_command.main(line, stop)


def test_a_directory_that_is_away_is_one_line(store, said, monkeypatch):
    flaky = Flaky(store)
    monkeypatch.setattr(logs_command, "open_store", lambda url: flaky)
    flaky.failing = ".log"
    code, out, err = said(store)
    assert (code, out) == (1, [])
    assert err == "error: the model directory does not answer: 503"


@pytest.mark.full
def test_a_reader_that_has_seen_enough_is_no_error(store):
    """The program itself, as in `logs | head`."""
    write_log(store, TRAINER, 2, 0, "".join(f"{n}\n" for n in range(30_000)))
    line = [sys.executable, "-m", "tpu_launch", "logs"]
    process = subprocess.Popen(
        [*line, f'--gin.MODEL_DIR="{store.url()}"'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "trainer/0 | 0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0
