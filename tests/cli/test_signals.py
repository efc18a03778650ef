"""Being asked to stop, at whatever moment."""

import os
import signal
import subprocess
import sys

import pytest

from realm_jax.cli.main import guard

# A signal may come while the main thread, about to wait, holds the lock of the event.
_AT_THE_WORST_MOMENT = """
import os, signal, sys
from realm_jax.cli.main import guard

def command(stop):
    with stop._cond:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))  # Its handler runs here.
    sys.exit(0 if stop.wait(10) else "never asked")

guard(command)
"""


def test_a_signal_that_comes_amid_a_wait_is_heard():
    program = [sys.executable, "-c", _AT_THE_WORST_MOMENT]
    subprocess.run(program, check=True, timeout=30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_was_asked_ends_with_the_code_of_the_signal(number):
    def command(stop):
        os.kill(os.getpid(), number)
        assert stop.wait(10)

    assert guard(command) == 128 + number
    assert guard(lambda stop: 0) == 0
