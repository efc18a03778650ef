"""Fine-tuning's loss against a loop in float64, one sequence at a time."""

import math

import jax
import numpy as np
import pytest

from realm_jax.metrics import means as means_lib
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.training.finetune_loss import FinetuneLoss
from tests.training.loss_twins import (
    KEY,
    MAX_SPAN,
    embed,
    finetune_inputs,
    gradient_of,
    make,
    padding_in,
    read,
    softmax,
)


@pytest.mark.parametrize("marginalization", list(AnswerMarginalization))
def test_finetune_loss_equals_its_twin(corpus, marginalization):
    retriever, reader, params = make(corpus, SpanReader, max_span=MAX_SPAN)
    inputs = finetune_inputs(corpus)
    loss = FinetuneLoss(retriever, reader, marginalization)
    value, means = jax.jit(loss)(params, inputs, KEY)
    retriever_loss, reader_loss = [], []
    for i in range(2):
        query = embed(
            retriever, params, "embed_queries", inputs.questions.question_ids[i]
        )
        real = [z for z in range(3) if inputs.block_valid[i, z]]
        scores = [
            float(query @ np.asarray(inputs.block_embeddings[i, z], np.float64))
            for z in real
        ]
        blocks = softmax(scores)
        right = sum(blocks[z] for z in real if inputs.block_has_answer[i, z])
        retriever_loss.append(-math.log(right))
        spans, right_spans, within = [], [], []
        for z in range(2):
            row = inputs.joined_ids[i, z][None], inputs.joined_segment_ids[i, z][None]
            logits, valid = (np.asarray(part)[0] for part in read(reader, params, *row))
            places = np.flatnonzero(valid)
            spans += [float(logits[s]) + scores[z] for s in places]
            right_spans += [bool(inputs.span_is_answer[i, z, s]) for s in places]
            share = softmax(scores[:2])[z]
            within += [share * p for p in softmax([float(logits[s]) for s in places])]
        joint = marginalization is AnswerMarginalization.JOINT_SOFTMAX
        mass = softmax(spans) if joint else within
        right = sum(
            p for p, is_right in zip(mass, right_spans, strict=True) if is_right
        )
        reader_loss.append(-math.log(right) if any(right_spans) else None)
    assert reader_loss[0] is not None
    assert reader_loss[1] is None
    assert means_lib.compute(means) == pytest.approx(
        {
            "loss": (sum(retriever_loss) + reader_loss[0]) / 2,
            "retriever_loss": sum(retriever_loss) / 2,
            "reader_loss": reader_loss[0],
            "answer_retrieved": 1.0,
            "answer_read": 0.5,
            "padding_share": padding_in(
                inputs.questions.question_ids, inputs.joined_ids
            ),
        },
        rel=1e-4,
    )
    assert float(value) == pytest.approx(
        (sum(retriever_loss) + reader_loss[0]) / 2, rel=1e-4
    )


def test_a_question_without_any_document_gives_no_nan(corpus):
    retriever, reader, params = make(corpus, SpanReader, max_span=MAX_SPAN)
    inputs = finetune_inputs(corpus).replace(
        block_valid=np.zeros((2, 3), bool), block_has_answer=np.zeros((2, 3), bool)
    )
    loss = FinetuneLoss(retriever, reader)
    assert float(jax.jit(loss)(params, inputs, KEY)[0]) == 0.0
    assert set(gradient_of(loss, params, inputs).values()) == {0.0}
