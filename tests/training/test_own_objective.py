"""An objective of one's own is chosen by name, and stages train with it."""

import math

import jax
import numpy as np
import pytest

from examples.own_objective import perplexity_distillation
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.objectives import pretraining
from realm_jax.objectives.pretraining import register_objective, registered
from realm_jax.training import pretrain
from realm_jax.training.pretrain_loss import PretrainLoss
from tests import tiny_world
from tests.refused import refused
from tests.training.loss_twins import (
    KEY,
    make,
    measured,
    pretrain_inputs,
    twin_of_pretrain,
)
from tests.training.runs import run_to_end


@pytest.fixture(autouse=True)
def _of_this_test(monkeypatch):
    registry = pretraining._OBJECTIVES
    monkeypatch.setattr(registry, "_things", dict(registry._things))


def test_the_example_equals_its_twin_and_the_reader_does_not_learn_to_agree(corpus):
    """Both terms by a loop in float64, one sentence at a time."""
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    loss = PretrainLoss(retriever, reader, objective=perplexity_distillation)
    value, found = measured(loss, params, inputs)
    divergences, surprises = [], []
    for retrieval, tokens in twin_of_pretrain(retriever, reader, params, inputs):
        if not tokens[0]:
            continue
        spans = [math.prod(row) for row in tokens]
        teacher = [span / sum(spans) for span in spans]
        divergences.append(
            sum(q * math.log(q / p) for q, p in zip(teacher, retrieval, strict=True))
        )
        surprises.append(-math.log(np.dot(retrieval, spans)))
    divergence = np.mean(divergences)
    assert value == pytest.approx(divergence + np.mean(surprises), rel=1e-4)
    assert found["distillation"] == pytest.approx(divergence, rel=1e-3)
    assert found["loss"] == pytest.approx(value, rel=1e-5)

    def gradient(objective):
        one = PretrainLoss(retriever, reader, objective=objective)
        return jax.jit(jax.grad(lambda p, x: one(p, x, KEY)[0]))(params, inputs)

    own = gradient(perplexity_distillation)
    paper = gradient(pretraining.marginal_likelihood)
    tolerance = {"rtol": 1e-3, "atol": 1e-5}
    tiny_world.assert_close(own["reader"], paper["reader"], **tolerance)
    with pytest.raises(AssertionError):
        tiny_world.assert_close(own["retriever"], paper["retriever"], **tolerance)


def test_a_run_trains_with_it_and_logs_its_metric(world, tmp_path):
    register_objective("perplexity_distillation")(perplexity_distillation)
    changes = {"objective": "perplexity_distillation", "refresh_mode": "off"}
    run_to_end(pretrain, world, tmp_path, train_steps=1, **changes)
    (line,) = read_metrics(str(tmp_path))
    assert line["distillation"] > 0


def test_unknown_and_taken_names_are_refused():
    for name in ("mine", ["mine"], None):
        with refused("expected an objective .*marginal_likelihood.*(mine|None)"):
            registered(name)
    with refused("a new name for the objective .*'marginal_likelihood'"):
        register_objective("marginal_likelihood")(perplexity_distillation)
    # As a module that is reloaded does.
    for _ in range(2):
        register_objective("distilled")(perplexity_distillation)
    assert registered("distilled") is perplexity_distillation
    # Neither of two functions that have no name of their own is taken for the other.
    register_objective("nameless")(lambda evidence: (evidence.log_share.sum(), {}))
    with refused("a new name for the objective"):
        register_objective("nameless")(lambda evidence: (evidence.log_share.max(), {}))


def test_a_metric_may_not_take_the_place_of_one_that_every_step_has(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)

    def objective(evidence):
        loss = evidence.log_share.sum()
        return loss, {"retrieval_utility": (loss, 1.0)}

    loss = PretrainLoss(retriever, reader, objective=objective)
    with refused("'retrieval_utility'"):
        jax.eval_shape(loss, params, pretrain_inputs(corpus), KEY)
