"""Losses of spans against loops in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.objectives import open_qa
from realm_jax.objectives.open_qa import AnswerMarginalization, span_selection

BATCH, CANDIDATES, SPANS, NEIGHBOURS = 3, 2, 6, 7


@pytest.fixture
def arrays():
    rng = np.random.default_rng(4)
    scores = rng.normal(size=(BATCH, CANDIDATES))
    logits = rng.normal(size=(BATCH, CANDIDATES, SPANS))
    valid = rng.uniform(size=(BATCH, CANDIDATES, SPANS)) < 0.7
    valid[0, 1] = False  # A block without a single span, such as an empty slot.
    return scores, logits, valid


def slow_log_probs(scores, logits, valid, marginalization):
    out = np.full(logits.shape, -np.inf)
    for b in range(BATCH):
        spans = [(z, s) for z in range(CANDIDATES) for s in range(SPANS)]
        spans = [(z, s) for z, s in spans if valid[b, z, s]]
        blocks = {z for z, _ in spans}
        for z, s in spans:
            if marginalization is AnswerMarginalization.JOINT_SOFTMAX:
                mass = sum(math.exp(scores[b, i] + logits[b, i, j]) for i, j in spans)
                p = math.exp(scores[b, z] + logits[b, z, s]) / mass
            else:
                block = math.exp(scores[b, z]) / sum(
                    math.exp(scores[b, i]) for i in blocks
                )
                inside = sum(math.exp(logits[b, z, j]) for i, j in spans if i == z)
                p = block * math.exp(logits[b, z, s]) / inside
            out[b, z, s] = math.log(p)
    return out


def log_probs(arrays, marginalization):
    return open_qa.span_log_probs(*map(jnp.asarray, arrays), marginalization)


@pytest.mark.parametrize("marginalization", AnswerMarginalization)
def test_span_softmax_equals_a_loop_in_float64(arrays, marginalization):
    got = log_probs(arrays, marginalization)
    want = slow_log_probs(*arrays, marginalization)
    np.testing.assert_allclose(got, want, atol=1e-4)
    np.testing.assert_allclose(np.exp(got).sum(axis=(1, 2)), np.ones(BATCH), atol=1e-5)


@pytest.mark.parametrize("marginalization", AnswerMarginalization)
def test_losses_equal_a_loop_in_float64(arrays, marginalization):
    rng = np.random.default_rng(5)
    retrieval = rng.normal(size=(BATCH, NEIGHBOURS))
    has_answer = rng.uniform(size=(BATCH, NEIGHBOURS)) < 0.5
    has_answer[1] = False
    valid = arrays[2]
    is_answer = valid & (rng.uniform(size=valid.shape) < 0.5)
    # Answers where no span is, such as in the question, are none.
    is_answer[2] = ~valid[2]
    assert is_answer[2].any()
    got = open_qa.open_qa(
        jnp.asarray(retrieval),
        jnp.asarray(has_answer),
        log_probs(arrays, marginalization),
        jnp.asarray(is_answer),
    )
    spans = slow_log_probs(*arrays, marginalization)
    retriever = reader = 0.0
    for b in range(BATCH):
        if has_answer[b].any():
            mass = (
                np.exp(retrieval[b])[has_answer[b]].sum() / np.exp(retrieval[b]).sum()
            )
            retriever -= math.log(mass)
        if b != 2:
            reader -= math.log(np.exp(spans[b])[is_answer[b]].sum())
    assert float(got.retriever_total) == pytest.approx(retriever, abs=1e-4)
    assert float(got.reader_total) == pytest.approx(reader, abs=1e-4)
    assert float(got.loss_total) == pytest.approx(retriever + reader, abs=1e-4)
    assert float(got.retriever_count) == has_answer.any(axis=-1).sum()
    assert float(got.reader_count) == BATCH - 1
    assert float(got.count) == BATCH


def test_gradients_stay_finite_without_a_positive(arrays):
    def loss(scores, logits, valid):
        spans = open_qa.span_log_probs(
            scores, logits, valid, AnswerMarginalization.JOINT_SOFTMAX
        )
        no_block, no_span = (jnp.zeros(x.shape, bool) for x in (scores, spans))
        return open_qa.open_qa(scores, no_block, spans, no_span).loss_total

    for gradient in jax.grad(loss, argnums=(0, 1))(*map(jnp.asarray, arrays)):
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))


LOGITS = np.array([[2.0, 1.0, 0.5, 3.0], [0.0, 4.0, 1.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
VALID = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
# Two answers; one outside the body beside one that is not the best; none that exists.
ANSWER = np.array([[1, 0, 1, 1], [1, 0, 0, 0], [0, 1, 0, 0]], bool)


def test_it_is_the_mass_of_the_answers_among_the_valid_spans():
    found = jax.jit(span_selection)(jnp.asarray(LOGITS), VALID, ANSWER)
    expected = 0.0
    for logits, valid, answer in zip(LOGITS[:2], VALID, ANSWER, strict=False):
        weights = np.exp(logits) * valid
        expected -= np.log((weights * answer).sum() / weights.sum())
    assert float(found.loss_total) == pytest.approx(expected, rel=1e-5)
    assert (float(found.correct), float(found.count)) == (1.0, 2.0)


@pytest.mark.parametrize("is_answer", [ANSWER, ANSWER & ~VALID])
def test_documents_without_a_valid_answer_teach_nothing(is_answer):
    def loss(logits):
        return span_selection(logits, VALID, is_answer).loss_total

    gradient = np.asarray(jax.grad(loss)(jnp.asarray(LOGITS)))
    assert np.isfinite(gradient).all()
    taught = (is_answer & VALID).any(axis=1)
    np.testing.assert_array_equal(gradient.any(axis=1), taught)
