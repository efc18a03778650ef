"""The span scorer on its way from the warm start through REALM to fine-tuning."""

import dataclasses

import pytest

from realm_jax.training import pretrain, warm_start
from realm_jax.training.stage import Stage
from tests import tiny_world
from tests.refused import refused
from tests.tiny_world import NEVER, assert_same_bits, differing, silent
from tests.training.runs import drawn_params, params_of, run_to_end

pytestmark = pytest.mark.full

SCORER = ("span_dense", "span_norm", "span_output")
MODELS = dataclasses.replace(tiny_world.models(), span_scorer=True)


@pytest.fixture(scope="module")
def configs(world, tmp_path_factory):
    """A warm start and REALM's updates from it, both done."""
    folder = tmp_path_factory.mktemp("span_scorer")
    started = run_to_end(warm_start, world, folder / "started", models=MODELS)
    settings = {"models": MODELS, "train_steps": 2, "warm_start": started.model_dir}
    return started, run_to_end(pretrain, world, folder / "trained", **settings)


def scorer_of(params):
    return {name: params["reader"][name] for name in SCORER}


def test_the_warm_start_trains_it(configs, corpus):
    drawn = drawn_params(corpus, MODELS.knowledge_encoder)
    trained = params_of(configs[0].model_dir)
    changed = differing(scorer_of(drawn), scorer_of(trained))
    assert {name.split("/")[0] for name in changed} == set(SCORER)


def test_realm_hands_it_on_as_it_is_to_fine_tuning(world, configs, tmp_path):
    started, trained = (params_of(config.model_dir) for config in configs)
    assert_same_bits(scorer_of(started), scorer_of(trained))
    assert differing(started["reader"]["bert"], trained["reader"]["bert"])
    config = tiny_world.finetune_config(
        world, tmp_path, warm_start=configs[1].model_dir
    )
    stage = Stage(config, config.make_reader)
    assert_same_bits(scorer_of(stage.state.params), scorer_of(trained))
    stage.close()


def test_realm_with_one_does_not_go_on_without(configs):
    without = dataclasses.replace(configs[1], models=tiny_world.models())
    with refused("span_scorer"):
        pretrain.run(without, silent, NEVER)
