import dataclasses
import functools
import logging
import re
import shutil

import jax
import numpy as np
import pytest

from bench.invented_world import WorldConfig
from realm_jax.data.examples import write_examples
from realm_jax.data.questions import question_examples, read_questions
from realm_jax.index.snapshots import SnapshotSeries
from realm_jax.index.source import IndexSource
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models.span_reader import SpanReader, span_bounds
from realm_jax.storage import open_store
from realm_jax.training import finetune, warm_start
from realm_jax.training.checkpoint_manifests import finished_steps
from realm_jax.training.search_ahead import SearchAhead
from tests import tiny_world
from tests.refused import refused
from tests.tiny_world import EMBED, LENGTHS, NEVER, assert_same_bits, differing, silent
from tests.training.runs import (
    drawn_params,
    index_of,
    inputs_of,
    params_of,
    run_to_end,
    stop_run,
    towers_of,
)


@pytest.fixture
def first_inputs(world, tmp_path, monkeypatch):
    """Gives the inputs of the first update of a run, which is not made."""

    def inputs(folder=tmp_path / "run", world=world, **changes):
        config = tiny_world.finetune_config(world, folder, **changes)
        return inputs_of(monkeypatch, finetune, config)[0]

    return inputs


@pytest.fixture(scope="module")
def fine_tuned(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    run_to_end(finetune, world, folder)
    return folder


def test_the_document_tower_keeps_its_bits_and_the_rest_trains(fine_tuned, corpus):
    drawn = drawn_params(corpus, functools.partial(SpanReader, max_span=3))
    changed = differing(drawn, params_of(fine_tuned))
    assert not [name for name in changed if "/document_tower/" in name]
    for part in ("retriever/query_tower/bert/", "retriever/query_tower/projection/"):
        assert any(name.startswith(part) for name in changed)
    assert {"reader/span_dense/kernel", "reader/span_output/kernel"} <= changed
    assert "reader/bert/token_embedding/embedding" in changed
    lines = list(read_metrics(str(fine_tuned)))
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert np.isfinite(line["loss"])
        assert line["learning_rate"] == pytest.approx(1e-2)
        assert line["update_norm"] > 0
        # All blocks are retrieved, so every answer is among them.
        assert line["answer_retrieved"] == 1.0
        assert 0 <= line["answer_read"] <= 1


def losses_of(config):
    assert finetune.run(config, silent, NEVER)
    return [line["loss"] for line in read_metrics(config.model_dir)]


def test_what_is_found_ahead_is_one_update_old(world, tmp_path, monkeypatch):
    """Against a search at the moment of each update, and of the one before."""
    few = {"num_retrieved": 2, "train_steps": 4}
    config = tiny_world.finetune_config(world, tmp_path / "ahead", **few)
    found = losses_of(config)
    beside = dataclasses.replace(config, search_ahead=False)
    live, stale = (
        losses_of_stale_searches(monkeypatch, beside, tmp_path / str(age), age)
        for age in (0, 1)
    )
    assert found[0] == live[0]
    assert found != live
    assert found == stale
    # After a resume, too, at the first update for which it matters: a checkpoint has
    # them.
    parts = dataclasses.replace(config, model_dir=str(tmp_path / "parts"))
    is_other = [one != other for one, other in zip(found, live, strict=True)]
    stop_run(finetune, parts, is_other.index(True))
    (commit,) = (tmp_path / "parts/index/commits").iterdir()
    before = commit.read_bytes()
    assert losses_of(parts) == found
    assert commit.read_bytes() == before
    assert_same_bits(params_of(parts.model_dir), params_of(config.model_dir))


def losses_of_stale_searches(monkeypatch, config, folder, age):
    """The losses of searches before the update, with parameters so many updates old."""
    seen, search = [], SearchAhead.__call__

    def stale(self, step, retriever, *others):
        seen.append(jax.device_get(retriever))
        return search(self, step, seen[max(0, step - age)], *others)

    with monkeypatch.context() as patched:
        patched.setattr(SearchAhead, "__call__", stale)
        return losses_of(dataclasses.replace(config, model_dir=str(folder)))


@pytest.mark.full
def test_what_was_found_ahead_of_another_number_of_blocks_is_not_used(world, tmp_path):
    few = tiny_world.finetune_config(world, tmp_path, num_retrieved=3)
    stop_run(finetune, few, 2)
    run_to_end(finetune, world, tmp_path, num_read=5)
    assert list(read_metrics(str(tmp_path)))[-1]["answer_retrieved"] == 1.0


def test_questions_blocks_and_answers_belong_together(corpus, first_inputs):
    inputs = first_inputs()
    assert inputs.block_embeddings.shape == (4, 24, 8)
    assert inputs.joined_ids.shape == (4, 2, LENGTHS.joined)
    assert inputs.block_valid.all()
    starts, ends = span_bounds(LENGTHS.joined, 3)
    bodies = corpus.body_ids(np.arange(corpus.num_blocks), LENGTHS.document)
    for i in range(4):
        query = inputs.questions.question_ids[i]
        # Every value is one wordpiece.
        answer, *others = inputs.questions.answer_ids[i].ravel()
        assert answer
        assert not any(others)
        assert inputs.block_has_answer[i].sum() == (bodies == answer).any(axis=1).sum()
        for z in range(2):
            ids, segments = inputs.joined_ids[i, z], inputs.joined_segment_ids[i, z]
            np.testing.assert_array_equal(
                ids[: np.count_nonzero(query)], query[query != 0]
            )
            # No null document among what is read: every slot is a block.
            read = ids[segments == 1][:-1]
            (block,) = np.flatnonzero((bodies[:, : len(read)] == read).all(axis=1))
            whole = bodies[block]
            assert inputs.block_has_answer[i, z] == (answer in whole)
            marked = np.flatnonzero(inputs.span_is_answer[i, z])
            np.testing.assert_array_equal(starts[marked], np.flatnonzero(ids == answer))
            np.testing.assert_array_equal(starts[marked], ends[marked])


def test_a_corpus_of_fewer_blocks_than_are_read_has_empty_slots(tmp_path, first_inputs):
    small = tiny_world.make(tmp_path / "world", WorldConfig(1, 6, 20, 1))
    inputs = first_inputs(world=small, num_retrieved=50, num_read=5)
    assert inputs.joined_ids.shape[1] == 5
    np.testing.assert_array_equal(
        inputs.block_valid, [[True, True, False, False, False]] * 4
    )
    assert not inputs.block_has_answer[:, 2:].any()


def test_a_shared_tower_trains_over_its_first_index(world, tmp_path, quick_updates):
    models = tiny_world.models(shared=True)
    config = tiny_world.finetune_config(world, tmp_path, models=models)
    assert finetune.frozen_parameters(config) == ()
    quick_updates(finetune, "FinetuneLoss")
    stop_run(finetune, config, 2)
    shutil.rmtree(tmp_path / "index")
    # Its tower may have moved, so that index cannot be made again.
    with refused("shared tower has trained"):
        finetune.run(config, silent, NEVER)


def test_a_frozen_retriever_and_its_index_keep_their_bits(world, tmp_path):
    config = tiny_world.finetune_config(
        world, tmp_path, models=tiny_world.models(shared=True), frozen=("retriever",)
    )
    stop_run(finetune, config, 1)
    params, index = params_of(tmp_path), index_of(tmp_path)
    # The one tower does not move, so the same index can be made again.
    shutil.rmtree(tmp_path / "index")
    assert finetune.run(config, silent, NEVER)
    np.testing.assert_array_equal(index, index_of(tmp_path))
    changed = differing(params, params_of(tmp_path))
    assert changed
    assert all(name.startswith("reader/") for name in changed)


def test_a_frozen_tower_makes_a_lost_index_again(fine_tuned, tmp_path, first_inputs):
    folder = tmp_path / "run"
    shutil.copytree(fine_tuned, folder)
    shutil.rmtree(folder / "index")
    first_inputs(folder, train_steps=4)
    np.testing.assert_array_equal(*map(index_of, (folder, fine_tuned)))


def test_after_another_stage_no_document_is_embedded_again(
    world, corpus, tmp_path, monkeypatch, first_inputs
):
    before, folder = tmp_path / "before", tmp_path / "finetune"
    run_to_end(warm_start, world, before, train_steps=0)
    # As the builder beside it ends: with the index of the last retriever.
    store = open_store(before)
    source = IndexSource(store, corpus, towers_of(corpus), EMBED, "device")
    source.build(1, params_of(before)["retriever"])
    embedded = tiny_world.count_embedded(monkeypatch)
    first_inputs(folder, warm_start=str(before))
    assert sum(embedded) == 0
    np.testing.assert_array_equal(*map(index_of, (before, folder)))
    # One of another stage that did not embed this retriever is of no use.
    SnapshotSeries(store, "index").forget(1)
    shutil.rmtree(folder)
    first_inputs(folder, warm_start=str(before))
    assert sum(embedded) == corpus.num_blocks


def test_questions_are_padded_to_the_length_of_the_model(tmp_path, first_inputs):
    """That of the examples, made for longer sentences, may be another one."""
    shorter = dataclasses.replace(LENGTHS, query=LENGTHS.query - 2)
    models = dataclasses.replace(tiny_world.models(), lengths=shorter)
    ids = first_inputs(models=models).questions.question_ids
    assert ids.shape[1] == shorter.query
    longer = first_inputs(tmp_path / "longer").questions.question_ids
    left = longer[:, : shorter.query]
    same = left[:, -1] == 0
    assert same.any()
    np.testing.assert_array_equal(ids[same], left[same])


def test_an_update_may_read_fewer_blocks_than_an_answer(world, tmp_path, first_inputs):
    both = first_inputs()
    best = first_inputs(tmp_path / "fewer", train_num_read=1)
    # The best block of each question, and as many in the retriever's loss as before.
    np.testing.assert_array_equal(best.joined_ids, both.joined_ids[:, :1])
    np.testing.assert_array_equal(best.span_is_answer, both.span_is_answer[:, :1])
    np.testing.assert_array_equal(best.block_embeddings, both.block_embeddings)
    fewer = tiny_world.finetune_config(world, tmp_path, train_num_read=1)
    assert fewer.answering().num_read == both.joined_ids.shape[1] == 2


def with_questions(corpus, task, questions):
    arrays = question_examples(
        questions, corpus.vocabulary, query_length=LENGTHS.query, max_pattern_length=32
    )
    folder = corpus.directory / "examples" / task / "train"
    folder.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"vocabulary_fingerprint": corpus.vocabulary.fingerprint}
    write_examples(folder, [arrays], metadata)


