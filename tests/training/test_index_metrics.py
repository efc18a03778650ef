"""How stale an index is, and what it finds: against loops."""

import functools

import jax
import numpy as np
import pytest

from realm_jax.answering.search import search_questions
from realm_jax.data.examples import Examples
from realm_jax.data.questions import question_examples, read_questions
from realm_jax.index.searchers import (
    DeviceSearcher,
    ScannSearcher,
    make_searcher,
    sampled_blocks,
)
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.training.index_metrics import (
    PROBE_NEIGHBOURS,
    PROBE_QUERIES,
    HeldOutQuestions,
    Probe,
    mean_kl,
)
from tests.refused import refused
from tests.tiny_world import LENGTHS
from tests.training.loss_twins import draw
from tests.training.runs import embeddings_of, towers_of


@pytest.fixture(scope="module")
def tower(corpus):
    params = draw(corpus.vocabulary.size, KnowledgeEncoder)
    return towers_of(corpus), params["retriever"]


@pytest.fixture(scope="module")
def sample(corpus, tower):
    """A probe, the parameters of now, and the embeddings that they give."""
    config, params = tower
    examples = Examples.open(corpus.directory / "examples" / "asked" / "train")
    queries = examples.batch(np.arange(min(PROBE_QUERIES, len(examples))))["query_ids"]
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
        found = np.argsort(-stale @ query, kind="stable")[:PROBE_NEIGHBOURS]
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


@pytest.fixture(scope="module")
def embeddings(corpus):
    rng = np.random.default_rng(0)
    return rng.standard_normal((corpus.num_blocks, 8)).astype(np.float32)


@pytest.fixture
def held_out(world, corpus):
    return HeldOutQuestions(corpus, world.questions, "dev", LENGTHS.query)


def scores_one_by_one(tower, ids, embeddings):
    config, params = tower
    apply = functools.partial(Retriever(config).apply, method="embed_queries")
    embed = functools.partial(jax.jit(apply), {"params": params})
    return np.stack([np.asarray(embed(row[None]))[0] @ embeddings.T for row in ids])


def test_any_number_of_questions_is_searched_as_if_one_by_one(
    world, corpus, tower, embeddings
):
    questions = read_questions(world.questions)
    length = {"query_length": LENGTHS.query}
    ids = question_examples(questions, corpus.vocabulary, **length)["question_ids"]
    assert len(ids) == 72  # More than a batch, less than two.
    found = search_questions(
        *tower, make_searcher("device", embeddings), ids, corpus.num_blocks + 1
    )
    scores = scores_one_by_one(tower, ids, embeddings)
    assert found.ids.shape == (72, corpus.num_blocks + 1)
    assert (found.ids[:, -1] == -1).all()
    np.testing.assert_array_equal(np.sort(found.ids[:, :-1]), [range(24)] * 72)
    expected = np.take_along_axis(scores, found.ids[:, :-1], 1)
    np.testing.assert_allclose(found.scores[:, :-1], expected, rtol=1e-4, atol=1e-4)
    assert (np.diff(found.scores[:, :-1]) <= 0).all()


def test_recall_is_that_of_the_blocks_that_hold_the_answer(
    world, corpus, tower, embeddings, held_out
):
    searcher = make_searcher("device", embeddings)
    recall = held_out.recalls(*tower, searcher, [5])[5]
    bodies = [corpus.text(block).body.split() for block in range(corpus.num_blocks)]
    scores = scores_one_by_one(tower, held_out.ids, embeddings)
    expected = [
        any(question.answers[0] in bodies[b] for b in np.argsort(-row)[:5])
        for question, row in zip(held_out.questions, scores, strict=True)
    ]
    np.testing.assert_array_equal(recall, expected)
    assert 0 < recall.mean() < 1
    with refused("nobody"):
        HeldOutQuestions(corpus, world.questions, "nobody", LENGTHS.query)


def test_no_block_is_read_that_was_not_retrieved(
    world, corpus, tower, embeddings, monkeypatch
):
    """Also when several k are asked for, of which the largest decides."""
    read = []
    texts = type(corpus).texts

    def counted(store, block_ids):
        read.extend(np.asarray(block_ids).tolist())
        return texts(store, block_ids)

    monkeypatch.setattr(type(corpus), "texts", counted)
    held_out = HeldOutQuestions(corpus, world.questions, "dev", LENGTHS.query)
    assert read == []
    searcher = make_searcher("device", embeddings)
    found = search_questions(*tower, searcher, held_out.ids, 2)
    recalls = held_out.recalls(*tower, searcher, (1, 2))
    assert read == np.unique(found.ids).tolist()
    assert len(read) < corpus.num_blocks
    alone = held_out.recalls(*tower, searcher, [1])
    np.testing.assert_array_equal(recalls[1], alone[1])
