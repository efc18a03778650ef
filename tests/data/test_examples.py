import errno
import json

import google_crc32c
import numpy as np
import pytest

from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.features import SENTENCE_ID
from realm_jax.errors import BadInputError
from realm_jax.manifests import unseal


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


def test_any_reader_of_npy_files_understands_them(examples):
    expected = make_batch(0, 11)
    for name in expected:
        read = np.load(examples.directory / f"{name}.npy", allow_pickle=False)
        np.testing.assert_array_equal(read, expected[name])


def test_arrays_are_mapped_not_read(examples):
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


def test_a_resumed_run_sees_what_it_would_have_seen(examples):
    stream = examples.batches(batch_size=4, seed=3)
    expected = [next(stream)["ids"] for _ in range(12)]
    for start in (0, 1, 2, 7, 11):
        resumed = next(examples.batches(batch_size=4, seed=3, start_step=start))
        np.testing.assert_array_equal(resumed["ids"], expected[start])


def test_hosts_share_a_batch(examples):
    whole = examples.batches(batch_size=6, seed=1, start_step=1)
    parts = [
        examples.batches(batch_size=6, seed=1, start_step=1, num_hosts=3, host=host)
        for host in range(3)
    ]
    for _ in range(5):
        together = np.concatenate([next(part)["ids"] for part in parts])
        np.testing.assert_array_equal(together, next(whole)["ids"])


@pytest.mark.parametrize(
    ("batch_size", "num_hosts", "host"), [(6, 4, 0), (8, 4, 4), (0, 1, 0), (8, 4, -1)]
)
def test_batches_that_hosts_cannot_share_are_refused(
    examples, batch_size, num_hosts, host
):
    with pytest.raises(BadInputError, match="multiple of the number of hosts"):
        examples.batches(batch_size=batch_size, seed=0, num_hosts=num_hosts, host=host)


def test_a_negative_seed_is_refused(examples):
    with pytest.raises(BadInputError, match="got -1"):
        examples.batches(batch_size=1, seed=-1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_write_leaves_nothing(tmp_path, error):
    def batches():
        yield make_batch(0, 3)
        raise error

    with pytest.raises(error):
        write_examples(tmp_path / "set", batches(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    def batches():
        yield make_batch(0, 3)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BadInputError, match="disk is full") as caught:
        write_examples(tmp_path / "set", batches(), {})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_no_hindrance(tmp_path):
    left = tmp_path / "set.partial"
    left.mkdir()
    (left / "ids.npy").write_bytes(b"half")
    write_examples(tmp_path / "set", [make_batch(0, 2)], {})
    assert not left.exists()


@pytest.mark.parametrize("batches", [[], [make_batch(0, 0)]])
def test_no_examples_are_refused(tmp_path, batches):
    with pytest.raises(BadInputError, match="got none"):
        write_examples(tmp_path / "set", batches, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"ids": np.zeros((2, 4), np.int32)},
        {"ids": np.zeros((2, 3), np.int64)},
        {"ids": np.zeros((1, 3), np.int32)},
        {"other": np.zeros(2)},
    ],
    ids=["shape", "type", "count", "name"],
)
def test_batches_that_do_not_fit_together_are_refused(tmp_path, change):
    batches = [make_batch(0, 3), make_batch(3, 2) | change]
    with pytest.raises(BadInputError, match="expected batches of the features ids"):
        write_examples(tmp_path / "set", batches, {})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(examples):
    with pytest.raises(BadInputError, match="absent or empty"):
        write_examples(examples.directory, [make_batch(0, 1)], {})
    assert len(Examples.open(examples.directory)) == 11


def test_examples_of_something_else_are_refused(examples):
    Examples.open(examples.directory, expect={"task": "t"})
    with pytest.raises(BadInputError, match=r"with task 'u' .* got 't'"):
        Examples.open(examples.directory, expect={"task": "u"})
    with pytest.raises(BadInputError, match=r"corpus_fingerprint 'ab' .* got None"):
        Examples.open(examples.directory, expect={"corpus_fingerprint": "ab"})


def test_missing_examples_are_named(tmp_path, examples):
    with pytest.raises(BadInputError, match=r"expected prepared examples at .*nowhere"):
        Examples.open(tmp_path / "nowhere")
    (examples.directory / "ids.npy").unlink()
    with pytest.raises(BadInputError, match=r"/ids\.npy is missing; "):
        Examples.open(examples.directory)


def test_damage_is_named(examples):
    examples.verify()
    path = examples.directory / "ids.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"/ids\.npy is damaged \(crc32c "):
        Examples.open(examples.directory).verify()
    path.write_bytes(content[:-1])
    with pytest.raises(BadInputError, match=r"/ids\.npy has 259 bytes, not 260; "):
        Examples.open(examples.directory)
    path.write_bytes(b"x" * 260)
    with pytest.raises(BadInputError, match=r"expected a NumPy array in .*ids\.npy"):
        Examples.open(examples.directory)


def test_a_flipped_bit_of_the_manifest_is_named(examples):
    path = examples.directory / "examples.json"
    sound = path.read_bytes()
    assert b'"task": "t"' in sound
    path.write_bytes(sound.replace(b'"task": "t"', b'"task": "u"'))
    with pytest.raises(
        BadInputError, match=r"/examples\.json cannot be read \(its che"
    ):
        Examples.open(examples.directory)


def test_examples_of_an_earlier_release_open_and_are_verified(tmp_path):
    batch = make_batch(0, 5) | {SENTENCE_ID: np.array([3, 3, 4, 4, 7])}
    directory = write_examples(tmp_path / "set", [batch], {"task": "t"}).directory
    path = directory / "examples.json"
    info = unseal(path.read_bytes())
    del info["layout"]
    info |= {"format_version": 1, "features": info.pop("arrays")}
    for name, entry in [
        *info["features"].items(),
        ("sentence_starts", info["sentence_starts"]),
    ]:
        content = (directory / f"{name}.npy").read_bytes()
        entry["crc32c"] = google_crc32c.Checksum(content).hexdigest().decode()
    path.write_text(json.dumps(info, indent=2, sort_keys=True, ensure_ascii=False))
    examples = Examples.open(directory, expect={"task": "t"})
    examples.verify()
    assert examples.sentence_starts.tolist() == [0, 2, 4, 5]
    np.testing.assert_array_equal(examples.features["ids"], batch["ids"])


def test_another_format_version_is_refused(examples):
    path = examples.directory / "examples.json"
    info = json.loads(path.read_text()) | {"format_version": 3}
    path.write_text(json.dumps(info))
    with pytest.raises(BadInputError, match=r"format version 2 .* got version 3"):
        Examples.open(examples.directory)
