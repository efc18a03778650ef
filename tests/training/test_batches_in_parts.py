"""Losses of microbatches and of packed documents: those of the whole batch."""

import flax.traverse_util
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


def gradient_and_means(corpus, stage, **changes):
    """Of six times the same examples, which split evenly."""
    make_loss, reader_class, make_inputs, options = STAGES[stage]
    retriever, reader, params = make(corpus, reader_class, **options)
    loss = make_loss(retriever, reader, **changes)
    inputs = several(make_inputs(corpus))
    gradient, means = jax.jit(jax.grad(loss, has_aux=True))(params, inputs, KEY)
    return gradient, means_lib.compute(means)


def assert_close(found, expected):
    # The largest are about 1; the smallest are sums of what cancels.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        found[0],
        expected[0],
    )
    assert found[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-6)


# A number added to every key, or to every logit: rounding alone decides.
CHANGE_NO_SOFTMAX = ("attention/key/bias", "span_output/bias")


def without_gradient(tree):
    """Parameters without one, of those that it is asked of; and all of those."""
    flat = flax.traverse_util.flatten_dict(jax.device_get(tree), sep="/")
    assert all(np.isfinite(value).all() for value in flat.values())
    asked = {name for name in flat if not name.endswith(CHANGE_NO_SOFTMAX)}
    return {name for name in asked if not np.any(flat[name])}, asked


# No reader has a use for the pooler of its encoder.
POOLER = {"reader/bert/pooler/kernel", "reader/bert/pooler/bias"}
PACKED = PackedLengths(2 * LENGTHS.document, 2 * LENGTHS.joined)


@pytest.mark.parametrize("stage", STAGES)
def test_microbatches_and_packed_documents_are_the_same_loss_and_gradient(
    corpus, stage
):
    whole = gradient_and_means(corpus, stage)
    untouched, every = without_gradient(whole[0])
    # All of fine-tuning's documents are embedded beforehand.
    documents = {name for name in every if "/document_tower/" in name}
    assert documents
    assert untouched == POOLER | (documents if stage == "finetune" else set())
    assert_close(gradient_and_means(corpus, stage, microbatches=3), whole)
    microbatches = 3 if stage == "pretrain" else 1
    packed = gradient_and_means(
        corpus, stage, microbatches=microbatches, packing=PACKED
    )
    assert packed[1].pop("packed")
    assert_close(packed, whole)


@pytest.mark.full
@pytest.mark.parametrize("fits", [True, False])
def test_packed_documents_whether_they_fit_or_not(corpus, fits):
    whole = gradient_and_means(corpus, "pretrain")
    narrow = PackedLengths(2 * LENGTHS.document, LENGTHS.joined // 2)
    packed = gradient_and_means(corpus, "pretrain", packing=PACKED if fits else narrow)
    assert packed[1].pop("packed") == fits
    assert_close(packed, whole)


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
