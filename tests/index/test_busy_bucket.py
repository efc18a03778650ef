"""A bucket that says 429, 500 or 503, before or after it did what it was asked for.

Whatever commits takes effect once. SOAK_BUSY_SEED chooses what is refused, and how.
"""

import os
import random

import jax
import numpy as np
import pytest

from realm_jax.index import builder
from realm_jax.index.heartbeat import Heartbeat, read_heartbeat
from realm_jax.index.retrievers import load_retriever
from realm_jax.storage import AlreadyExistsError, MissingObjectError, open_store
from realm_jax.training import checkpoints
from realm_jax.training.checkpoint_manifests import finished_steps
from realm_jax.training.lease import Lease
from tests.dropping_proxy import REFUSALS
from tests.index.tiny_builder import CONFIG, assert_one_sound_index, publish
from tests.training.test_checkpoints import make_state

# Whoever is refused waits for a second or two, in real time.
pytestmark = pytest.mark.full

SEED = int(os.environ.get("SOAK_BUSY_SEED", "0"))


@pytest.fixture
def store(proxy, bucket, tmp_path):
    return open_store(f"{bucket}/{tmp_path.name}")


def refuse_once_each(proxy, *refusals):
    """Refuses the first request of each kind, and again, in one way after another."""
    left = {}

    def refuses(request):
        return next(left.setdefault(request.kind, iter(refusals)), None)

    proxy.refuses = refuses


def pairs():
    """Each way to refuse once, in an order of the seed."""
    order = random.Random(SEED).sample(REFUSALS, len(REFUSALS))
    return [order[i : i + 2] for i in (0, 2, 4)]


@pytest.mark.parametrize("refusals", pairs(), ids=str)
def test_every_operation_of_a_store_takes_effect_once(store, proxy, refusals):
    refuse_once_each(proxy, *refusals)
    store.create("a/created", b"mine")
    with pytest.raises(AlreadyExistsError):
        store.create("a/created", b"another's")
    store.write("a/written", b"1")
    store.write("a/written", b"2")
    assert store.list("a") == ["a/created", "a/written"]
    assert store.read("a/created") == b"mine"
    store.delete("a/created")
    with pytest.raises(MissingObjectError):
        store.read("a/created")
    assert {name: stat.size for name, stat in store.stats().items()} == {"a/written": 1}
    kinds = [request.kind for request, _ in proxy.refused]
    assert set(kinds) == {"create", "write", "read", "delete"}
    assert len(kinds) == 4 * len(refusals)


def save_checkpoints(store, *_):
    checkpointer = checkpoints.Checkpointer(store)
    for step in (1, 2, 3):
        checkpointer.save(make_state(step), {"index_step": step - 1})
    checkpointer.close()


def check_checkpoint(store, *_):
    assert finished_steps(store) == [2, 3]
    restored = checkpoints.restore_state(store, make_state())
    assert restored.step == 3
    jax.tree.map(np.testing.assert_array_equal, restored.tree, make_state(3))
    kept = {name.split("/")[1] for name in store.list("checkpoints")}
    assert kept == {"2", "2.json", "3", "3.json"}


def make_indexes(store, blocks, retriever_at):
    for step in (2, 3):
        publish(store, blocks, retriever_at(step))
        builder.build_once(retriever_at(step), blocks, store, CONFIG)
        builder.collect_garbage(store, keep=1)


def check_indexes(store, blocks, retriever_at):
    retriever = retriever_at(3)
    assert load_retriever(store, 3).params_crc32c() == retriever.params_crc32c()
    assert_one_sound_index(store, retriever, blocks)


def hold_lease(store, *_):
    held = Lease(store)
    held.require_held()
    for step in range(3):
        Heartbeat(store, builder.TRAINER_ROLE).beat(step)
        held._beat(step)
    held.require_held()
    held.release()


def check_lease(store, *_):
    assert store.list("lease") == []
    assert read_heartbeat(store, builder.TRAINER_ROLE).step == 2


def refuse_commits(proxy, names, refusal):
    """Refuses once to create, write or delete each object of such names."""
    seen = set()

    def refuses(request):
        name = next((name for name in names if name in request.text), None)
        if name is None or request.kind == "read" or (name, request.kind) in seen:
            return None
        seen.add((name, request.kind))
        return refusal

    proxy.refuses = refuses


# One that is done, and one that is not.
WAYS = [REFUSALS[(2 * SEED + 1) % 6], REFUSALS[(2 * SEED + 4) % 6]]


@pytest.mark.parametrize("refusal", WAYS, ids=str)
def test_everything_is_committed_once(store, proxy, refusal, blocks, retriever_at):
    checkpoints_ = ["checkpoints/1.json", "checkpoints/2.json"]
    indexes = ["retriever/commits/", "index/commits/", "progress/attempt.json"]
    lease = ["lease/1.json", "lease/1.beat", "jobs/trainer"]
    for names, requests, work, check in (
        # Two are written, one is deleted.
        (checkpoints_, 3, save_checkpoints, check_checkpoint),
        (indexes, 6, make_indexes, check_indexes),
        (lease, 5, hold_lease, check_lease),
    ):
        proxy.refused.clear()
        refuse_commits(proxy, names, refusal)
        work(store, blocks, retriever_at)
        assert len(proxy.refused) == requests
        check(store, blocks, retriever_at)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_while_every_tenth_request_is_refused(store, proxy, blocks, retriever_at):
    proxy.refuse_at_random(SEED, 0.1)
    save_checkpoints(store)
    make_indexes(store, blocks, retriever_at)
    hold_lease(store)
    assert {refusal for _, refusal in proxy.refused} == set(REFUSALS)
    proxy.refuses = lambda request: None
    check_checkpoint(store)
    check_indexes(store, blocks, retriever_at)
    check_lease(store)
