"""The program that the documentation names shows what a run has written."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from realm_jax.training.tensorboard import EventFile
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.full

_PROGRAM = pathlib.Path(sys.executable).with_name("tensorboard")
_READY_SECONDS = 240


@pytest.fixture
def server(tmp_path):
    """The address of `tensorboard --logdir MODEL_DIR`, of a run with two lines."""
    events = EventFile(str(tmp_path / "run"), "pretrain", 0)
    events.write(10, {"loss": 3.5, "recall_at_5": 0.25})
    events.write(20, {"loss": 2.25})
    said = tmp_path / "said.txt"
    words = [_PROGRAM, "--logdir", tmp_path / "run", "--port", "0"]
    with said.open("w") as output:
        process = subprocess.Popen(
            list(map(str, words)),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        )
    try:
        yield _address(process, said)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


def _address(process, said):
    def found():
        return re.search(r"http://\S+:\d+/", said.read_text())

    wait_until(lambda: found() or process.poll() is not None, _READY_SECONDS)
    assert found(), said.read_text()
    return found()[0]


def scalars(server, tag):
    """Steps and values as the page asks for them, once the run is loaded."""
    query = f"data/plugin/scalars/scalars?run=tensorboard%2Fpretrain&tag={tag}"
    found = []

    def answers():
        try:
            with urllib.request.urlopen(server + query, timeout=PATIENCE) as answer:
                found.extend((step, value) for _, step, value in json.load(answer))
        except urllib.error.HTTPError as error:
            # Until the run has been read, there is none of this name.
            if error.code not in (400, 404):
                raise
            return False
        return True

    wait_until(answers, _READY_SECONDS)
    return found


@pytest.mark.full
def test_the_program_serves_the_scalars_of_a_model_directory(server):
    assert scalars(server, "loss") == [(10, 3.5), (20, 2.25)]
    assert scalars(server, "recall_at_5") == [(10, 0.25)]
