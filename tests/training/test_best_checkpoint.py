"""Held-out measures while pre-training, and the checkpoint that is best by them."""

import dataclasses
import logging
import types
from unittest import mock

import jax
import numpy as np
import pytest

from realm_jax import multihost
from realm_jax.data.examples import Examples
from realm_jax.evaluation.loading import open_finished
from realm_jax.evaluation.provenance import best_checkpoint
from realm_jax.evaluation.report_data import BestCheckpoint
from realm_jax.index.searchers import make_searcher
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.storage import open_store
from realm_jax.training import checkpoints, index_metrics, masked_spans, pretrain
from realm_jax.training.checkpoint_manifests import (
    HELD_OUT_UTILITY,
    Which,
    all_details,
    best_step,
    finished_steps,
)
from realm_jax.training.masked_spans import HeldOutSpans
from realm_jax.training.stage import Stage
from tests import tiny_world
from tests.refused import refused
from tests.tiny_world import LENGTHS, NEVER, assert_same_bits, silent
from tests.training.runs import (
    embeddings_of,
    kill_run,
    lines_of,
    state_of,
    towers_of,
)

pytestmark = pytest.mark.full

MEASURED = ("utility", "likelihood", "null_likelihood", "accuracy", "null_accuracy")
MEASURED += ("null_retrieval", "retrieval_entropy")
NAMES = {f"held_out_{name}" for name in MEASURED}


def config_of(world, folder, **changes):
    changes = {"held_out_examples": 12, **changes}
    return tiny_world.pretrain_config(world, folder, **changes)


def train(world, folder, **changes):
    assert pretrain.run(config_of(world, folder, **changes), silent, NEVER)
    return folder


def utilities_of(folder):
    """Of the checkpoints that there are; None where none was noted."""
    found = all_details(open_store(folder))
    return {step: details.get(HELD_OUT_UTILITY) for step, details in found.items()}


def scripted(utilities, seen=None):
    """Has every measurement give the utility of the index version in use."""

    def fill_in(spans, params, searcher):
        if seen is not None:
            seen.append(multihost.fetch(params))
        means = dict.fromkeys(NAMES, 0.0) | {HELD_OUT_UTILITY: utilities[searcher.step]}
        return types.SimpleNamespace(means=lambda: means)

    return mock.patch.object(HeldOutSpans, "fill_in", fill_in)


@pytest.fixture(scope="module")
def measured(world, tmp_path_factory):
    """A run that measures itself, with what parameters, and how often it compiled."""
    folder = tmp_path_factory.mktemp("measured")
    params, traced = [], []
    fill_in, read = HeldOutSpans.fill_in, masked_spans.read_masks

    def fill_in_and_tell(spans, tree, searcher):
        params.append(multihost.fetch(tree))
        return fill_in(spans, tree, searcher)

    def read_and_tell(*arguments):
        traced.append(arguments)
        return read(*arguments)

    masked_spans._filler.cache_clear()
    with (
        mock.patch.object(HeldOutSpans, "fill_in", fill_in_and_tell),
        mock.patch.object(masked_spans, "read_masks", read_and_tell),
    ):
        train(world, folder)
    return folder, params, len(traced)


def test_measuring_changes_no_bit_of_training(measured, uninterrupted):
    assert_same_bits(state_of(measured[0], 8), state_of(uninterrupted, 8))


def test_every_index_and_the_end_are_measured_and_compiled_for_once(measured, corpus):
    folder, params, times_traced = measured
    lines = lines_of(folder)
    measured_at = [step for step, line in lines.items() if line.keys() >= NAMES]
    # With the indexes of steps 0, 3 and 6, on the line after; and after the last.
    assert measured_at == [1, 4, 7, 8]
    assert all(not NAMES & lines[step].keys() for step in (2, 3, 5, 6))
    assert times_traced == 1
    config = towers_of(corpus)
    # The last parameters search the index of step 6.
    for step, tree, encoder in zip(
        measured_at, params, [*params[:3], params[2]], strict=True
    ):
        embeddings = embeddings_of(encoder["retriever"], corpus)
        spans = HeldOutSpans(
            Retriever(config),
            KnowledgeEncoder(config.bert),
            corpus=corpus,
            examples=Examples.open(corpus.directory / "examples/asked/validation"),
            num_candidates=4,
            lengths=LENGTHS,
            max_examples=12,
        )
        expected = spans.fill_in(tree, make_searcher("device", embeddings))
        retrieval = np.exp(np.asarray(expected.log_retrieval, np.float64))
        logs = np.log(retrieval, where=retrieval > 0, out=np.zeros_like(retrieval))
        values = {
            "utility": expected.log_marginal - expected.log_null,
            "likelihood": np.exp(expected.log_marginal),
            "null_likelihood": np.exp(expected.log_null),
            "accuracy": expected.correct,
            "null_accuracy": expected.null_correct,
            "null_retrieval": retrieval[:, 0],
            "retrieval_entropy": -(retrieval * logs).sum(axis=1),
        }
        for name, value in values.items():
            found = lines[step][f"held_out_{name}"]
            assert found == pytest.approx(value.mean(), rel=1e-4, abs=1e-6), name


