"""The rules of the gate are found to be broken where they are, and only there."""

import textwrap

import pytest

from tests import tiers


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(
        textwrap.dedent(
            """
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
        )
    )
    return path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tests/test_some.py::test_by_a_fixture", ["tiny_run.start in line 7"]),
        ("tests/test_some.py::test_by_a_helper", ["time.sleep in line 14"]),
        (
            "tests/test_some.py::TestAll::test_in_a_class",
            ["subprocess.run in line 24"],
        ),
        ("tests/test_some.py::test_without", []),
    ],
)
def test_a_call_is_found_through_fixtures_and_helpers(file, name, found):
    assert tiers.faults(file, name) == found
