"""Models that were published."""

import pytest

from tests.weights.published_models import unpacked


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The folder of small models that `transformers` wrote; read only."""
    return unpacked(tmp_path_factory.mktemp("published"))
