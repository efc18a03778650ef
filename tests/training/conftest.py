import pytest

from tests import tiny_world


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return tiny_world.make(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles(compiled):
    with tiny_world.quick_compiles(compiled):
        yield
