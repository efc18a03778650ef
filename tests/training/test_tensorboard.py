"""The program that the documentation names shows what a run has written."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from realm_jax.training.tensorboard import EventFile

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
        process.wait(30)


def _address(process, said):
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"http://\S+:\d+/", said.read_text()):
            return found[0]
        time.sleep(0.1)
    pytest.fail(said.read_text())


def scalars(server, tag):
    """Steps and values as the page asks for them; empty until the run is loaded."""
    query = f"data/plugin/scalars/scalars?run=tensorboard%2Fpretrain&tag={tag}"
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(server + query, timeout=30) as answer:
                return [(step, value) for _, step, value in json.load(answer)]
        except urllib.error.HTTPError as error:
            # Until the run has been read, there is none of this name.
            if error.code not in (400, 404):
                raise
            time.sleep(0.2)
    return []


def test_the_program_serves_the_scalars_of_a_model_directory(server):
    assert scalars(server, "loss") == [(10, 3.5), (20, 2.25)]
    assert scalars(server, "recall_at_5") == [(10, 0.25)]
