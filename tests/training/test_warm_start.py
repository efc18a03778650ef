import numpy as np
import pytest

from realm_jax.errors import BadInputError
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.storage import open_store
from realm_jax.training import warm_start
from realm_jax.training.accounting import Part
from realm_jax.training.checkpoints import restore_params
from realm_jax.training.initialization import initial_params
from realm_jax.training.metrics import read_metrics
from realm_jax.training.stage import Stage
from tests import tiny_world
from tests.tiny_world import LENGTHS, NEVER, assert_same_bits, differing, silent


@pytest.fixture(scope="module")
def uninterrupted(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("warm_start")
    assert warm_start.run(tiny_world.warm_start_config(world, folder), silent, NEVER)
    return folder


def params_of(folder):
    return restore_params(open_store(folder)).tree


def test_it_trains_towers_and_reader_from_what_the_seed_draws(uninterrupted, corpus):
    config = tiny_world.models().retriever_config(corpus.vocabulary.size)
    drawn, _ = initial_params(
        Retriever(config), KnowledgeEncoder(config.bert), LENGTHS, seed=0
    )
    same = {
        name.removesuffix("/bias").removesuffix("/kernel")
        for name in {*_names(drawn)} - differing(drawn, params_of(uninterrupted))
    }
    # Nothing reads the pooler of the reader; its bias gets no decay either.
    assert same <= {"reader/bert/pooler"}


def _names(tree):
    return differing(tree, _map(lambda x: x + 1, tree))


def _map(function, tree):
    return {
        name: _map(function, value) if isinstance(value, dict) else function(value)
        for name, value in tree.items()
    }


def test_its_metrics_tell_both_losses(uninterrupted):
    lines = list(read_metrics(str(uninterrupted)))
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        both = line["retriever_loss"] + line["reader_loss"]
        assert line["loss"] == pytest.approx(both, rel=1e-5)
        assert 0 <= line["in_batch_accuracy"] <= 1
        assert 0 < line["padding_share"] < 1


def test_its_metrics_tell_how_fast_it_was_and_why(uninterrupted):
    for line in read_metrics(str(uninterrupted)):
        seconds = 1 / line["steps_per_second"]
        assert sum(line[f"{part.value}_seconds"] for part in Part) == pytest.approx(
            seconds
        )
        assert line["examples_per_second"] == pytest.approx(4 / seconds)
        assert line["model_tflops_per_second"] * seconds > 0
        # Nobody knows what a CPU can do.
        assert "model_flops_utilization" not in line


def test_stopped_and_resumed_it_ends_at_the_same_bits(world, uninterrupted, tmp_path):
    config = tiny_world.warm_start_config(world, tmp_path)
    stop, report = tiny_world.stop_after(2)
    assert not warm_start.run(config, report, stop)
    assert warm_start.run(config, silent, NEVER)
    assert_same_bits(params_of(tmp_path), params_of(uninterrupted))


@pytest.mark.parametrize("changed", [{"reader_batch_size": 3}, {"pairs_task": "asked"}])
def test_another_order_of_examples_is_not_resumed(world, uninterrupted, changed):
    config = tiny_world.warm_start_config(world, uninterrupted, **changed)
    with pytest.raises(BadInputError, match=next(iter(changed))):
        warm_start.run(config, silent, NEVER)


def test_each_sentence_is_read_with_its_own_block(world, corpus, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Stage,
        "train",
        lambda stage, loss, inputs_at, **others: seen.append(inputs_at(0, stage.state)),
    )
    config = tiny_world.warm_start_config(world, tmp_path, reader_batch_size=6)
    warm_start.run(config, silent, NEVER)
    (inputs,) = seen
    assert inputs.pairs.query_ids.shape[0] == 4
    assert inputs.joined_ids.shape == (6, LENGTHS.joined)
    bodies = corpus.body_ids(np.asarray(inputs.batch.source_block), LENGTHS.document)
    for row, segments, query, body in zip(
        inputs.joined_ids,
        inputs.joined_segment_ids,
        inputs.batch.query_ids,
        bodies,
        strict=True,
    ):
        np.testing.assert_array_equal(row[segments == 1][:-1], body[body != 0])
        np.testing.assert_array_equal(row[: np.count_nonzero(query)], query[query != 0])


def test_sentences_without_a_block_are_bad_input(world, tmp_path):
    config = tiny_world.warm_start_config(world, tmp_path, task="asked")
    with pytest.raises(BadInputError, match="its own block"):
        warm_start.run(config, silent, NEVER)