def test_patterns_are_learned_as_the_answers_they_match(
    world, corpus, tmp_path, first_inputs
):
    questions = [
        dataclasses.replace(
            q, answers=tuple(re.escape(a) for a in q.answers), answers_are_patterns=True
        )
        for q in read_questions(world.questions, "train")
    ]
    with_questions(corpus, "patterns", questions)
    exact = first_inputs()
    found = first_inputs(tmp_path / "found", task="patterns")
    assert not found.questions.answer_ids.any()
    assert found.questions.answer_patterns is None
    np.testing.assert_array_equal(found.block_has_answer, exact.block_has_answer)
    np.testing.assert_array_equal(found.span_is_answer, exact.span_is_answer)
    assert exact.block_has_answer.any(axis=1).all()


def test_mixed_sets_go_on_with_the_same_questions(world, corpus, tmp_path, monkeypatch):
    asked = read_questions(world.questions, "dev")
    with_questions(corpus, "others", asked)
    mixed = {"more_tasks": {"others": 0.4}, "train_steps": 5, "num_retrieved": 2}
    whole, parts = (
        tiny_world.finetune_config(world, tmp_path / name, **mixed)
        for name in ("whole", "parts")
    )
    seen = inputs_of(monkeypatch, finetune, whole, steps=5)
    of_dev = question_examples(asked, corpus.vocabulary, query_length=LENGTHS.query)
    rows = np.concatenate([one.questions.question_ids for one in seen])
    is_dev = (rows[:, None] == of_dev["question_ids"]).all(axis=-1).any(axis=-1)
    assert 0 < is_dev.sum() < len(rows)
    assert finetune.run(whole, silent, NEVER)
    stop_run(finetune, parts, 2)
    other = dataclasses.replace(parts, more_tasks={"others": 0.5})
    with refused("more_tasks.*another MODEL_DIR"):
        finetune.run(other, silent, NEVER)
    assert finetune.run(parts, silent, NEVER)
    assert_same_bits(params_of(parts.model_dir), params_of(whole.model_dir))


def test_how_many_questions_can_be_learned_from_is_said_first(
    world, corpus, tmp_path, first_inputs, caplog
):
    asked = read_questions(world.questions, "train")
    lost = [dataclasses.replace(q, answers=("nowhere at all",)) for q in asked]
    with_questions(corpus, "lost", lost)
    config = tiny_world.finetune_config(world, tmp_path, task="lost")
    with refused(f"got none for {len(lost)} of {len(lost)}"):
        finetune.run(config, silent, NEVER)
    assert not finished_steps(open_store(tmp_path))
    half = len(asked) // 2
    with_questions(corpus, "half", [*lost[:half], *asked[half:]])
    with caplog.at_level(logging.INFO, "realm_jax.training.answer_coverage"):
        first_inputs(task="half")
    share = 100 * (len(asked) - half) / len(asked)
    assert f"{share:.1f}% of {len(asked)} questions have an answer" in caplog.text
