import contextlib
import pathlib
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from realm_jax.errors import BadInputError
from realm_jax.index.device_search import EmbeddingTable
from realm_jax.manifests import seal
from realm_jax.storage import open_store
from realm_jax.training import checkpoints
from realm_jax.training.checkpoint_manifests import (
    HOLDS_INDEX,
    all_details,
    find_damage,
    finished_steps,
)
from realm_jax.training.state import create_state
from tests.flipped import flip
from tests.refused import refused

ROOT = pathlib.Path(__file__).parents[2]


def make_state(step: int = 0, width: int = 3):
    params = {
        "retriever": {"kernel": jnp.arange(2.0 * width).reshape(2, width) + step},
        "reader": {"bias": jnp.full(width, float(step))},
    }
    state = create_state(params, optax.adam(1e-3), seed=step)
    return state.replace(step=jnp.asarray(step, jnp.int32))


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def save(store, *steps):
    checkpointer = checkpoints.Checkpointer(store)
    for step in steps:
        checkpointer.save(make_state(step), {"index_step": step - 1})
    checkpointer.close()


def test_what_was_saved_comes_back(store):
    assert checkpoints.restore_state(store, make_state()) is None
    assert all_details(store) == {}
    save(store, 7)
    restored = checkpoints.restore_state(store, make_state())
    assert restored.step == 7
    assert restored.details == {"index_step": 6, HOLDS_INDEX: False}
    jax.tree.map(np.testing.assert_array_equal, restored.tree, make_state(7))
    params = checkpoints.restore_params(store).tree
    jax.tree.map(np.testing.assert_array_equal, params, make_state(7).params)


_ON_A_BUCKET = """
import sys
from realm_jax.storage import open_store

from tests.training import test_checkpoints
test_checkpoints.test_what_was_saved_comes_back(open_store(sys.argv[1]))
assert "tensorflow" not in sys.modules
"""


@pytest.mark.full
def test_a_bucket_keeps_checkpoints_without_tensorflow(bucket):
    program = [sys.executable, "-c", _ON_A_BUCKET, f"{bucket}/checkpoints-alone"]
    subprocess.run(program, check=True, cwd=ROOT)


def test_only_the_newest_are_kept_and_nothing_that_a_killed_process_left(store):
    save(store, 1, 2, 3, 4)
    assert finished_steps(store) == [3, 4]
    assert not store.list("checkpoints/1")
    store.delete("checkpoints/3.json")  # Killed before the folder was deleted.
    store.write("checkpoints/9.orbax-checkpoint-tmp/params/x", b"")
    store.write("checkpoints/9/params/x", b"")
    save(store, 5)
    folders = {name.split("/")[1] for name in store.list("checkpoints")}
    assert folders == {"4", "4.json", "5", "5.json"}


def test_a_checkpoint_without_its_manifest_does_not_count_and_is_replaced(store):
    save(store, 1, 2)
    store.delete("checkpoints/2.json")
    assert checkpoints.restore_state(store, make_state()).step == 1
    save(store, 2)
    assert checkpoints.restore_state(store, make_state()).step == 2


def damage(store, tmp_path, step, kind="truncate"):
    """Damages the largest file, which holds arrays."""
    stats = store.stats(f"checkpoints/{step}")
    name = max(stats, key=lambda name: stats[name].size)
    path = tmp_path / name
    if kind == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    return name


def test_a_damaged_checkpoint_gives_way_to_the_one_before(store, tmp_path, caplog):
    save(store, 1)
    # It is replaced when the run comes to its step again.
    for kind in ("truncate", "remove"):
        save(store, 2)
        assert checkpoints.restore_state(store, make_state()).step == 2
        name = damage(store, tmp_path, 2, kind)
        caplog.clear()
        restored = checkpoints.restore_state(store, make_state())
        assert restored.step == 1
        jax.tree.map(np.testing.assert_array_equal, restored.tree, make_state(1))
        assert name in caplog.text
    with refused("model file"):
        checkpoints.restore_state(store, make_state(width=4))
    names = [name, damage(store, tmp_path, 1)]
    with pytest.raises(BadInputError) as error:
        checkpoints.restore_params(store)
    assert all(name in str(error.value) for name in names)


def with_index(state, rows, num_blocks=5):
    """The state with a table of `rows` rows, of which the first `num_blocks` count."""
    table = np.arange(4.0 * rows, dtype=np.float32).reshape(rows, 4)
    table[num_blocks:] = 0
    index = EmbeddingTable(jnp.asarray(table), None, None, jnp.asarray(num_blocks))
    return state.replace(index=index)


@pytest.mark.parametrize("rows", [6, 16])
def test_an_index_that_is_padded_for_other_devices_keeps_its_blocks(store, rows):
    checkpointer = checkpoints.Checkpointer(store)
    checkpointer.save(with_index(make_state(7), 8), {})
    checkpointer.close()
    restored = checkpoints.restore_state(store, with_index(make_state(), rows))
    expected = with_index(make_state(7), rows)
    jax.tree.map(np.testing.assert_array_equal, restored.tree, expected)


def test_a_flipped_bit_in_any_file_is_found_and_named(store, tmp_path, caplog):
    save(store, 4, 8)
    before, newest = finished_steps(store)
    folder = tmp_path / "checkpoints"
    manifest = folder / f"{newest}.json"
    # Of the file system, not of the store: hidden files are files too.
    files = [p for p in (folder / str(newest)).rglob("*") if p.is_file()]
    assert len(files) >= 10
    sound = checkpoints.restore_params(store)
    assert sound.step == newest
    for path in [*files, *[manifest] * 8]:
        with flipped_bit(path):
            problem = find_damage(store, newest)
            assert str(path.relative_to(tmp_path)) in problem
    for path in (files[0], manifest):
        with flipped_bit(path):
            restored = checkpoints.restore_params(store)
            assert restored.step == before, path
            assert str(path.relative_to(tmp_path)) in caplog.text
            step, details = max(all_details(store).items())
            assert step == (before if path == manifest else newest)
            assert details["index_step"] == step - 1
    again = checkpoints.restore_params(store)
    jax.tree.map(np.testing.assert_array_equal, again.tree, sound.tree)
    # One that is sealed, and no table of files.
    manifest.write_bytes(seal({"details": {}, "files": {"params/x": 3}}))
    assert f"{newest}.json is damaged" in find_damage(store, newest)


_RNG = random.Random(0)


@contextlib.contextmanager
def flipped_bit(path: pathlib.Path):
    """One bit of a file is another, at a random place; then it is as it was."""
    bit = _RNG.randrange(path.stat().st_size), 1 << _RNG.randrange(8)
    flip(path, *bit)
    yield
    flip(path, *bit)
