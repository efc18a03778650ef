"""Programs as they come, and a service that has slices."""

import pytest

from tests import compiled
from tests.tpu_launch.fake_tpu import World
from tests.tpu_launch.serving import served
from tpu_launch import __main__ as tpu_launch


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    """Programs for TPUs are measured as they are, and run nowhere."""
    with compiled.as_it_comes():
        yield


@pytest.fixture
def planner_cache(tmp_path, monkeypatch):
    """The folder where figures of compiled programs are kept, empty."""
    folder = tmp_path / "cache" / "planner"
    monkeypatch.setattr("tpu_launch.planner.memory._KEPT", folder)
    return folder


@pytest.fixture
def launcher(capsys):
    """Runs a command that ends with a code; returns its output and its errors."""

    def run(*arguments, code=0):
        ended = tpu_launch.main(arguments)
        out, err = capsys.readouterr()
        assert ended == code, err
        return out, err

    return run


@pytest.fixture
def world(monkeypatch):
    """A service of Cloud TPU, which the real client library finds."""
    world = World()
    monkeypatch.setattr("tpu_launch.up._DELETING_SECONDS", 0.0)
    with world.served(monkeypatch):
        yield world


@pytest.fixture
def metadata():
    """Attributes of a machine; "host" is where they are served."""
    attributes = {}

    def answer(request, body):
        folder, _, name = request.path.rpartition("/")
        if request.headers["Metadata-Flavor"] != "Google":
            return 403, ""
        if folder == "/computeMetadata/v1/instance/attributes" and name in attributes:
            return 200, attributes[name]
        return 404, "not found"

    with served(answer) as attributes["host"]:
        yield attributes