def test_the_best_stays_with_its_index_while_newer_ones_come_and_go(world, tmp_path):
    seen = []
    with scripted({0: 0.1, 3: 0.5, 6: 0.2, 9: 0.4, 12: 0.1, 15: 0.3}, seen):
        train(world, tmp_path, train_steps=16)
    store = open_store(tmp_path)
    # That of step 0 was the best, and is gone; that of 12 was saved, then measured.
    assert utilities_of(tmp_path) == {3: 0.5, 12: None, 16: 0.3}
    # The newest two, and those that the checkpoints 3, 8 and 12 were to resume with.
    assert SnapshotSeries(store, INDEX_SERIES).steps() == [3, 6, 9, 12, 15]
    assert best_checkpoint(str(tmp_path)) == BestCheckpoint(3, 0.5, 16, 0.3)
    best = checkpoints.restore_params(store, Which.BEST)
    assert best.step == open_finished(tmp_path, "pretrain", {}, Which.BEST).step == 3
    assert_same_bits(best.tree, seen[1])
    assert checkpoints.restore_params(store).step == 16
    assert open_finished(tmp_path, "pretrain", {}).step == 16
    for which, expected in (("best", seen[1]), ("last", seen[-1])):
        source = {"warm_start": str(tmp_path), "warm_start_checkpoint": which}
        started = config_of(world, tmp_path / "next", **source)
        params = Stage(started, KnowledgeEncoder).state.params
        assert_same_bits(jax.device_get(params), expected)
    damaged = next(p for p in (tmp_path / "checkpoints/3").rglob("*") if p.is_file())
    damaged.unlink()
    with refused(r"of step 3.* is missing; .*last one"):
        checkpoints.restore_params(store, Which.BEST)


def test_a_checkpoint_that_was_just_saved_is_told_its_utility(world, tmp_path):
    with scripted({0: 0.1, 4: 0.6}):
        train(world, tmp_path, refresh_period=4)
    # The one of step 8 searched the same index.
    assert utilities_of(tmp_path) == {4: 0.6, 8: 0.6}
    details = all_details(open_store(tmp_path))
    assert details[4]["index_step"] == 0
    assert best_step(details) == 8


@pytest.mark.parametrize(("killed_at", "resumes_from"), [(4, 3), (6, 4)])
def test_killed_and_resumed_it_is_the_same_run_with_the_same_best(
    world, tmp_path, killed_at, resumes_from
):
    """From the best checkpoint, made at a swap, and from one that was due."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with scripted({0: 0.1, 3: 0.5, 6: 0.2}):
        train(world, whole)
        kill_run(pretrain, config_of(world, parts), killed_at)
        assert finished_steps(open_store(parts))[-1] == resumes_from
        train(world, parts)
    assert utilities_of(whole) == utilities_of(parts) == {3: 0.5, 4: None, 8: 0.2}
    for step in (3, 4, 8):
        assert_same_bits(state_of(whole, step), state_of(parts, step))
    expected, found = lines_of(whole), lines_of(parts)
    # A run that starts again measures its first index again.
    again = found[resumes_from + 1]
    assert again.keys() >= NAMES
    for name in NAMES - expected[resumes_from + 1].keys():
        del again[name]
    assert found == expected


def test_a_rolling_index_is_measured_once_a_round(world, tmp_path):
    lines = lines_of(train(world, tmp_path, refresh_mode="rolling"))
    assert [s for s, line in lines.items() if line.keys() >= NAMES] == [1, 4, 7, 8]
    # What is measured at a swap stands on the line after it.
    utilities = [
        (lines[line][HELD_OUT_UTILITY], step)
        for line, step in {1: 0, 4: 3, 7: 6, 8: 8}.items()
    ]
    assert best_step(all_details(open_store(tmp_path))) == max(utilities)[1]


def test_scann_measures_what_the_devices_do(world, measured, tmp_path):
    train(world, tmp_path, searcher="scann", train_steps=1)
    # Of the same parameters; above they were measured before an update.
    first = next(read_metrics(str(measured[0])))
    before = utilities_of(tmp_path)[0]
    assert before == pytest.approx(first[HELD_OUT_UTILITY], rel=1e-4)


def test_the_best_of_a_run_that_measured_nothing_is_one_clear_line(
    world, uninterrupted, tmp_path
):
    config = config_of(
        world, tmp_path, warm_start=str(uninterrupted), warm_start_checkpoint="best"
    )
    with refused(r"steps 4, 8 has one; pretrain with held_out_examples"):
        pretrain.run(config, silent, NEVER)
    with refused("held_out_examples above 0"):
        open_finished(str(uninterrupted), "pretrain", {}, Which.BEST)


def test_a_task_without_a_validation_split_is_not_measured(world, tmp_path, caplog):
    config = config_of(world, tmp_path, task="stated")
    with refused("realm prepare"):
        pretrain.run(config, silent, NEVER)
    default = pretrain.PretrainConfig.held_out_examples
    config = dataclasses.replace(config, held_out_examples=default)
    stage = Stage(config, KnowledgeEncoder)
    with caplog.at_level(logging.INFO):
        assert not config.requires_held_out
        spans = index_metrics.held_out_spans(
            stage, config.num_candidates, default, is_required=config.requires_held_out
        )
    assert spans is None
    assert "'stated' has no validation split" in caplog.text


def test_of_equal_checkpoints_the_later_is_best_and_nan_never_is():
    details = {1: {}, 2: {HELD_OUT_UTILITY: 0.5}, 3: {HELD_OUT_UTILITY: 0.5}}
    assert best_step(details) == 3
    assert best_step({**details, 4: {HELD_OUT_UTILITY: float("nan")}}) == 3
    assert best_step({1: {}}) is None
