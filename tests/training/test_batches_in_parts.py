"""Microbatches and packed documents: the same losses as of the whole batch."""

import dataclasses

import flax.traverse_util
import jax
import numpy as np
import pytest

from realm_jax.metrics import means as means_lib
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models import packing
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.span_reader import SpanReader
from realm_jax.training import finetune, packed_updates, pretrain, warm_start
from realm_jax.training.finetune_loss import FinetuneLoss
from realm_jax.training.packed_updates import PackedLengths, choose_packed_lengths
from realm_jax.training.pretrain_loss import PretrainLoss
from realm_jax.training.warm_start_loss import WarmStartLoss
from realm_jax.types import Lengths
from tests import tiny_world
from tests.tiny_world import LENGTHS
from tests.training.loss_twins import (
    KEY,
    MAX_SPAN,
    finetune_inputs,
    make,
    pretrain_inputs,
    warm_start_inputs,
)
from tests.training.runs import run_to_end

STAGES = {
    "pretrain": (PretrainLoss, KnowledgeEncoder, pretrain_inputs, {}),
    "warm_start": (WarmStartLoss, KnowledgeEncoder, warm_start_inputs, {}),
    "finetune": (FinetuneLoss, SpanReader, finetune_inputs, {"max_span": MAX_SPAN}),
}


def six_times(inputs):
    """The same examples, so that they split evenly."""
    return jax.tree.map(lambda array: np.concatenate([array] * 6), inputs)


def gradient_and_means(corpus, stage, **changes):
    make_loss, reader_class, make_inputs, options = STAGES[stage]
    retriever, reader, params = make(corpus, reader_class, **options)
    loss = make_loss(retriever, reader, **changes)
    inputs = six_times(make_inputs(corpus))
    gradient, means = jax.jit(jax.grad(loss, has_aux=True))(params, inputs, KEY)
    return gradient, means_lib.compute(means)


def assert_close(found, expected):
    # The largest are about 1; the smallest are sums of what cancels.
    tiny_world.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
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
# Rows of twice what sequences are padded to; queries to 9.
PACKED = PackedLengths(2 * LENGTHS.document, 2 * LENGTHS.joined, query=2 * 9)


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
    in_parts, packed = {"microbatches": 3}, {"packing": PACKED}
    # Pre-training packs within microbatches, so one program tries both.
    trials = [in_parts | packed] if stage == "pretrain" else [in_parts, packed]
    for trial in trials:
        gradient, means = gradient_and_means(corpus, stage, **trial)
        assert means.pop("packed", False) == ("packing" in trial)
        assert_close((gradient, means), whole)


@pytest.mark.full
def test_documents_that_cannot_be_packed_are_the_same_loss_and_gradient(corpus):
    whole = gradient_and_means(corpus, "pretrain")
    narrow = PackedLengths(2 * LENGTHS.document, LENGTHS.joined // 2)
    packed = gradient_and_means(corpus, "pretrain", packing=narrow)
    assert not packed[1].pop("packed")
    assert_close(packed, whole)


@pytest.mark.full
def test_microbatches_take_the_memory_of_one(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = six_times(pretrain_inputs(corpus))

    def temporaries(**changes):
        loss = PretrainLoss(retriever, reader, **changes)
        step = jax.jit(jax.grad(loss, has_aux=True))
        analysis = step.lower(params, inputs, KEY).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries(microbatches=6) < 0.5 * temporaries()


# Blocks of the tiny world fill LENGTHS.
ROOMY = Lengths(LENGTHS.query, 2 * LENGTHS.document, 2 * LENGTHS.joined)


@pytest.mark.full
@pytest.mark.parametrize("stage", [warm_start, pretrain, finetune])
def test_a_stage_that_packs_trains_as_one_that_does_not(world, tmp_path, stage):
    # Dropout draws for each row, so that packed rows would differ.
    tiny = tiny_world.models(dropout=0.0)

    def bert(vocab_size):
        return dataclasses.replace(tiny.bert(vocab_size), max_positions=80)

    models = dataclasses.replace(tiny, lengths=ROOMY, bert=bert)
    lines = {}
    for packs in (False, True):
        changes = {"models": models, "train_steps": 3, "pack_documents": packs}
        config = run_to_end(stage, world, tmp_path / str(packs), **changes)
        lines[packs] = list(read_metrics(config.model_dir))
    alone, packed = ([line["loss"] for line in lines[packs]] for packs in (False, True))
    assert packed == pytest.approx(alone, rel=1e-4)
    assert not any("packed" in line for line in lines[False])
    assert np.mean([line["packed"] for line in lines[True]]) > 0.5
    for before, after in zip(lines[False], lines[True], strict=True):
        assert after["padding_share"] < before["padding_share"] or not after["packed"]


def test_most_batches_fit_the_chosen_lengths(corpus):
    """All that a batch has: what does not fit leaves the whole of it unpacked."""
    random = np.random.default_rng(7)
    found = random.integers(3, LENGTHS.query // 2, size=500)
    queries = (np.arange(LENGTHS.query) < found[:, None]).astype(np.int32)
    sizes = {"num_documents": 12, "num_joined": 12}
    chosen = choose_packed_lengths(corpus, queries, ROOMY, **sizes, num_queries=6)
    assert chosen is not None
    assert None not in dataclasses.astuple(chosen)
    fit = []
    for _ in range(50):
        asked = random.integers(len(queries), size=6)
        blocks = random.integers(corpus.num_blocks, size=12)
        read, _ = corpus.joined_ids(
            np.repeat(queries[asked], 2, axis=0), blocks[:, None], ROOMY.joined
        )
        sequences = (
            (corpus.document_ids(blocks, ROOMY.document)[0], chosen.document),
            (read[:, 0], chosen.joined),
            (queries[asked], chosen.query),
        )
        fit.append(all(bool(packing.fits(*each)) for each in sequences))
    assert np.mean(fit) > 0.8
    # Rows of LENGTHS are full, and so are queries that fill theirs.
    full = np.ones_like(queries)
    assert choose_packed_lengths(corpus, full, LENGTHS, **sizes, num_queries=6) is None


def test_rows_are_chosen_for_all_that_an_update_packs():
    """One kind that does not fit leaves the others unpacked, too."""
    random = np.random.default_rng(0)
    kinds = [
        packed_updates._Kind(8 * random.integers(1, 20, size=200), 6.0, 12 * 80)
        for _ in range(3)
    ]

    def left(lengths):
        """The share of the positions that remain, batch by batch."""
        needed = np.array([kind.needed for kind in kinds])
        fits = (needed <= np.array(lengths)[:, None]).all(axis=0)
        return np.where(fits, 6.0 * sum(lengths) / (3 * 12 * 80), 1.0).mean()

    chosen, share = packed_updates._least_work(kinds)
    alone = [packed_updates._least_work([kind])[0][0] for kind in kinds]
    assert share == pytest.approx(left(chosen))
    assert left(chosen) < left(alone)
