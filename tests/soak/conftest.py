import pytest

from tests.soak import jobs
from tests.soak.fork_server import ForkServer


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return jobs.make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def fork_server(compiled):
    with ForkServer(compiled) as started:
        yield started
