"""The rules of the gate are found to be broken where they are, and only there."""

from tests import tiers

SOME = """
import os, subprocess, time
from tests import tiny_run

class Server:
    def __init__(self):
        self.process = tiny_run.start(["x"])

@pytest.fixture
def server():
    yield Server()

def pause():
    time.sleep(1)

def test_by_a_fixture(server):
    pass

def test_by_a_helper():
    pause()

class TestAll:
    def test_in_a_class(self):
        subprocess.run(["ls"])

def test_without():
    os.getpid()
"""


def test_a_call_is_found_through_fixtures_and_helpers(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(SOME)
    for name, found in {
        "test_by_a_fixture": ["tiny_run.start in line 7"],
        "test_by_a_helper": ["time.sleep in line 14"],
        "TestAll::test_in_a_class": ["subprocess.run in line 24"],
        "test_without": [],
    }.items():
        assert tiers.faults(path, f"tests/test_some.py::{name}") == found
