"""REALM learns: facts that nobody could know, no labels, three seeds, their median.

More seeds, with intervals, and the recipe that collapses: `bench/learning.py` and
docs/results.md.
"""

import statistics

import pytest

from bench.invented_world import (
    Recipe,
    WorldConfig,
    make_world,
    measure,
    run_pretrain,
    run_warm_start,
)
from tests import compiled

SEEDS = (0, 1, 2)
pytestmark = pytest.mark.full


def learn(folder, seed):
    """What a model of this seed knows after each stage."""
    world = make_world(folder, WorldConfig(seed=seed))
    recipe = Recipe(seed=seed)
    run_warm_start(world, recipe, f"{folder}/warm_start")
    run_pretrain(world, recipe, f"{folder}/realm", f"{folder}/warm_start")
    return {
        name: measure(world, recipe, f"{folder}/{name}")
        for name in ("warm_start", "realm")
    }


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    # Here arithmetic takes the time, and no compiling.
    with compiled.as_it_comes():
        return [
            learn(str(tmp_path_factory.mktemp(f"world-{seed}")), seed) for seed in SEEDS
        ]


def median(learned, stage, value):
    return statistics.median(value(of_seed[stage]) for of_seed in learned)


def test_the_warm_start_finds_the_entity_but_not_the_relation(learned):
    assert 0.3 <= median(learned, "warm_start", lambda m: m.recall_at_1) <= 0.65


def test_realm_finds_the_block_that_states_the_fact(learned):
    assert median(learned, "realm", lambda m: m.recall_at_1) >= 0.85


def test_documents_help_to_predict(learned):
    gain = median(learned, "realm", lambda m: m.likelihood - m.null_likelihood)
    assert gain >= 0.15
