"""Stages with PACK_DOCUMENTS: the same training, from half-empty rows."""

import dataclasses

import numpy as np
import pytest

from realm_jax.data.blocks import BlockStore
from realm_jax.metrics.metrics_file import read_metrics
from realm_jax.models import packing
from realm_jax.training import finetune, pretrain, warm_start
from realm_jax.training.packed_lengths import choose_packed_lengths
from realm_jax.types import Lengths
from tests import tiny_world
from tests.tiny_world import LENGTHS, NEVER, silent

# Blocks of the tiny world fill LENGTHS.
ROOMY = Lengths(LENGTHS.query, 2 * LENGTHS.document, 2 * LENGTHS.joined)


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "make_config", "changes"),
    [
        (warm_start, tiny_world.warm_start_config, {}),
        (pretrain, tiny_world.pretrain_config, {}),
        (pretrain, tiny_world.pretrain_config, {"refresh_mode": "rolling"}),
        (finetune, tiny_world.finetune_config, {}),
    ],
)
def test_a_stage_that_packs_trains_as_one_that_does_not(
    world, tmp_path, stage, make_config, changes
):
    # Dropout draws for each row, so that packed rows would differ.
    tiny = tiny_world.models(dropout=0.0)
    models = dataclasses.replace(
        tiny,
        lengths=ROOMY,
        bert=lambda vocab_size: dataclasses.replace(
            tiny.bert(vocab_size), max_positions=80
        ),
    )
    lines = {}
    for packs in (False, True):
        folder = tmp_path / str(packs)
        config = make_config(
            world, folder, models=models, train_steps=3, pack_documents=packs, **changes
        )
        assert stage.run(config, silent, NEVER)
        lines[packs] = list(read_metrics(str(folder)))
    alone, packed = ([line["loss"] for line in lines[packs]] for packs in (False, True))
    assert packed == pytest.approx(alone, rel=1e-4)
    assert not any("packed" in line for line in lines[False])
    assert np.mean([line["packed"] for line in lines[True]]) > 0.5
    for before, after in zip(lines[False], lines[True], strict=True):
        assert after["padding_share"] < before["padding_share"] or not after["packed"]


def test_most_batches_fit_the_chosen_lengths(world):
    corpus = BlockStore.open(world.corpus)
    queries = np.ones((10, LENGTHS.query), np.int32)
    sizes = {"num_documents": 12, "num_joined": 12}
    chosen = choose_packed_lengths(corpus, queries, ROOMY, **sizes)
    assert chosen is not None
    random = np.random.default_rng(7)
    fit = []
    for _ in range(50):
        blocks = random.integers(corpus.num_blocks, size=12)
        ids, _ = corpus.document_ids(blocks, ROOMY.document)
        fit.append(bool(packing.fits(ids, chosen.document)))
    assert np.mean(fit) > 0.8
    # Rows of LENGTHS are full.
    assert choose_packed_lengths(corpus, queries, LENGTHS, **sizes) is None
