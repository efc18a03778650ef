"""Search and candidates on devices: the same as on the host, wherever rows lie."""

import os
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.index import device_search, device_tokens, searchers
from realm_jax.index.scann_searcher import share_found
from tests import tiny_run
from tests.index import device_worlds as worlds
from tests.index.test_searchers import slow_neighbours

MESH = device_search.single_device_mesh()


@hypothesis.settings(max_examples=10)
@hypothesis.given(seed=st.integers(0, 2**32 - 1), num_blocks=st.sampled_from([1, 23]))
def test_candidates_are_those_of_the_host(seed, num_blocks):
    world = worlds.make(seed, num_blocks=num_blocks)
    table = device_tokens.place_tokens(world.store, world.layout, MESH)
    found = worlds.device_candidates(world, table, MESH)
    worlds.assert_same(found, worlds.host_candidates(world))


@pytest.mark.process("another number of devices")
def test_eight_devices_find_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "tests.index.sharded_search"],
        cwd=tiny_run.ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the same on eight devices\n"


def test_eight_bits_scored_again_find_nearly_all():
    rng = np.random.default_rng(0)
    # As embeddings of text are: a common part, and lengths that differ.
    embeddings = rng.standard_normal((20_000, 64)) + rng.standard_normal(64)
    embeddings = (embeddings * rng.uniform(0.5, 2.0, (20_000, 1))).astype(np.float32)
    queries = rng.standard_normal((64, 64)).astype(np.float32)
    config = searchers.DeviceConfig(precision="int8")
    found = searchers.DeviceSearcher(embeddings, config=config).search(queries, 8)
    ids, scores = slow_neighbours(queries, embeddings, 8)
    assert share_found(found.ids, ids) >= 0.99
    np.testing.assert_allclose(found.scores, scores, rtol=0.02)
    # Fewer blocks than are asked for.
    few = np.eye(3, dtype=np.float32)
    found = searchers.DeviceSearcher(few, config=config).search(few, 5)
    assert found.ids[0].tolist() == [0, 1, 2, -1, -1]
    assert found.scores[0, 3:].tolist() == [-np.inf, -np.inf]


def test_codes_are_near_their_rows_and_zeros_stay():
    rows = np.array([[0.0, 0.0], [1.0, -0.5], [1e-30, 1e-30]], np.float32)
    codes, scales = device_search.quantize(jnp.asarray(rows))
    again = np.asarray(codes, np.float32) * np.asarray(scales)[:, None]
    np.testing.assert_allclose(again, rows, atol=np.asarray(scales).max() / 2)
