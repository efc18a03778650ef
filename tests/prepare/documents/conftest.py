"""What tests of sources share."""

import pickle

import pytest

from tests import json_lines


@pytest.fixture
def write_lines(tmp_path):
    """Writes objects as JSON lines, packed as the name says; returns the path."""
    return lambda name, objects: json_lines.write_lines(tmp_path / name, objects)


@pytest.fixture(scope="session")
def read_shards():
    """Returns the records of each shard, as a worker reads them that was sent it."""

    def read(source):
        shards = pickle.loads(pickle.dumps(source.shards()))
        copy = pickle.loads(pickle.dumps(source))
        return [list(copy.read(shard)) for shard in shards]

    return read
