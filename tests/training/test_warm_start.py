import dataclasses
import functools
import shutil

import flax.traverse_util
import jax
import numpy as np
import pytest

from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import span_bounds
from realm_jax.training import warm_start
from realm_jax.training.optimizers import OptimizerConfig
from realm_jax.training.warm_start import ReaderMixture
from tests import tiny_world
from tests.refused import refused
from tests.tiny_world import LENGTHS, NEVER, assert_same_bits, differing, silent
from tests.training.runs import (
    drawn_params,
    embeddings_of,
    index_of,
    inputs_of,
    params_of,
    run_to_end,
    stop_run,
    towers_of,
)
from tests.training.test_reader_documents import slowly


@pytest.fixture(scope="module")
def uninterrupted(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm_start")
    run_to_end(warm_start, world, folder)
    return folder


def test_it_trains_towers_and_reader_from_what_the_seed_draws(uninterrupted, corpus):
    drawn = drawn_params(corpus)
    names = flax.traverse_util.flatten_dict(drawn, sep="/").keys()
    same = names - differing(drawn, params_of(uninterrupted))
    # Nothing reads the pooler of the reader; its bias gets no decay either.
    assert all(name.startswith("reader/bert/pooler/") for name in same)


def test_its_metrics_tell_both_losses_and_how_fast_it_was(uninterrupted):
    lines = list(read_metrics(str(uninterrupted)))
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        both = line["retriever_loss"] + line["reader_loss"]
        assert line["loss"] == pytest.approx(both, rel=1e-5)
        assert 0 <= line["in_batch_accuracy"] <= 1
        assert 0 < line["padding_share"] < 1
        examples = 4 * line["steps_per_second"]
        assert line["examples_per_second"] == pytest.approx(examples)


def test_the_span_scorer_is_shown_every_masked_span(world, tmp_path, monkeypatch):
    models = dataclasses.replace(tiny_world.models(), span_scorer=True)
    config = tiny_world.warm_start_config(world, tmp_path, models=models, pairs_task="")
    (inputs,) = inputs_of(monkeypatch, warm_start, config)
    reading = inputs.reading
    starts, ends = span_bounds(LENGTHS.joined)
    for row, answers in enumerate(reading.span_is_answer):
        scored = reading.batch.mask_weights[row] > 0
        wanted = list(reading.batch.mask_ids[row][scored])
        in_body = [
            span
            for span in np.flatnonzero(answers)
            if reading.joined_segment_ids[row, starts[span]] == 1
        ]
        # The sentence's own block repeats what was masked.
        assert in_body
        for span in in_body:
            found = reading.joined_ids[row, starts[span] : ends[span] + 1]
            assert list(found) == wanted


def test_unmasked_wordpieces_are_predicted_in_place(world, tmp_path, monkeypatch):
    config = tiny_world.warm_start_config(
        world, tmp_path, score_unmasked=True, reader_batch_size=6
    )
    inputs = inputs_of(monkeypatch, warm_start, config, 2)
    assert inputs[0].pairs.query_ids.shape[0] == 4
    first, second = (one.reading for one in inputs)
    assert first.joined_ids.shape == (6, LENGTHS.joined)
    targets = first.unmasked
    scored = targets.weights > 0
    assert scored.any()
    assert not (scored & (first.batch.mask_weights > 0)).any()
    row = np.nonzero(scored)[0]
    there = first.joined_ids[row, targets.positions[scored]]
    np.testing.assert_array_equal(there, targets.ids[scored])
    assert (second.unmasked.positions != targets.positions).any()
    (without,) = inputs_of(
        monkeypatch, warm_start, dataclasses.replace(config, score_unmasked=False)
    )
    assert without.reading.unmasked is None
    np.testing.assert_array_equal(without.reading.joined_ids, first.joined_ids)


# 20 of the 24 blocks of the tiny world.
MIXTURE = ReaderMixture(own=0.3, null=0.2, retrieved=0.5)
EVERY_BLOCK = ReaderMixture(own=0.3, null=0.2, retrieved=0.5, num_retrieved=24)


def reader_config(world, folder, **changes):
    """The reader alone, with documents of every kind."""
    values = {"pairs_task": "", "mixture": MIXTURE, "embed": tiny_world.EMBED}
    values["reader_batch_size"] = 8
    return tiny_world.warm_start_config(world, folder, **(values | changes))


@pytest.fixture(scope="module")
def reader_alone(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader_alone")
    assert warm_start.run(reader_config(world, folder), silent, NEVER)
    return folder


def test_a_reader_alone_leaves_the_retriever_as_it_is(world, reader_alone, corpus):
    trained, drawn = params_of(reader_alone), drawn_params(corpus)
    assert_same_bits(trained["retriever"], drawn["retriever"])
    assert "reader/bert/token_embedding/embedding" in differing(drawn, trained)
    for line in read_metrics(str(reader_alone)):
        assert line["loss"] == line["reader_loss"]
        assert not {"retriever_loss", "in_batch_accuracy"} & line.keys()
        kinds = [f"reader_loss_{kind}" for kind in ("own", "null", "retrieved")]
        losses = [line[kind] for kind in kinds if kind in line]
        assert min(losses) <= line["reader_loss"] <= max(losses)
        # Sentences, for there are no pairs.
        examples = 8 * line["steps_per_second"]
        assert line["examples_per_second"] == pytest.approx(examples)
    lines = list(read_metrics(str(reader_alone)))
    retriever_alone = tiny_world.warm_start_config(world, "nowhere", task="")
    assert warm_start.frozen_parameters(retriever_alone) == ("reader",)
    assert any(0 < line.get("answer_retrieved", 0) <= 1 for line in lines)


def test_no_update_puts_the_two_sources_into_one_checkpoint(
    world, uninterrupted, reader_alone, tmp_path
):
    sources = {"retriever": uninterrupted, "reader": reader_alone}
    given = {f"{model}_warm_start": str(source) for model, source in sources.items()}
    # As the run file has it: longer than the run.
    given["optimizer"] = functools.partial(OptimizerConfig, 1e-4, 10_000)
    run_to_end(warm_start, world, tmp_path, train_steps=0, **given)
    together = params_of(tmp_path)
    for model, source in sources.items():
        assert_same_bits(together[model], params_of(source)[model])


def test_a_mixture_that_is_resumed_ends_at_the_same_bits(world, reader_alone, tmp_path):
    config = reader_config(world, tmp_path)
    stop_run(warm_start, config, 2)
    (commit,) = (tmp_path / "index/commits").iterdir()
    before = commit.read_bytes()
    assert warm_start.run(config, silent, NEVER)
    assert commit.read_bytes() == before
    assert_same_bits(params_of(tmp_path), params_of(reader_alone))


def pieces(row):
    return [int(piece) for piece in row if piece]


def test_every_row_is_joined_with_a_document_of_its_kind(
    world, corpus, tmp_path, monkeypatch
):
    config = reader_config(
        world, tmp_path, reader_batch_size=24, mixture=EVERY_BLOCK, train_steps=2
    )
    seen = inputs_of(monkeypatch, warm_start, config, steps=2)
    every = np.arange(corpus.num_blocks)
    bodies = [pieces(row) for row in corpus.body_ids(every, LENGTHS.document)]
    params = drawn_params(corpus)
    towers = towers_of(corpus)
    embed_queries = jax.jit(
        functools.partial(Retriever(towers).apply, method="embed_queries")
    )
    documents = embeddings_of(params["retriever"], corpus)
    counted = {0: 0, 1: 0, 2: 0}
    for inputs in seen:
        assert inputs.pairs is None
        reading, batch = inputs.reading, inputs.reading.batch
        queries = embed_queries({"params": params["retriever"]}, batch.query_ids)
        queries = np.asarray(queries)
        for i, kind in enumerate(reading.kind):
            query, joined = pieces(batch.query_ids[i]), pieces(reading.joined_ids[i])
            assert joined[: len(query)] == query
            assert joined[-1] == corpus.vocabulary.sep
            body = joined[len(query) : -1]
            segments = [0] * len(query) + [1] * (len(body) + 1)
            segments += [0] * (LENGTHS.joined - len(segments))
            assert reading.joined_segment_ids[i].tolist() == segments
            counted[int(kind)] += 1
            source = int(batch.source_block[i])
            if kind < 2:
                assert body == (bodies[source] if kind == 0 else [])
                assert not reading.has_answer[i]
                continue
            sentence = list(query)
            masked = [place for place in batch.mask_positions[i] if place]
            for position, piece in zip(masked, batch.mask_ids[i], strict=False):
                sentence[position] = int(piece)
            scores = documents @ queries[i]
            places = [position - 1 for position in masked]
            given = np.argsort(-scores), sentence[1:-1], places, source
            block, has_answer = slowly(bodies, *given, LENGTHS.joined)
            assert reading.has_answer[i] == has_answer
            found = bodies.index(body)
            assert scores[found] == pytest.approx(scores[block], abs=1e-4)
    assert all(counted.values())
    found = np.concatenate([inputs.reading.has_answer for inputs in seen])
    assert 0 < found.sum() < counted[2]


def test_what_is_read_where_no_neighbour_holds_the_answer_is_a_choice(
    world, corpus, tmp_path, monkeypatch
):
    for instead in ("own", "null"):
        mixture = ReaderMixture(0, 0, 1, num_retrieved=2, without_answer=instead)
        config = reader_config(world, tmp_path, reader_batch_size=16, mixture=mixture)
        (inputs,) = inputs_of(monkeypatch, warm_start, config)
        reading = inputs.reading
        (without,) = np.nonzero(~reading.has_answer)
        assert len(without)
        blocks = np.asarray(reading.batch.source_block)[without]
        expected, _ = corpus.joined_ids(
            reading.batch.query_ids[without],
            (blocks if instead == "own" else np.full_like(blocks, -1))[:, None],
            LENGTHS.joined,
        )
        np.testing.assert_array_equal(reading.joined_ids[without], expected[:, 0])


def test_sentences_without_a_block_can_be_read_with_what_is_retrieved(
    world, tmp_path, monkeypatch
):
    mixture = ReaderMixture(0, 0.5, 0.5)
    config = reader_config(world, tmp_path, task="asked", mixture=mixture)
    (inputs,) = inputs_of(monkeypatch, warm_start, config)
    assert (inputs.reading.batch.source_block == -1).all()
    falls_back = ReaderMixture(0, 0.5, 0.5, without_answer="own")
    for own in (falls_back, ReaderMixture()):
        config = reader_config(world, tmp_path, task="asked", mixture=own)
        with refused("its own block"):
            warm_start.run(config, silent, NEVER)


def test_a_lost_index_is_made_again_only_of_a_retriever_that_stayed(
    world, reader_alone, tmp_path, monkeypatch, quick_updates
):
    folder = tmp_path / "alone"
    shutil.copytree(reader_alone, folder)
    shutil.rmtree(folder / "index")
    longer = reader_config(world, folder, train_steps=4)
    inputs_of(monkeypatch, warm_start, longer)
    np.testing.assert_array_equal(*map(index_of, (folder, reader_alone)))
    quick_updates(warm_start, "WarmStartLoss")
    both = reader_config(world, tmp_path / "both", pairs_task="pairs")
    stop_run(warm_start, both, 2)
    shutil.rmtree(tmp_path / "both" / "index")
    with refused("its retriever has trained on"):
        warm_start.run(both, silent, NEVER)
