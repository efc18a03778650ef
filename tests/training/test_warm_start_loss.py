"""The warm start's loss against a loop in float64, one sequence at a time."""

import functools
import math

import jax
import numpy as np
import pytest

from realm_jax.metrics import means as means_lib
from realm_jax.models import span_reader
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.span_reader import SpanReader
from realm_jax.training.unmasked_targets import UnmaskedTargets
from realm_jax.training.warm_start_loss import WarmStartInputs, WarmStartLoss
from tests.tiny_world import LENGTHS
from tests.training.loss_twins import (
    KEY,
    embed,
    make,
    padding_in,
    read,
    softmax,
    token_probability,
    warm_start_inputs,
)


def test_warm_start_loss_equals_its_twin(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = warm_start_inputs(corpus)
    value, means = jax.jit(WarmStartLoss(retriever, reader))(params, inputs, KEY)
    pairs, reading, terms = inputs.pairs, inputs.reading, []
    documents = [
        embed(retriever, params, "embed_documents", *row)
        for row in zip(pairs.document_ids, pairs.document_segment_ids, strict=True)
    ]
    for i in range(3):
        query = embed(retriever, params, "embed_queries", pairs.query_ids[i])
        # Another pair of the same block is no negative.
        others = [j for j in range(3) if pairs.block_ids[j] != pairs.block_ids[i]]
        scores = [float(query @ documents[j]) for j in [i, *others]]
        terms.append(-math.log(softmax(scores)[0]))
    tokens = []
    for i, m in ((0, 0), (0, 1), (1, 0)):
        logits = read(
            reader,
            params,
            reading.joined_ids[i][None],
            reading.joined_segment_ids[i][None],
            reading.batch.mask_positions[i][None],
        )
        tokens.append(
            -math.log(
                token_probability(
                    np.asarray(logits, np.float64)[0, m], reading.batch.mask_ids[i, m]
                )
            )
        )
    found = means_lib.compute(means)
    assert found["retriever_loss"] == pytest.approx(sum(terms) / 3, rel=1e-4)
    assert found["reader_loss"] == pytest.approx(sum(tokens) / 3, rel=1e-4)
    # The first sentence has two masks and reads its own block, the second has one and
    # reads a retrieved block; the third has none.
    assert found["reader_loss_own"] == pytest.approx(sum(tokens[:2]) / 2, rel=1e-4)
    assert found["reader_loss_retrieved"] == pytest.approx(tokens[2], rel=1e-4)
    assert "reader_loss_null" not in found
    assert found["answer_retrieved"] == 0.5
    assert found["padding_share"] == pytest.approx(
        padding_in(pairs.query_ids, pairs.document_ids, reading.joined_ids)
    )
    assert float(value) == pytest.approx(sum(terms) / 3 + sum(tokens) / 3, rel=1e-4)


def test_a_reader_with_a_span_scorer_also_selects_the_masked_span(corpus):
    make_encoder = functools.partial(KnowledgeEncoder, span_scorer=True)
    retriever, reader, params = make(corpus, make_encoder)
    reading = warm_start_inputs(corpus).reading
    # One answer of two wordpieces in the first document, none in the others.
    starts = np.argmax(reading.joined_segment_ids, axis=1)
    answers = np.zeros((3, LENGTHS.joined, span_reader.MAX_SPAN), bool)
    answers[0, starts[0] + 1, 1] = True
    answers = answers.reshape(3, -1)
    loss = jax.jit(WarmStartLoss(retriever, reader))
    value, means = loss(
        params,
        WarmStartInputs(None, reading.replace(span_is_answer=answers)),
        KEY,
    )
    of_questions = SpanReader(reader.config)
    names = ("bert", "span_dense", "span_norm", "span_output")
    scores = jax.jit(of_questions.apply)(
        {"params": {name: params["reader"][name] for name in names}},
        reading.joined_ids[:1],
        reading.joined_segment_ids[:1],
    )
    spans = softmax(np.asarray(scores.logits[0], np.float64)[scores.valid[0]])
    (place,) = np.flatnonzero(answers[0][np.asarray(scores.valid[0])])
    found = means_lib.compute(means)
    assert found["span_loss"] == pytest.approx(-math.log(spans[place]), rel=1e-4)
    assert found["span_accuracy"] == float(spans[place] == max(spans))
    _, without = loss(params, WarmStartInputs(None, reading), KEY)
    without = means_lib.compute(without)
    assert "span_loss" not in without
    assert found["reader_loss"] == pytest.approx(without["reader_loss"], rel=1e-5)
    assert float(value) == pytest.approx(
        found["reader_loss"] + found["span_loss"], rel=1e-5
    )


def test_a_reader_that_also_predicts_what_is_not_masked(corpus):
    """The twin asks the reader for each place by itself."""
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    reading = warm_start_inputs(corpus).reading
    # The first sentence has no slot left, the second one and the third two.
    positions = np.array([[0, 0], [0, 5], [1, 10]], np.int32)
    unmasked = UnmaskedTargets(
        np.array([[0, 0], [0, 1], [1, 1]], np.float32),
        positions,
        np.take_along_axis(reading.joined_ids, positions, axis=1),
    )
    loss = jax.jit(WarmStartLoss(retriever, reader))
    value, means = loss(
        params, WarmStartInputs(None, reading.replace(unmasked=unmasked)), KEY
    )
    seen = []
    for i, m in ((1, 1), (2, 0), (2, 1)):
        logits = read(
            reader,
            params,
            reading.joined_ids[i][None],
            reading.joined_segment_ids[i][None],
            positions[i][None],
        )
        logits = np.asarray(logits, np.float64)[0, m]
        seen.append(-math.log(token_probability(logits, unmasked.ids[i, m])))
    plain, of_masked = loss(params, WarmStartInputs(None, reading), KEY)
    found, of_masked = means_lib.compute(means), means_lib.compute(of_masked)
    assert found["reader_loss_unmasked"] == pytest.approx(sum(seen) / 3, rel=1e-4)
    assert float(value) == pytest.approx(float(plain) + sum(seen) / 3, rel=1e-4)
    # What is said of masked wordpieces is said of them alone.
    for name in ("reader_loss", "reader_loss_own", "reader_loss_retrieved"):
        assert found[name] == pytest.approx(of_masked[name], rel=1e-5)


def test_a_warm_start_of_one_model_computes_nothing_of_the_other(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder, dropout=0.1)
    both = warm_start_inputs(corpus)
    loss = jax.jit(WarmStartLoss(retriever, reader))
    of_both = means_lib.compute(loss(params, both, KEY)[1])
    for trained, other, words in (
        ("retriever", "reading", ("retriever_", "in_batch_")),
        ("reader", "pairs", ("reader_", "answer_")),
    ):
        # Parameters that are not there cannot be computed with.
        part = {trained: params[trained]}
        value, means = loss(part, both.replace(**{other: None}), KEY)
        found = means_lib.compute(means)
        for one in (float(value), found["loss"], found[f"{trained}_loss"]):
            assert one == pytest.approx(of_both[f"{trained}_loss"], rel=1e-5)
        expected = {name for name in of_both if name.startswith(words)}
        assert found.keys() == expected | {"loss", "padding_share"}
