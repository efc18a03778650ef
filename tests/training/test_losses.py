"""The losses against loops in float64, one sequence at a time."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.models import span_reader
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.objectives.retrieval import Normalization, log_share_of_batch
from realm_jax.training.finetune_loss import FinetuneLoss
from realm_jax.training.pretrain_loss import PretrainLoss
from realm_jax.training.warm_start_loss import (
    UnmaskedTargets,
    WarmStartInputs,
    WarmStartLoss,
)
from tests.tiny_world import LENGTHS
from tests.training.loss_twins import (
    KEY,
    MAX_SPAN,
    embed,
    finetune_inputs,
    finetune_parts,
    make,
    measured,
    padding_in,
    pretrain_inputs,
    softmax,
    surprises,
    twin_of_finetune,
    twin_of_pretrain,
    warm_start_inputs,
)


@pytest.mark.parametrize("marginalization", list(Marginalization))
def test_pretrain_loss_equals_its_twin(corpus, marginalization):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    loss = PretrainLoss(retriever, reader, marginalization)
    value, found = measured(loss, params, inputs)
    twin = twin_of_pretrain(retriever, reader, params, inputs)
    scored = [(p, tokens) for p, tokens in twin if tokens[0]]
    assert len(scored) == 2
    spans = [[math.prod(row) for row in tokens] for _, tokens in scored]
    marginals = [np.dot(p, span) for (p, _), span in zip(scored, spans, strict=True)]
    if marginalization is Marginalization.PER_SPAN:
        terms = marginals
    else:
        terms = [
            sum(p[z] * tokens[z][m] for z in range(len(p)))
            for p, tokens in scored
            for m in range(len(tokens[0]))
        ]
    expected = -sum(math.log(term) for term in terms) / len(terms)
    assert value == pytest.approx(expected, rel=1e-4)
    utility = [
        math.log(marginal / span[0])
        for marginal, span in zip(marginals, spans, strict=True)
    ]
    entropy = [-sum(q * math.log(q) for q in p) for p, _ in scored]
    documents, joined = inputs.candidates.document_ids, inputs.candidates.joined_ids
    # The null document is embedded and read at its own length.
    of_null = documents[:, 0, :3], joined[:, 0, :10]
    given = inputs.batch.query_ids, documents[:, 1:], joined[:, 1:], *of_null
    values = {
        "loss": expected,
        "retrieval_utility": sum(utility) / 2,
        "likelihood": sum(marginals) / 2,
        "null_likelihood": sum(span[0] for span in spans) / 2,
        "null_retrieval": sum(p[0] for p, _ in scored) / 2,
        "retrieval_entropy": sum(entropy) / 2,
        "padding_share": padding_in(*given),
    }
    assert found == pytest.approx(values, rel=1e-3, abs=1e-6)
    # The twin would agree with anything if documents made no difference.
    assert max(abs(value) for value in utility) > 0.01


def test_normalised_over_the_batch_the_loss_adds_the_own_candidates_share(corpus):
    """The metrics stay those of the candidates, so that runs can be compared."""
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    of_candidates, means = measured(PretrainLoss(retriever, reader), params, inputs)
    loss = PretrainLoss(retriever, reader, normalization=Normalization.BATCH)
    of_batch, batch_means = measured(loss, params, inputs)
    candidates = inputs.candidates
    embeddings = jax.jit(retriever.apply)(
        {"params": params["retriever"]},
        inputs.batch.query_ids,
        candidates.document_ids,
        candidates.document_segment_ids,
    )
    log_share = log_share_of_batch(
        *embeddings, candidates.block_ids, inputs.batch.source_block, candidates.valid
    )
    # The third sentence has nothing to score.
    expected = of_candidates - float(log_share[:2].mean())
    assert of_batch == pytest.approx(expected, rel=1e-5)
    assert expected > of_candidates + 0.01
    means["share_of_batch"] = float(jnp.exp(log_share[:2]).mean())
    assert batch_means == pytest.approx(means | {"loss": expected}, rel=1e-5)


def test_dropout_is_drawn_by_the_key(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder, dropout=0.5)
    inputs, loss = pretrain_inputs(corpus), jax.jit(PretrainLoss(retriever, reader))
    drawn = [float(loss(params, inputs, jax.random.key(i))[0]) for i in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_all_masks_unscored_is_no_loss_and_no_nan(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    batch = inputs.batch.replace(mask_weights=jnp.zeros((3, 2)))
    loss = PretrainLoss(retriever, reader)
    value, found = measured(loss, params, inputs.replace(batch=batch))
    assert value == 0.0
    assert found.keys() == {"padding_share"}


def test_warm_start_loss_equals_its_twin(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = warm_start_inputs(corpus)
    value, found = measured(WarmStartLoss(retriever, reader), params, inputs)
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
    places = ((0, 0), (0, 1), (1, 0))
    of_masks = reading.batch.mask_positions, reading.batch.mask_ids
    tokens = surprises(reader, params, reading, *of_masks, places)
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
    assert value == pytest.approx(sum(terms) / 3 + sum(tokens) / 3, rel=1e-4)


def test_a_reader_with_a_span_scorer_also_selects_the_masked_span(corpus):
    make_encoder = functools.partial(KnowledgeEncoder, span_scorer=True)
    retriever, reader, params = make(corpus, make_encoder)
    reading = warm_start_inputs(corpus).reading
    # One answer of two wordpieces in the first document, none in the others.
    starts = np.argmax(reading.joined_segment_ids, axis=1)
    answers = np.zeros((3, LENGTHS.joined, span_reader.MAX_SPAN), bool)
    answers[0, starts[0] + 1, 1] = True
    answers = answers.reshape(3, -1)
    loss = WarmStartLoss(retriever, reader)
    scored = WarmStartInputs(None, reading.replace(span_is_answer=answers))
    value, found = measured(loss, params, scored)
    of_questions = SpanReader(reader.config)
    names = ("bert", "span_dense", "span_norm", "span_output")
    scores = jax.jit(of_questions.apply)(
        {"params": {name: params["reader"][name] for name in names}},
        reading.joined_ids[:1],
        reading.joined_segment_ids[:1],
    )
    spans = softmax(np.asarray(scores.logits[0], np.float64)[scores.valid[0]])
    (place,) = np.flatnonzero(answers[0][np.asarray(scores.valid[0])])
    assert found["span_loss"] == pytest.approx(-math.log(spans[place]), rel=1e-4)
    assert found["span_accuracy"] == float(spans[place] == max(spans))
    _, without = measured(loss, params, WarmStartInputs(None, reading))
    assert "span_loss" not in without
    assert found["reader_loss"] == pytest.approx(without["reader_loss"], rel=1e-5)
    assert value == pytest.approx(found["reader_loss"] + found["span_loss"], rel=1e-5)


def test_a_reader_that_also_predicts_what_is_not_masked(corpus):
    """The twin asks the reader for each place by itself."""
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    reading = warm_start_inputs(corpus).reading
    # The first sentence has no slot left, the second one and the third two.
    positions = np.array([[0, 0], [0, 5], [1, 10]], np.int32)
    weights = np.array([[0, 0], [0, 1], [1, 1]], np.float32)
    ids = np.take_along_axis(reading.joined_ids, positions, axis=1)
    unmasked = UnmaskedTargets(weights, positions, ids)
    loss = WarmStartLoss(retriever, reader)
    both = WarmStartInputs(None, reading.replace(unmasked=unmasked))
    value, found = measured(loss, params, both)
    places = ((1, 1), (2, 0), (2, 1))
    seen = surprises(reader, params, reading, positions, unmasked.ids, places)
    plain, of_masked = measured(loss, params, WarmStartInputs(None, reading))
    assert found["reader_loss_unmasked"] == pytest.approx(sum(seen) / 3, rel=1e-4)
    assert value == pytest.approx(plain + sum(seen) / 3, rel=1e-4)
    # What is said of masked wordpieces is said of them alone.
    for name in ("reader_loss", "reader_loss_own", "reader_loss_retrieved"):
        assert found[name] == pytest.approx(of_masked[name], rel=1e-5)


def test_a_warm_start_of_one_model_computes_nothing_of_the_other(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder, dropout=0.1)
    both = warm_start_inputs(corpus)
    loss = WarmStartLoss(retriever, reader)
    _, of_both = measured(loss, params, both)
    for trained, other, words in (
        ("retriever", "reading", ("retriever_", "in_batch_")),
        ("reader", "pairs", ("reader_", "answer_")),
    ):
        # Parameters that are not there cannot be computed with.
        part = {trained: params[trained]}
        value, found = measured(loss, part, both.replace(**{other: None}))
        for one in (value, found["loss"], found[f"{trained}_loss"]):
            assert one == pytest.approx(of_both[f"{trained}_loss"], rel=1e-5)
        expected = {name for name in of_both if name.startswith(words)}
        assert found.keys() == expected | {"loss", "padding_share"}


@pytest.mark.parametrize("marginalization", list(AnswerMarginalization))
def test_finetune_loss_equals_its_twin(corpus, marginalization):
    retriever, reader, params = make(corpus, SpanReader, max_span=MAX_SPAN)
    inputs = finetune_inputs(corpus)
    loss = FinetuneLoss(retriever, reader, marginalization)
    value, found = measured(loss, params, inputs)
    queries, logits = finetune_parts(retriever, reader, params, inputs)
    blocks = np.asarray(inputs.block_embeddings, np.float64)
    (one, read), (other, unread) = twin_of_finetune(
        queries, blocks, logits, inputs, marginalization
    )
    assert unread is None
    expected = {
        "loss": (one + other + read) / 2,
        "retriever_loss": (one + other) / 2,
        "reader_loss": read,
        "answer_retrieved": 1.0,
        "answer_read": 0.5,
        "padding_share": padding_in(inputs.questions.question_ids, inputs.joined_ids),
    }
    assert found == pytest.approx(expected, rel=1e-4)
    assert value == pytest.approx(expected["loss"], rel=1e-4)


def test_a_question_without_any_document_gives_no_nan(corpus):
    retriever, reader, params = make(corpus, SpanReader, max_span=MAX_SPAN)
    inputs = finetune_inputs(corpus).replace(
        block_valid=np.zeros((2, 3), bool), block_has_answer=np.zeros((2, 3), bool)
    )
    loss = jax.value_and_grad(FinetuneLoss(retriever, reader), has_aux=True)
    (value, _), gradient = jax.jit(loss)(params, inputs, KEY)
    assert value == 0.0
    assert not any(map(np.any, jax.tree.leaves(gradient)))
