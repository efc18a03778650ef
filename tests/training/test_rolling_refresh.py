"""An index that lives in the state: against whole embeddings and plain loops."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.index import device_search
from realm_jax.index.device_search import Precision
from realm_jax.index.device_tokens import DocumentLayout, place_tokens
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models.retriever import Retriever
from realm_jax.storage import open_store
from realm_jax.training import pretrain, rolling_refresh
from realm_jax.training.checkpoint_manifests import finished_steps
from realm_jax.training.partitioning import MeshConfig, make_mesh
from realm_jax.training.rolling_refresh import Renewal
from tests import tiny_world
from tests.tiny_world import LENGTHS, NEVER, assert_same_bits, differing, silent
from tests.training.runs import (
    drawn_params,
    embeddings_of,
    params_of,
    run_to_end,
    state_of,
    stop_run,
    towers_of,
)

pytestmark = pytest.mark.full

MESH = make_mesh(MeshConfig())


@pytest.fixture(scope="module")
def tower(corpus):
    """A search within the step, wordpieces, parameters, and their embeddings."""
    params = drawn_params(corpus)["retriever"]
    layout = DocumentLayout.of(LENGTHS, corpus.vocabulary)
    towers = Retriever(towers_of(corpus)), layout, MESH
    tokens = place_tokens(corpus, layout, MESH)
    return towers, tokens, params, embeddings_of(params, corpus)


def table_of(embeddings, precision=Precision.FLOAT32):
    return device_search.place_embeddings(
        lambda start, stop: embeddings[start:stop], *embeddings.shape, MESH, precision
    )


@pytest.mark.parametrize(("period", "at_once"), [(1, 64), (5, 4), (3, 7), (100, 1)])
def test_after_a_period_every_row_is_new(tower, period, at_once):
    towers, tokens, params, whole = tower
    renewal = Renewal(period, False, at_once)
    embed = jax.jit(functools.partial(rolling_refresh.embed_slice, *towers, renewal))
    index = table_of(np.full_like(whole, 7.0))
    changed = []
    for step in range(40, 40 + period):
        before = np.asarray(index.rows)
        index = embed(index, tokens, params, jnp.int32(step))
        changed.append((np.asarray(index.rows) != before).any(axis=1).sum())
    rows = np.asarray(index.rows)[: len(whole)]
    np.testing.assert_allclose(rows, whole, atol=1e-5)
    # No more at a time than the period asks for, rounded up to whole batches.
    assert max(changed) <= -(-index.rows.shape[0] // (period * at_once)) * at_once


def test_rows_in_eight_bits_get_their_codes(tower):
    towers, tokens, params, whole = tower
    index = table_of(np.zeros_like(whole), Precision.INT8)
    index = rolling_refresh.embed_slice(
        *towers, Renewal(1, False, 64), index, tokens, params, jnp.int32(0)
    )
    expected = table_of(whole, Precision.INT8)
    codes = np.asarray(index.codes, int)[: len(whole)]
    wanted = np.asarray(expected.codes, int)[: len(whole)]
    assert np.abs(codes - wanted).max() <= 1
    np.testing.assert_allclose(
        np.asarray(index.scales)[: len(whole)],
        np.asarray(expected.scales)[: len(whole)],
        rtol=1e-2,
    )


def test_written_rows_equal_a_loop():
    rng = np.random.default_rng(0)
    old = rng.standard_normal((50, 4)).astype(np.float32)
    ids = rng.integers(-1, 50, (8, 5)).astype(np.int32)
    ids[0] = [3, 3, 49, -1, 3]
    fresh = rng.standard_normal((8, 5, 4)).astype(np.float32)
    fresh[0, 0, 3], fresh[0, 2, 0] = np.nan, np.inf  # Of block 3 the next one is used.
    written = rolling_refresh.write_rows(table_of(old), jnp.asarray(ids), fresh, MESH)
    expected, seen = old.copy(), set()
    for block, row in zip(ids.ravel(), fresh.reshape(-1, 4), strict=True):
        if block >= 0 and block not in seen and np.isfinite(row).all():
            expected[block] = row
            seen.add(block)
    np.testing.assert_array_equal(np.asarray(written.rows)[:50], expected)
    assert not np.asarray(written.rows)[50:].any()


def config_of(world, folder, **changes):
    settings = {"refresh_mode": "rolling", "questions": world.questions}
    return tiny_world.pretrain_config(world, folder, **(settings | changes))


@pytest.mark.parametrize("mode", ["rolling", "blocking"])
def test_stopped_and_resumed_it_is_the_same_run(world, tmp_path, mode):
    whole, parted = (
        config_of(world, tmp_path / name, refresh_mode=mode, write_back=True)
        for name in ("whole", "parted")
    )
    assert pretrain.run(whole, silent, NEVER)
    stop_run(pretrain, parted, 5)
    assert pretrain.run(parted, silent, NEVER)
    assert_same_bits(*(state_of(c.model_dir, 8, "index") for c in (whole, parted)))


def operations_of(line):
    return line["model_tflops_per_second"] / line["steps_per_second"]


def test_rolling_is_never_older_than_a_period_and_measures_itself(
    world, uninterrupted, tmp_path
):
    assert pretrain.run(config_of(world, tmp_path), silent, NEVER)
    lines = list(read_metrics(str(tmp_path)))
    # The search is the same, wherever the index lives; renewing it is no model's work.
    other = next(read_metrics(str(uninterrupted)))
    assert operations_of(lines[0]) == pytest.approx(operations_of(other))
    assert [line["index_age_steps"] for line in lines] == [1, 2, 3, 3, 3, 3, 3, 3]
    assert [line["index_step"] for line in lines] == [0, 0, 0, 3, 3, 3, 6, 6]
    measured = [line["step"] for line in lines if "recall_at_5" in line]
    assert measured == [1, 4, 7]


def test_a_run_may_go_on_rolling_and_back(world, stopped, tmp_path):
    """From a checkpoint without an index, and from one with to a run without."""
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    rolling = config_of(world, folder, train_steps=6)
    assert pretrain.run(rolling, silent, NEVER)
    assert pretrain.run(config_of(world, folder, refresh_mode="off"), silent, NEVER)
    assert finished_steps(open_store(folder))[-1] == 8


def test_embeddings_of_a_frozen_document_tower_may_come_from_the_index(
    world, uninterrupted, tmp_path
):
    """The same run but for rounding, with fewer operations a step."""
    # With dropout a computed embedding is not that of the index.
    settings = {"models": tiny_world.models(dropout=0.0), "refresh_mode": "off"}
    settings |= {"train_steps": 4, "own_block": True, "normalization": "batch"}
    settings |= {"frozen": ("retriever/document_tower",)}
    settings["warm_start"] = str(uninterrupted)
    runs = {}
    for from_index in (False, True):
        folder = tmp_path / str(from_index)
        settings["embeddings_from_index"] = from_index
        run_to_end(pretrain, world, folder, questions=world.questions, **settings)
        runs[from_index] = list(read_metrics(str(folder)))
    lines, lines_taken = runs[False], runs[True]
    moved = differing(params_of(uninterrupted), params_of(tmp_path / "True"))
    assert any(name.startswith("retriever/query_tower") for name in moved)
    assert not any(name.startswith("retriever/document_tower") for name in moved)
    for name in ("loss", "gradient_norm", "null_retrieval", "share_of_batch"):
        one, other = ([line[name] for line in run] for run in (lines, lines_taken))
        assert one[0] == pytest.approx(other[0], rel=1e-5)
        assert one == pytest.approx(other, rel=1e-3)
