"""A finished chain that commands can be run on."""

import pytest

from tests import tiny_run
from tests.seqio_fixtures import registry

__all__ = ["registry"]


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished chain; read only."""
    return tiny_run.finished(tmp_path_factory)
