import pytest

from realm_jax.storage import open_store


@pytest.fixture(params=["local", "gs"])
def model_store(request, tmp_path):
    """An empty model directory, in a folder and in a bucket."""
    if request.param == "local":
        return open_store(tmp_path / "model")
    return open_store(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")
