import errno
import json

import google_crc32c
import numpy as np
import pytest

from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.features import SENTENCE_ID
from realm_jax.manifests import unseal
from tests.flipped import flip
from tests.refused import refused


def make_batch(first, count):
    rows = np.arange(first, first + count)
    return {
        "ids": (rows[:, None] * 10 + np.arange(3)).astype(np.int32),
        "weight": rows.astype(np.float32) / 2,
        "answers": np.broadcast_to(rows[:, None, None], (count, 2, 4)).astype(np.int32),
    }


@pytest.fixture
def examples(tmp_path):
    batches = [make_batch(0, 5), make_batch(5, 0), make_batch(5, 6)]
    return write_examples(tmp_path / "set", batches, {"task": "t", "split": "train"})


def test_reads_what_was_written(examples):
    expected = make_batch(0, 11)
    assert len(examples) == 11
    assert examples.metadata == {"task": "t", "split": "train"}
    assert examples.features.keys() == expected.keys()
    rows = np.array([10, 0, 3, 3])
    for name, array in examples.batch(rows).items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name][rows])
        # Any reader of npy files understands them.
        read = np.load(examples.directory / f"{name}.npy", allow_pickle=False)
        np.testing.assert_array_equal(read, expected[name])
    # Here they are mapped, not read.
    mapped = examples.features["ids"]
    while mapped.base is not None and not isinstance(mapped, np.memmap):
        mapped = mapped.base
    assert isinstance(mapped, np.memmap)


def test_same_examples_same_bytes(tmp_path):
    one = write_examples(tmp_path / "one", [make_batch(0, 7)], {"seed": 1})
    parts = [make_batch(0, 2), make_batch(2, 5)]
    two = write_examples(tmp_path / "two", parts, {"seed": 1})
    names = sorted(path.name for path in one.directory.iterdir())
    assert names == ["answers.npy", "examples.json", "ids.npy", "weight.npy"]
    for name in names:
        first, second = one.directory / name, two.directory / name
        assert first.read_bytes() == second.read_bytes()


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def batches(error):
        yield make_batch(0, 3)
        raise error

    with pytest.raises(KeyboardInterrupt):
        write_examples(tmp_path / "set", batches(KeyboardInterrupt), {})
    with refused("disk is full"):
        full = OSError(errno.ENOSPC, "No space left on device")
        write_examples(tmp_path / "set", batches(full), {})
    for none in ([], [make_batch(0, 0)]):
        with refused("got none"):
            write_examples(tmp_path / "set", none, {})
    for change in (
        {"ids": np.zeros((2, 4), np.int32)},
        {"ids": np.zeros((2, 3), np.int64)},
        {"ids": np.zeros((1, 3), np.int32)},
        {"other": np.zeros(2)},
    ):
        with refused("expected batches of the features ids"):
            parts = [make_batch(0, 3), make_batch(3, 2) | change]
            write_examples(tmp_path / "set", parts, {})
    for ids in (np.zeros(3), np.zeros((3, 2), np.int64)):
        with refused("expected one integer as the feature"):
            batch = make_batch(0, 3) | {SENTENCE_ID: ids}
            write_examples(tmp_path / "set", [batch], {})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(examples):
    with refused("absent or empty"):
        write_examples(examples.directory, [make_batch(0, 1)], {})
    assert len(Examples.open(examples.directory)) == 11


def test_examples_of_something_else_or_of_nothing_are_refused(tmp_path, examples):
    Examples.open(examples.directory, expect={"task": "t"})
    with refused(r"with task 'u' .* got 't'"):
        Examples.open(examples.directory, expect={"task": "u"})
    with refused(r"corpus_fingerprint 'ab' .* got None"):
        Examples.open(examples.directory, expect={"corpus_fingerprint": "ab"})
    with refused(r"expected prepared examples at .*nowhere"):
        Examples.open(tmp_path / "nowhere")


def test_damage_is_named(examples):
    examples.verify()
    path = examples.directory / "ids.npy"
    flip(path)
    with refused(r"/ids\.npy is damaged \(crc32c "):
        Examples.open(examples.directory).verify()
    for damaged, message in [
        (path.read_bytes()[:-1], r"/ids\.npy has 259 bytes, not 260; "),
        (b"x" * 260, r"expected a NumPy array in .*ids\.npy"),
    ]:
        path.write_bytes(damaged)
        with refused(message):
            Examples.open(examples.directory)
    path = examples.directory / "examples.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"format_version": 3}))
    with refused(r"format version 2 .* got version 3"):
        Examples.open(examples.directory)


def test_examples_of_an_earlier_release_open_and_are_verified(tmp_path):
    batch = make_batch(0, 5) | {SENTENCE_ID: np.array([3, 3, 4, 4, 7])}
    directory = write_examples(tmp_path / "set", [batch], {"task": "t"}).directory
    path = directory / "examples.json"
    info = unseal(path.read_bytes())
    del info["layout"]
    info |= {"format_version": 1, "features": info.pop("arrays")}
    starts = {"sentence_starts": info["sentence_starts"]}
    for name, entry in (info["features"] | starts).items():
        content = (directory / f"{name}.npy").read_bytes()
        entry["crc32c"] = google_crc32c.Checksum(content).hexdigest().decode()
    path.write_text(json.dumps(info, indent=2, sort_keys=True, ensure_ascii=False))
    examples = Examples.open(directory, expect={"task": "t"})
    examples.verify()
    assert examples.sentence_starts.tolist() == [0, 2, 4, 5]
    np.testing.assert_array_equal(examples.features["ids"], batch["ids"])
