"""The masked-LM head and the span reader against numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.models.bert import Bert
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.span_reader import SpanReader, span_bounds, span_validity
from tests.models.conftest import apply

POSITIONS = np.array([[1, 2, 3], [3, 1, 0], [1, 0, 0], [5, 5, 2]], np.int32)


@pytest.fixture(scope="module")
def params(config, joined, random_params):
    return random_params(KnowledgeEncoder(config), *joined, POSITIONS)


@pytest.fixture(scope="module")
def logits(config, params, joined):
    return apply(KnowledgeEncoder(config), params, *joined, POSITIONS)


def test_logits_are_the_tied_head_at_masked_positions(config, params, joined, logits):
    sequence = np.float64(apply(Bert(config), params["bert"], *joined).sequence)
    table = np.float64(params["bert"]["token_embedding"]["embedding"])
    for row, positions in enumerate(POSITIONS):
        for column, position in enumerate(positions):
            x = sequence[row, position] @ params["head_dense"]["kernel"]
            x = x + params["head_dense"]["bias"]
            x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
            x = (x - x.mean()) / np.sqrt(x.var() + config.layer_norm_epsilon)
            x = x * params["head_norm"]["scale"] + params["head_norm"]["bias"]
            expected = table @ x + params["head_bias"]
            np.testing.assert_allclose(logits[row, column], expected, atol=1e-4)
    assert logits.dtype == jnp.float32


def test_log_probs_are_those_of_the_masked_wordpieces(config, params, joined, logits):
    mask_ids = np.array([[4, 0, 39], [7, 7, 1], [20, 0, 0], [3, 8, 12]], np.int32)
    inputs = *joined, POSITIONS, mask_ids
    found = apply(KnowledgeEncoder(config), params, *inputs, method="token_log_probs")
    log_probs = scipy.special.log_softmax(np.float64(logits), axis=-1)
    expected = np.take_along_axis(log_probs, mask_ids[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_masks_of_an_example_serve_all_its_candidates(config, params, joined):
    """Positions and targets [batch, 1, mask] against sequences [batch, candidate]."""
    ids, segment_ids = (x.reshape(2, 2, -1) for x in joined)
    positions, mask_ids = POSITIONS[:2, None], np.array([[[1, 2, 3]], [[4, 5, 6]]])

    def log_probs(*masks):
        module, inputs = KnowledgeEncoder(config), (ids, segment_ids, *masks)
        return apply(module, params, *inputs, method="token_log_probs")

    found = log_probs(positions, mask_ids)
    repeated = log_probs(np.repeat(positions, 2, 1), np.repeat(mask_ids, 2, 1))
    assert found.shape == (2, 2, 3)
    np.testing.assert_allclose(found, repeated, rtol=1e-5)


def test_its_span_scorer_is_the_span_readers(config, joined, random_params):
    """The same parameters under the same names give the same scores, of one pass."""
    module = KnowledgeEncoder(config, span_scorer=True)
    params = random_params(module, *joined, POSITIONS)
    inputs = *joined, POSITIONS, np.full_like(POSITIONS, 7)
    tokens, spans = apply(module, params, *inputs, method="tokens_and_spans")
    names = ("bert", "span_dense", "span_norm", "span_output")
    of_scorer = {name: params[name] for name in names}
    expected = apply(SpanReader(config), of_scorer, *joined)
    np.testing.assert_allclose(spans.logits, expected.logits, atol=1e-5)
    np.testing.assert_array_equal(spans.valid, expected.valid)
    alone = apply(module, params, *inputs, method="token_log_probs")
    np.testing.assert_allclose(tokens, alone, atol=1e-5)


MAX_SPAN = 4


def test_scores_are_those_of_a_loop_over_spans(config, joined, random_params):
    epsilon = 1.0
    module = SpanReader(config, max_span=MAX_SPAN, layer_norm_epsilon=epsilon)
    params = random_params(module, *joined)
    ids, segment_ids = (x.reshape(2, 2, -1) for x in joined)
    scores = apply(module, params, ids, segment_ids)
    sequence = apply(Bert(config), params["bert"], *joined).sequence
    dense, norm = params["span_dense"], params["span_norm"]
    halves = np.asarray(sequence, np.float64) @ dense["kernel"] + dense["bias"]

    starts, ends = span_bounds(12, MAX_SPAN)
    assert scores.logits.shape == scores.valid.shape == (2, 2, len(starts))
    logits, valid = (np.asarray(x).reshape(4, -1) for x in scores)
    for row in range(4):
        for span in np.flatnonzero(valid[row]):
            start, end = starts[span], ends[span]
            x = np.maximum(halves[row, start, :256] + halves[row, end, 256:], 0)
            x = (x - x.mean()) / np.sqrt(x.var() + epsilon)
            x = x * norm["scale"] + norm["bias"]
            expected = x @ params["span_output"]["kernel"][:, 0]
            expected += params["span_output"]["bias"][0]
            assert logits[row, span] == pytest.approx(expected, abs=1e-3)


def test_spans_are_as_many_as_those_of_orqa():
    _, ends = span_bounds(320, 10)
    assert (ends < 320).sum() == 3155


@settings(max_examples=40)
@given(query=st.integers(1, 6), body=st.integers(0, 6))
def test_valid_spans_lie_within_the_body(query, body):
    # [CLS] and `query` pieces, [SEP], the body, [SEP], padding.
    before, length = query + 2, 15
    ids = np.zeros((1, length), np.int32)
    ids[:, : before + body + 1] = 1
    segment_ids = np.zeros_like(ids)
    segment_ids[:, before : before + body + 1] = 1
    valid = np.asarray(span_validity(ids, segment_ids, MAX_SPAN))[0]
    starts, ends = span_bounds(length, MAX_SPAN)
    found = set(zip(starts[valid].tolist(), ends[valid].tolist(), strict=True))
    assert found == {
        (start, end)
        for start in range(before, before + body)
        for end in range(start, min(start + MAX_SPAN, before + body))
    }
