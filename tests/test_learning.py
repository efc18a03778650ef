"""REALM learns: facts that nobody could know, no labels, one seed, minutes.

More seeds, with intervals, and the recipe that collapses: `bench/learning.py` and
docs/results.md.
"""

import dataclasses

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

RECIPE = Recipe()
# With the retriever frozen nothing can move, however long the reader learns.
CONTROL = dataclasses.replace(RECIPE, pretrain_steps=40, frozen=("retriever",))


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("world"))
    world = make_world(folder, WorldConfig())
    # Here arithmetic takes the time, and no compiling.
    with compiled.as_it_comes():
        run_warm_start(world, RECIPE, f"{folder}/warm_start")
        run_pretrain(world, RECIPE, f"{folder}/realm", f"{folder}/warm_start")
        run_pretrain(world, CONTROL, f"{folder}/control", f"{folder}/warm_start")
        return {
            name: measure(world, RECIPE, f"{folder}/{name}")
            for name in ("warm_start", "realm", "control")
        }


@pytest.mark.timeout(1800)  # Six minutes where nothing else runs.
def test_the_warm_start_finds_the_entity_but_not_the_relation(learned):
    assert 0.3 <= learned["warm_start"].recall_at_1 <= 0.65


def test_realm_finds_the_block_that_states_the_fact(learned):
    assert learned["realm"].recall_at_1 >= 0.85


def test_documents_help_to_predict(learned):
    realm = learned["realm"]
    assert realm.likelihood - realm.null_likelihood >= 0.15


def test_a_frozen_retriever_does_not_move(learned):
    assert learned["control"].recall_at_1 == learned["warm_start"].recall_at_1
