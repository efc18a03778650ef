"""A finished chain to launch again, and a service that has slices."""

import pytest
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuRestTransport

from tests import compiled, tiny_run
from tests.tpu_launch.fake_tpu import World, served
from tpu_launch.backends.api import ApiBackend


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished chain; read only."""
    return tiny_run.finished(tmp_path_factory)


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    """Programs for TPUs are measured as they are, and run nowhere."""
    with compiled.as_it_comes():
        yield


@pytest.fixture
def world():
    """A service of Cloud TPU, its clock and its workers."""
    return World()


@pytest.fixture
def backend(world):
    """The real client library, which speaks to that service."""
    with served(world) as address:
        host = address.removeprefix("http://").rstrip("/")
        transport = TpuRestTransport(
            host=host, url_scheme="http", credentials=AnonymousCredentials()
        )
        yield ApiBackend("p", tpu_v2.TpuClient(transport=transport))
