"""Files that are not what they seem are refused in one line; nothing is run or made."""

import json
import os
import pickle
import shutil
import struct
import tracemalloc

import numpy as np
import pytest

HUGE = 1 << 40


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def with_header(header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def one(shape, offsets, dtype="F32"):
    record = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return with_header({"realm.pooler.dense.bias": record}, bytes(64))


def cut_at(size):
    def spoil(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:size])

    return spoil


def as_safetensors(data):
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def as_code(folder):
    (folder / "model.safetensors").unlink()
    code = pickle.dumps(Evil(folder.parent / "ran"), 2)
    (folder / "pytorch_model.bin").write_bytes(code)


def absurd_config(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"vocab_size": 1 << 31}
    path.write_text(json.dumps(config))


def as_flax(folder):
    (folder / "model.safetensors").unlink()
    (folder / "flax_model.msgpack").write_bytes(b"\xdf\xff\xff\xff\xff")


HOSTILE = {
    "truncated": cut_at(-1),
    "truncated within its header": cut_at(100),
    "of another kind": as_safetensors(b"PK\3\4" + bytes(60)),
    "empty": as_safetensors(b""),
    "with a long header": as_safetensors(struct.pack("<Q", HUGE) + b"{}"),
    "with a deep header": as_safetensors(with_header(b"[" * 100_000)),
    "without records": as_safetensors(with_header([1])),
    "of an absurd shape": as_safetensors(one([HUGE, HUGE], [0, 64])),
    "of a negative shape": as_safetensors(one([-16], [0, 64])),
    "of sizes that are none": as_safetensors(one([1.5], [0, 6])),
    "beyond its end": as_safetensors(one([HUGE], [0, 4 * HUGE])),
    "before its begin": as_safetensors(one([16], [-64, 0])),
    "of another size": as_safetensors(one([15], [0, 64])),
    "of an unknown dtype": as_safetensors(one([16], [0, 64], "F8")),
    "that run code": as_code,
    "of an absurd vocabulary": absurd_config,
    "of Flax without an end": as_flax,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_weights_are_refused(kind, models, tmp_path, refuse):
    folder = tmp_path / "model"
    shutil.copytree(models / "encoder", folder)
    HOSTILE[kind](folder)
    tracemalloc.start()
    try:
        refuse(["import-weights", folder, tmp_path / "made"], "expected")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "ran").exists()


def test_blocks_are_not_unpickled(models, tmp_path, refuse):
    folder = tmp_path / "model"
    shutil.copytree(models / "openqa", folder)
    blocks = np.array([Evil(tmp_path / "ran")] * 12, dtype=object)
    np.save(folder / "block_records.npy", blocks, allow_pickle=True)
    corpus = tmp_path / "corpus"
    words = ["import-weights", folder, tmp_path / "made", f"--corpus={corpus}"]
    refuse(words, "not only texts")
    assert not (tmp_path / "ran").exists()
    assert not corpus.exists()
