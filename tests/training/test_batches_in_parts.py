"""Losses of microbatches and of packed documents: those of the whole batch."""

import jax
import numpy as np
import pytest

from realm_jax.metrics import means as means_lib
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.span_reader import SpanReader
from realm_jax.training.finetune_loss import FinetuneLoss
from realm_jax.training.packed_updates import PackedLengths
from realm_jax.training.pretrain_loss import PretrainLoss
from realm_jax.training.warm_start_loss import WarmStartLoss
from tests.tiny_world import LENGTHS
from tests.training.loss_twins import (
    KEY,
    MAX_SPAN,
    finetune_inputs,
    make,
    pretrain_inputs,
    warm_start_inputs,
)


def several(inputs):
    """The same examples six times over, so that they split evenly."""
    return jax.tree.map(lambda array: np.concatenate([array] * 6), inputs)


STAGES = {
    "pretrain": (PretrainLoss, KnowledgeEncoder, pretrain_inputs, {}),
    "warm_start": (WarmStartLoss, KnowledgeEncoder, warm_start_inputs, {}),
    "finetune": (FinetuneLoss, SpanReader, finetune_inputs, {"max_span": MAX_SPAN}),
}


@pytest.mark.parametrize("microbatches", [3])
@pytest.mark.parametrize("stage", ["pretrain", "warm_start", "finetune"])
def test_microbatches_are_the_same_loss_with_the_same_gradient(
    corpus, stage, microbatches
):
    make_loss, reader_class, inputs, options = STAGES[stage]
    retriever, reader, params = make(corpus, reader_class, **options)

    def run(**changes):
        loss = make_loss(retriever, reader, **changes)
        gradient = jax.jit(jax.grad(loss, has_aux=True))
        return gradient(params, several(inputs(corpus)), KEY)

    (whole, means), (parts, means_of_parts) = run(), run(microbatches=microbatches)
    # The largest are about 1; the smallest are sums of what cancels.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        whole,
        parts,
    )
    expected, found = means_lib.compute(means), means_lib.compute(means_of_parts)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.full
def test_microbatches_take_the_memory_of_one(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = several(pretrain_inputs(corpus))

    def temporaries(**changes):
        loss = PretrainLoss(retriever, reader, **changes)
        step = jax.jit(jax.grad(loss, has_aux=True))
        analysis = step.lower(params, inputs, KEY).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries(microbatches=6) < 0.5 * temporaries()


@pytest.mark.parametrize(
    ("stage", "fits", "microbatches"),
    [
        ("pretrain", True, 3),
        pytest.param("pretrain", True, 1, marks=pytest.mark.full),
        pytest.param("pretrain", False, 1, marks=pytest.mark.full),
        ("warm_start", True, 1),
        ("finetune", True, 1),
    ],
)
def test_packed_documents_are_the_same_loss_with_the_same_gradient(
    corpus, stage, fits, microbatches
):
    make_loss, reader_class, make_inputs, options = STAGES[stage]
    retriever, reader, params = make(corpus, reader_class, **options)
    inputs = several(make_inputs(corpus))

    def run(packing):
        loss = make_loss(retriever, reader, microbatches=microbatches, packing=packing)
        gradient = jax.jit(jax.grad(loss, has_aux=True))
        return gradient(params, inputs, KEY)

    joined = 2 * LENGTHS.joined if fits else LENGTHS.joined // 2
    lengths = PackedLengths(2 * LENGTHS.document, joined)
    (alone, means), (packed, means_of_packed) = run(None), run(lengths)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        alone,
        packed,
    )
    expected, found = means_lib.compute(means), means_lib.compute(means_of_packed)
    assert found.pop("packed") == fits
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
