"""What tests of sources share."""

import bz2
import gzip
import json
import pickle

import pytest


@pytest.fixture
def write_lines(tmp_path):
    """Writes objects as JSON lines, packed as the name says; returns the path."""

    def write(name, objects):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{json.dumps(x, ensure_ascii=False)}\n" for x in objects)
        packers = {".gz": gzip.compress, ".bz2": bz2.compress}
        path.write_bytes(packers.get(path.suffix, bytes)(lines.encode()))
        return str(path)

    return write


@pytest.fixture(scope="session")
def read_shards():
    """Returns the records of each shard, as a worker reads them that was sent it."""

    def read(source):
        shards = pickle.loads(pickle.dumps(source.shards()))
        copy = pickle.loads(pickle.dumps(source))
        return [list(copy.read(shard)) for shard in shards]

    return read
