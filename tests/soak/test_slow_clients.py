"""Hundreds of slow and abandoned connections to a server process, and honest questions.

SOAK_CLIENT_SEED chooses where each of them stops.
"""

import contextlib
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time

import pytest

from tests import tiny_run

SEED = int(os.environ.get("SOAK_CLIENT_SEED", "0"))
_BOUND_SECONDS = 10.0

SERVER = """
import sys
from tests.evaluation.test_server import Server

served = Server()
print(served.port, flush=True)
sys.stdin.read()
served.close()
"""

REQUEST = (
    b"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 21\r\n\r\n{"question": "who? "}'
)


@pytest.fixture
def port():
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=tiny_run.ROOT,
        env=tiny_run.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield int(process.stdout.readline())
        process.stdin.close()
        assert process.wait() == 0


def ask(port, question):
    """Returns the seconds that an honest question took."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        body = json.dumps({"question": question})
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/answer", body, headers)
        response = connection.getresponse()
        assert response.status == 200
        assert json.loads(response.read())["question"] == question
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("count", "questions", "times"),
    [
        pytest.param(100, 5, 1, marks=pytest.mark.full),
        pytest.param(600, 40, 5, marks=pytest.mark.soak),
    ],
)
def test_slow_and_abandoned_clients(port, count, questions, times):
    for _ in range(times):
        check_clients(port, count, questions)


def check_clients(port, count, questions):
    rng = random.Random(SEED)
    seconds = []
    with contextlib.ExitStack() as stack:
        for number in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            one.sendall(REQUEST[: rng.randrange(len(REQUEST) + 1)])
            if rng.random() < 0.3:
                one.close()
            if number % (count // questions) == 0:
                seconds.append(ask(port, f"who {number}?"))
    seconds.append(ask(port, "who at last?"))
    assert max(seconds) < _BOUND_SECONDS, seconds
