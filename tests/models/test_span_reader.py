"""The span reader against a loop over spans, and which spans count."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.models.bert import Bert
from realm_jax.models.span_reader import SpanReader, span_bounds, span_validity
from tests.models.conftest import apply

MAX_SPAN = 4


@pytest.fixture(scope="module")
def params(config, joined, random_params):
    return random_params(SpanReader(config, max_span=MAX_SPAN), *joined)


def test_scores_are_those_of_a_loop_over_spans(config, params, joined):
    epsilon = 1.0
    module = SpanReader(config, max_span=MAX_SPAN, layer_norm_epsilon=epsilon)
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


def test_every_short_span_has_one_number():
    starts, ends = span_bounds(320, 10)
    inside = ends < 320
    pairs = set(zip(starts[inside].tolist(), ends[inside].tolist(), strict=True))
    # ORQA's 3155 spans of a sequence of 320.
    assert len(pairs) == inside.sum() == 3155
    assert pairs == {(s, e) for s in range(320) for e in range(s, min(s + 10, 320))}


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
