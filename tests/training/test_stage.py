import dataclasses

import pytest

from bench.invented_world import WorldConfig
from realm_jax.errors import BadInputError
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.storage import open_store
from realm_jax.training import pretrain, warm_start
from realm_jax.training.checkpoint_manifests import finished_steps, read_details
from realm_jax.training.checkpoints import restore_params
from realm_jax.training.stage import Stage, open_examples, require_one_of
from tests import tiny_world
from tests.tiny_world import NEVER, differing, silent


def files_of(folder):
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"models": tiny_world.models(hidden=32)}, "model"),
        ({"models": tiny_world.models(shared=True)}, "model"),
        ({"batch_size": 8}, "batch_size"),
        ({"task": "stated"}, "task"),
        ({"seed": 1}, "seed"),
    ],
)
def test_a_run_of_other_settings_is_refused_and_left_alone(
    world, uninterrupted, changes, named
):
    config = tiny_world.pretrain_config(world, uninterrupted, **changes)
    before = files_of(uninterrupted)
    with pytest.raises(BadInputError, match=f"a run with {named} "):
        pretrain.run(config, silent, NEVER)
    assert files_of(uninterrupted) == before


def test_a_run_of_another_corpus_is_refused(world, uninterrupted, tmp_path):
    # The same vocabulary and so the same model, but other blocks.
    other = tiny_world.make(tmp_path, dataclasses.replace(tiny_world.WORLD, seed=1))
    config = tiny_world.pretrain_config(other, uninterrupted)
    with pytest.raises(BadInputError, match="a run with corpus_fingerprint "):
        pretrain.run(config, silent, NEVER)


def test_a_run_of_another_stage_is_refused(world, uninterrupted):
    config = tiny_world.warm_start_config(world, uninterrupted)
    with pytest.raises(BadInputError, match="a run with stage 'warm_start'"):
        warm_start.run(config, silent, NEVER)


def test_a_run_that_is_done_trains_no_more(world, uninterrupted):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    checkpoint = read_details(open_store(uninterrupted))
    config = tiny_world.pretrain_config(world, uninterrupted)

    def report(step, total, values):
        raise AssertionError("trained")

    assert pretrain.run(config, report, NEVER)
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before
    assert read_details(open_store(uninterrupted)) == checkpoint


def test_each_checkpoint_is_saved_and_described_once(world, tmp_path):
    config = tiny_world.warm_start_config(
        world, tmp_path, train_steps=4, checkpoint_period=2
    )
    stage = Stage("described", config, KnowledgeEncoder)
    described = []

    def describe():
        described.append(len(described))
        return {"number": len(described)}

    def no_loss(params, inputs, key):
        return 0.0 * params["reader"]["head_bias"].sum(), {}

    assert stage.train(
        no_loss,
        lambda step, state: {},
        report=silent,
        stop=NEVER,
        checkpoint_details=describe,
    )
    stage.close()
    assert finished_steps(stage.model_store) == [2, 4]
    assert described == [0, 1]
    assert read_details(stage.model_store)[1]["number"] == 2


@pytest.mark.parametrize(
    ("make", "sources", "warned"),
    [
        (tiny_world.pretrain_config, {}, ["retriever", "reader"]),
        (tiny_world.pretrain_config, {"warm_start"}, []),
        (tiny_world.pretrain_config, {"reader_warm_start"}, ["retriever"]),
        (tiny_world.finetune_config, {"retriever_warm_start"}, ["reader"]),
        (tiny_world.warm_start_config, {"reader_warm_start"}, []),
    ],
)
def test_random_models_are_warned_of_but_in_a_warm_start(
    world, uninterrupted, tmp_path, caplog, make, sources, warned
):
    config = make(world, tmp_path, **dict.fromkeys(sources, str(uninterrupted)))
    stage = Stage("started", config, KnowledgeEncoder)
    stage.close()
    messages = [record.getMessage() for record in caplog.records]
    said = [line for line in messages if "from random parameters" in line]
    assert [line.split()[1] for line in said] == warned
    before = restore_params(open_store(uninterrupted)).tree
    for model in ("retriever", "reader"):
        has_source = bool({"warm_start", f"{model}_warm_start"} & set(sources))
        assert has_source != bool(differing(stage.state.params[model], before[model]))


@pytest.mark.parametrize("task", ["nothing", ""])
def test_an_unknown_task_is_bad_input(corpus, task):
    with pytest.raises(BadInputError, match="realm prepare"):
        open_examples(corpus, task, "train")


def test_examples_of_another_corpus_are_bad_input(corpus, tmp_path):
    other = tiny_world.make(tmp_path, WorldConfig(12, 6, 20, 12, seed=1))
    examples = tmp_path / "corpus" / "examples" / "asked" / "train"
    assert other.corpus
    moved = corpus.directory / "examples" / "foreign" / "train"
    moved.parent.mkdir()
    examples.rename(moved)
    with pytest.raises(BadInputError, match="corpus_fingerprint"):
        open_examples(corpus, "foreign", "train")


def test_a_setting_outside_its_choices_is_named():
    require_one_of("marginalization", "per_span", Marginalization)
    with pytest.raises(BadInputError, match="per_token, per_span, got 'spans'"):
        require_one_of("marginalization", "spans", Marginalization)
