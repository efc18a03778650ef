import pytest

from tests import tiny_world
from tests.soak.fork_server import ForkServer
from tests.soak.jobs import WORLD


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return tiny_world.make(tmp_path_factory.mktemp("world"), WORLD)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def fork_server(compiled):
    with ForkServer(compiled) as started:
        yield started
