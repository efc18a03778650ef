"""Files of PyTorch are read as PyTorch reads them, and nothing in them is run."""

import io
import os
import pickle
import shutil
import zipfile

import numpy as np
import pytest

from realm_jax.weights.stored import DamagedWeightsError
from realm_jax.weights.tensors import read_tensors, torch_tensors
from tests.refused import refused


@pytest.fixture
def files(models):
    return models / "torch_files"


@pytest.mark.parametrize("name", ["new", "old"])
def test_tensors_are_those_that_were_saved(name, files):
    expected = np.load(files / "expected.npz")
    tensors = torch_tensors(files / f"{name}.bin")
    assert set(tensors) == set(expected.files)
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(np.asarray(tensor, np.float32), expected[key])
    assert np.asarray(tensors["half"]).dtype == np.float16
    for key in ("whole", "transposed"):
        rows = np.asarray(tensors[key].rows(1, 3))
        np.testing.assert_array_equal(rows, expected[key][1:3])


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def replaced(files, target, data):
    """A copy of new.bin whose pickle is another one."""
    with (
        zipfile.ZipFile(files / "new.bin") as source,
        zipfile.ZipFile(target, "w") as copy,
    ):
        for info in source.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            copy.writestr(info, data if is_pickle else source.read(info))


PICKLES = {
    "of other operations": pickle.dumps({"a": 1.5}, 2),
    "of a newer protocol": pickle.dumps({"a": "b"}, 4),
    "with a great string": b"\x80\x02X\xff\xff\xff\x7fab.",
    "of no dictionary": b"\x80\x02].",
    "of no tensor": b"\x80\x02}X\x01\x00\x00\x00aK\x01s.",
    "that ends": b"\x80\x02}",
    "empty": b"",
    "that calls a storage": b"\x80\x02ctorch\nFloatStorage\n)R.",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_other_pickles_are_refused(kind, files, tmp_path):
    replaced(files, tmp_path / "pytorch_model.bin", PICKLES[kind])
    with refused("expected weights in .*pytorch_model.bin, but they cannot be read"):
        read_tensors(tmp_path)


def test_a_great_memo_takes_no_more_than_what_is_in_it(files, tmp_path):
    replaced(files, tmp_path / "memo.bin", b"\x80\x02}r\xff\xff\xff\x7f.")
    assert torch_tensors(tmp_path / "memo.bin") == {}


@pytest.mark.parametrize("is_new", [True, False])
def test_code_in_a_pickle_is_not_run(is_new, files, tmp_path):
    data = pickle.dumps({"a": Evil(tmp_path / "ran")}, 2)
    path = tmp_path / "pytorch_model.bin"
    if is_new:
        replaced(files, path, data)
    else:
        path.write_bytes(data)
    with refused("posix.system"):
        read_tensors(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["new", "old"])
def test_damage_is_refused_or_leaves_the_shapes(name, files, tmp_path):
    """Whatever bytes: one line, and never more than the file has."""
    whole = (files / f"{name}.bin").read_bytes()
    path = tmp_path / "pytorch_model.bin"
    rng = np.random.default_rng(0)
    for size in (0, 1, 4, 30, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedWeightsError):
            torch_tensors(path)
    for _ in range(150):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 3):
            data[place] = rng.integers(256)
        path.write_bytes(data)
        try:
            for tensor in torch_tensors(path).values():
                assert np.asarray(tensor).nbytes <= 2 * len(whole)
        except DamagedWeightsError:
            pass


def with_shape(shape, strides, begin=0):
    """A pickle of one tensor in the first storage of new.bin."""

    class Tensor:
        def __reduce__(self):
            return _rebuild, (storage, begin, shape, strides, False, None)

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return ("storage", FLOAT, "0", "cpu", 24) if obj is storage else None

    storage = object()
    data = io.BytesIO()
    Pickler(data, 2).dump({"a": Tensor()})
    here = __name__.encode()
    return (
        data.getvalue()
        .replace(b"c" + here + b"\n_rebuild\n", b"ctorch._utils\n_rebuild_tensor_v2\n")
        .replace(b"c" + here + b"\nFLOAT\n", b"ctorch\nFloatStorage\n")
    )


def _rebuild():
    """Stands for PyTorch's function in a pickle."""


def FLOAT():
    """Stands for PyTorch's class in a pickle."""


@pytest.mark.parametrize(
    ("shape", "strides", "begin"),
    [
        ((1 << 40, 1 << 20), (1 << 20, 1), 0),
        ((1 << 40,), (0,), 0),
        ((4, 6), (0, 1), 0),
        ((4, 6), (-6, 1), 0),
        ((-4, 6), (6, 1), 0),
        ((4, 6), (6,), 0),
        ((4, 6), (6, 1), 1),
        ((4, 6), (6, 1), -1),
        ((1 << 62, 1 << 62), (1, 1), 0),
    ],
)
def test_sizes_that_the_file_has_not_are_refused(
    shape, strides, begin, files, tmp_path
):
    path = tmp_path / "pytorch_model.bin"
    replaced(files, path, with_shape((4, 6), (6, 1)))
    assert np.asarray(torch_tensors(path)["a"]).shape == (4, 6)
    replaced(files, path, with_shape(shape, strides, begin))
    with pytest.raises(DamagedWeightsError):
        torch_tensors(path)


def test_files_of_an_index_are_those_beside_it(files, tmp_path):
    index = tmp_path / "pytorch_model.bin.index.json"
    shutil.copy(files / "new.bin", tmp_path / "part-1.bin")
    index.write_text('{"weight_map": {"whole": "part-1.bin"}}')
    assert read_tensors(tmp_path)["whole"].shape == (4, 6)
    for name in ("../part-1.bin", f"{tmp_path}/part-1.bin", "a/part-1.bin", "..", ""):
        index.write_text(f'{{"weight_map": {{"whole": "{name}"}}}}')
        with refused("expected weights in"):
            read_tensors(tmp_path)
    index.write_text('{"weight_map": ["part-1.bin"]}')
    with refused("expected weights in"):
        read_tensors(tmp_path)
