"""REALM's loss against a loop in float64, one sequence at a time."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.metrics import means as means_lib
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.objectives.retrieval import Normalization, log_share_of_batch
from realm_jax.training.pretrain_loss import PretrainInputs, PretrainLoss
from tests.training.loss_twins import (
    KEY,
    make,
    padding_in,
    pretrain_inputs,
    twin_of_pretrain,
)


@pytest.mark.parametrize("marginalization", list(Marginalization))
def test_pretrain_loss_equals_its_twin(corpus, marginalization):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    loss = PretrainLoss(retriever, reader, marginalization)
    value, means = jax.jit(loss)(params, inputs, KEY)
    twin = twin_of_pretrain(retriever, reader, params, inputs)
    scored = [(p, tokens) for p, tokens in twin if tokens[0]]
    assert len(scored) == 2
    spans = [[math.prod(row) for row in tokens] for _, tokens in scored]
    marginals = [
        sum(a * b for a, b in zip(p, span, strict=True))
        for (p, _), span in zip(scored, spans, strict=True)
    ]
    if marginalization is Marginalization.PER_SPAN:
        terms = marginals
    else:
        terms = [
            sum(p[z] * tokens[z][m] for z in range(len(p)))
            for p, tokens in scored
            for m in range(len(tokens[0]))
        ]
    expected = -sum(math.log(term) for term in terms) / len(terms)
    assert float(value) == pytest.approx(expected, rel=1e-4)
    utility = [
        math.log(marginal / span[0])
        for marginal, span in zip(marginals, spans, strict=True)
    ]
    entropy = [-sum(q * math.log(q) for q in p) for p, _ in scored]
    assert means_lib.compute(means) == pytest.approx(
        {
            "loss": expected,
            "retrieval_utility": sum(utility) / 2,
            "likelihood": sum(marginals) / 2,
            "null_likelihood": sum(span[0] for span in spans) / 2,
            "null_retrieval": sum(p[0] for p, _ in scored) / 2,
            "retrieval_entropy": sum(entropy) / 2,
            "padding_share": padding_in(
                inputs.batch.query_ids,
                inputs.candidates.document_ids[:, 1:],
                inputs.candidates.joined_ids[:, 1:],
                # The null document is embedded and read at its own length.
                inputs.candidates.document_ids[:, 0, :3],
                inputs.candidates.joined_ids[:, 0, :10],
            ),
        },
        rel=1e-3,
        abs=1e-6,
    )
    # The twin would agree with anything if documents made no difference.
    assert max(abs(value) for value in utility) > 0.01


def test_normalised_over_the_batch_the_loss_adds_the_share_of_the_own_candidates(
    corpus,
):
    """The metrics stay those of the candidates, so that runs can be compared."""
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    of_candidates, means = jax.jit(PretrainLoss(retriever, reader))(params, inputs, KEY)
    loss = PretrainLoss(retriever, reader, normalization=Normalization.BATCH)
    of_batch, batch_means = jax.jit(loss)(params, inputs, KEY)
    candidates = inputs.candidates
    embeddings = jax.jit(retriever.apply)(
        {"params": params["retriever"]},
        inputs.batch.query_ids,
        candidates.document_ids,
        candidates.document_segment_ids,
    )
    log_share = log_share_of_batch(
        *embeddings,
        candidates.block_ids,
        inputs.batch.source_block,
        candidates.valid,
    )
    # The third sentence has nothing to score.
    expected = float(of_candidates) - float(log_share[:2].mean())
    assert float(of_batch) == pytest.approx(expected, rel=1e-5)
    assert expected > float(of_candidates) + 0.01
    means, batch_means = means_lib.compute(means), means_lib.compute(batch_means)
    share = batch_means.pop("share_of_batch")
    assert share == pytest.approx(float(jnp.exp(log_share[:2]).mean()), rel=1e-5)
    assert batch_means.pop("loss") == pytest.approx(expected, rel=1e-5)
    del means["loss"]
    assert batch_means == pytest.approx(means, rel=1e-5)


def test_dropout_only_with_a_key(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder, dropout=0.5)
    inputs = pretrain_inputs(corpus)
    likelihood = functools.partial(
        jax.jit(PretrainLoss(retriever, reader).likelihood), params, inputs
    )
    without = [likelihood(None)[0].log_marginal for _ in range(2)]
    np.testing.assert_array_equal(*without)
    drawn = [likelihood(jax.random.key(i))[0].log_marginal for i in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (np.asarray(drawn[0]) != np.asarray(drawn[2]))[:2].all()
    assert (np.asarray(drawn[0]) != np.asarray(without[0]))[:2].all()


def test_all_masks_unscored_is_no_loss_and_no_nan(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    batch = inputs.batch.replace(mask_weights=jnp.zeros((3, 2)))
    loss = PretrainLoss(retriever, reader)
    value, means = jax.jit(loss)(params, PretrainInputs(batch, inputs.candidates), KEY)
    assert float(value) == 0.0
    assert means_lib.compute(means).keys() == {"padding_share"}
