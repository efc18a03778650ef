"""Being asked to stop, at whatever moment."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from realm_jax.cli.main import guard, main
from realm_jax.storage import UnavailableStoreError
from tests import tiny_run
from tests.waiting import PATIENCE

# A signal may come while the main thread, about to wait, holds the lock of the event.
_AT_THE_WORST_MOMENT = """
import os, signal, sys
from realm_jax.cli.main import guard

def command(stop):
    with stop._cond:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))  # Its handler runs here.
    sys.exit(0 if stop.wait(200) else "never asked")

guard(command)
"""


@pytest.fixture
def harmless():
    """A signal that nobody listens to does not end the tests."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.full
def test_a_signal_that_comes_amid_a_wait_is_heard():
    program = [sys.executable, "-c", _AT_THE_WORST_MOMENT]
    subprocess.run(program, check=True)


@pytest.mark.process("a handler is there")
@pytest.mark.usefixtures("harmless")
def test_a_command_that_was_asked_ends_with_the_code_of_the_signal():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):

        def command(stop, number=number):
            os.kill(os.getpid(), number)
            assert stop.wait(PATIENCE)

        assert guard(command) == 128 + number
        assert guard(lambda stop: 0) == 0


def test_a_bucket_that_stays_away_is_one_line_and_no_bug(capsys):
    def command(stop):
        raise UnavailableStoreError("gs://runs/my/lease/1.json: 503 busy")

    assert guard(command) == os.EX_TEMPFAIL
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "gs://runs/my/lease/1.json: 503 busy; run the same command again" in said


@pytest.mark.process("nobody listens to the signal")
@pytest.mark.usefixtures("harmless")
def test_a_hangup_is_ignored_where_it_was_before():
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def command(stop):
        # The kernel drops it, so there is nothing that might come later.
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGHUP)
        return int(stop.is_set())

    assert guard(command) == 0
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.full
def test_ctrl_c_is_the_ordinary_end_of_an_evaluation_that_follows(
    finished, tmp_path, capsys
):
    folder = str(tmp_path / "evaluate")
    arguments = tiny_run.arguments("evaluate", finished, MODEL_DIR=folder)

    def interrupt_when_measured():
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and "waiting" not in "".join(said):
            said.append(capsys.readouterr().out)
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    said: list[str] = []
    interrupt = threading.Thread(target=interrupt_when_measured)
    interrupt.start()
    assert main([*arguments, "--gin.FOLLOW=True"]) == 0
    interrupt.join()
    assert f"the report is in {folder}/report.html" in "".join(said)
    assert (tmp_path / "evaluate" / "report.html").exists()
