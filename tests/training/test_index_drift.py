"""How stale an index is: zero for a fresh one, and by a loop for another."""

import numpy as np
import pytest

from realm_jax.data.examples import Examples
from realm_jax.index.searchers import DeviceSearcher, ScannSearcher, sampled_blocks
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.training.index_drift import NEIGHBOURS, NUM_QUERIES, Probe, mean_kl
from tests import tiny_world
from tests.tiny_world import LENGTHS
from tests.training.loss_twins import draw
from tests.training.runs import embeddings_of


@pytest.fixture(scope="module")
def sample(corpus):
    """A probe, the parameters of now, and the embeddings that they give."""
    config = tiny_world.models().retriever_config(corpus.vocabulary.size)
    params = draw(corpus.vocabulary.size, KnowledgeEncoder)["retriever"]
    examples = Examples.open(corpus.directory / "examples" / "asked" / "train")
    queries = examples.batch(np.arange(min(NUM_QUERIES, len(examples))))["query_ids"]
    fresh = embeddings_of(params, corpus)
    return Probe(corpus, config, queries, LENGTHS.document), params, fresh


@pytest.mark.parametrize("searcher", [DeviceSearcher, ScannSearcher])
def test_a_fresh_index_has_not_drifted(sample, searcher):
    probe, params, fresh = sample
    measured = probe.of_index(params, searcher(fresh))
    assert measured["index_drift"] < 1e-4
    assert abs(measured["retrieval_kl"]) < 1e-4
    assert measured["index_search_seconds"] > 0


def test_drift_and_divergence_are_those_of_a_loop(sample, corpus):
    probe, params, fresh = sample
    rng = np.random.default_rng(0)
    stale = fresh + 0.3 * rng.standard_normal(fresh.shape).astype(np.float32)
    measured = probe.of_index(params, DeviceSearcher(stale))
    blocks = sampled_blocks(corpus.num_blocks)
    drift = [
        np.linalg.norm(stale[b] - fresh[b]) / np.linalg.norm(fresh[b]) for b in blocks
    ]
    assert measured["index_drift"] == pytest.approx(np.mean(drift), rel=1e-3)
    divergences = []
    for query in np.asarray(probe._embed_queries(params, probe._query_ids), float):
        found = np.argsort(-stale @ query, kind="stable")[:NEIGHBOURS]
        p, q = np.exp(stale[found] @ query), np.exp(fresh[found] @ query)
        p, q = p / p.sum(), q / q.sum()
        divergences.append(np.sum(p * np.log(p / q)))
    assert measured["retrieval_kl"] == pytest.approx(np.mean(divergences), rel=1e-2)
    assert measured["retrieval_kl"] > 0.01


def test_neighbours_that_stay(sample):
    probe, params, fresh = sample
    same = probe.of_refresh(params, DeviceSearcher(fresh), ScannSearcher(fresh))
    assert same == {"same_neighbours": 1.0, "kept_neighbours": 1.0}
    other = DeviceSearcher(-fresh)
    moved = probe.of_refresh(params, DeviceSearcher(fresh), other)
    assert moved["same_neighbours"] == 0.0
    # Half of so few blocks are among the best and the worst alike by chance at most.
    assert moved["kept_neighbours"] < 0.5


def test_divergence_leaves_out_what_was_not_found():
    stale = np.array([[1.0, 0.0, -np.inf], [0.5, 0.5, 0.5]])
    live = np.array([[1.0, 0.0, 9.0], [0.5, 0.5, 0.5]])
    valid = np.array([[True, True, False], [True, True, True]])
    assert mean_kl(stale, live, valid) == pytest.approx(0.0, abs=1e-12)
    live[0] = [0.0, 1.0, 9.0]
    p = 1 / (1 + np.exp(-1.0))
    assert mean_kl(stale, live, valid) == pytest.approx((2 * p - 1) / 2)
