import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from realm_jax.errors import BadInputError
from realm_jax.storage import open_store
from realm_jax.training import checkpoints
from realm_jax.training.state import create_state


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


def save(store, *steps, keep=2):
    checkpointer = checkpoints.Checkpointer(store, keep=keep)
    for step in steps:
        checkpointer.save(make_state(step), {"index_step": step - 1})
    checkpointer.close()


def test_what_was_saved_comes_back(store):
    save(store, 7)
    restored = checkpoints.restore_state(store, make_state())
    assert restored.step == 7
    assert restored.details == {"index_step": 6, checkpoints.HOLDS_INDEX: False}
    jax.tree.map(np.testing.assert_array_equal, restored.tree, make_state(7))
    params = checkpoints.restore_params(store).tree
    jax.tree.map(np.testing.assert_array_equal, params, make_state(7).params)


def test_nothing_saved_is_none(store):
    assert checkpoints.restore_state(store, make_state()) is None
    assert checkpoints.read_details(store) is None


def test_only_the_newest_are_kept(store):
    save(store, 1, 2, 3, 4)
    assert checkpoints.finished_steps(store) == [3, 4]
    assert not store.list("checkpoints/1")


def test_what_a_killed_process_left_goes_with_the_next(store):
    save(store, 1, 2)
    store.delete("checkpoints/1.json")  # Killed before the folder was deleted.
    store.write("checkpoints/9.orbax-checkpoint-tmp/params/x", b"")
    store.write("checkpoints/9/params/x", b"")
    save(store, 3)
    folders = {name.split("/")[1] for name in store.list("checkpoints")}
    assert folders == {"2", "2.json", "3", "3.json"}


def test_a_checkpoint_without_its_manifest_does_not_count_and_is_replaced(store):
    save(store, 1, 2)
    store.delete("checkpoints/2.json")
    assert checkpoints.restore_state(store, make_state()).step == 1
    save(store, 2)
    assert checkpoints.restore_state(store, make_state()).step == 2


def damage(store, tmp_path, step, kind):
    """Damages the largest file, which holds arrays."""
    stats = store.stats(f"checkpoints/{step}")
    name = max(stats, key=lambda name: stats[name].size)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif kind == "truncate":
        path.write_bytes(data[:-1])
    else:
        path.unlink()
    return name


@pytest.mark.parametrize("kind", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    store, tmp_path, caplog, kind
):
    save(store, 1, 2)
    name = damage(store, tmp_path, 2, kind)
    restored = checkpoints.restore_state(store, make_state())
    assert restored.step == 1
    jax.tree.map(np.testing.assert_array_equal, restored.tree, make_state(1))
    assert name in caplog.text


def test_a_damaged_checkpoint_is_replaced_when_the_run_comes_to_its_step_again(
    store, tmp_path
):
    save(store, 1, 2)
    damage(store, tmp_path, 2, "flip")
    save(store, 2)
    assert checkpoints.restore_state(store, make_state()).step == 2


def test_all_damaged_is_an_error_that_names_them(store, tmp_path):
    save(store, 1, 2)
    names = [damage(store, tmp_path, step, "flip") for step in (1, 2)]
    with pytest.raises(BadInputError) as error:
        checkpoints.restore_params(store)
    assert all(name in str(error.value) for name in names)


def test_parameters_of_another_shape_are_refused(store):
    save(store, 1)
    with pytest.raises(BadInputError, match="model file"):
        checkpoints.restore_state(store, make_state(width=4))
