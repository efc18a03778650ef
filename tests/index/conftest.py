import pytest

from realm_jax.storage import open_store
from tests.gcs_emulator import emulated_bucket


@pytest.fixture(scope="session")
def bucket(tmp_path_factory):
    with emulated_bucket(tmp_path_factory.mktemp("gcs"), "index-tests") as url:
        yield url


@pytest.fixture(params=["local", "gs"])
def model_store(request, tmp_path):
    """An empty model directory, in a folder and in a bucket."""
    if request.param == "local":
        return open_store(tmp_path / "model")
    return open_store(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")
