"""Rows are copied from an index by the same document tower, wherever one lies."""

import dataclasses
import logging
import re
import threading

import flax.traverse_util
import jax
import numpy as np
import pytest

from realm_jax.index import build as attempt
from realm_jax.index import builder, embedding_cache
from realm_jax.index.manifest import EMBEDDINGS, DamagedSnapshotError
from realm_jax.index.retrievers import (
    TrainedRetriever,
    load_retriever,
    publish_retriever,
)
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.models.retriever import Retriever
from realm_jax.storage import open_store
from tests.index import tiny_builder
from tests.index.tiny_builder import (
    RETRIEVER,
    VOCABULARY,
    flip_a_bit,
    given,
    read_embeddings,
    slow_embeddings,
)

CONFIG = dataclasses.replace(tiny_builder.CONFIG, sampled_blocks=1)


@pytest.fixture
def retriever(retriever_at):
    return retriever_at(5)


@pytest.fixture(scope="module")
def two_towers():
    config = dataclasses.replace(RETRIEVER, shared=False)
    ids = jax.ShapeDtypeStruct((1, 8), np.int32)
    init = Retriever(config).init
    shapes = jax.eval_shape(init, jax.random.key(0), ids, ids, ids)["params"]
    generator = np.random.default_rng(2)
    params = jax.tree.map(
        lambda leaf: generator.normal(0, 0.5, leaf.shape).astype(np.float32), shapes
    )
    return TrainedRetriever(5, config, params, VOCABULARY.fingerprint)


def build(blocks, store, retriever, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return builder.build_once(retriever, blocks, store, config)


def with_one_bit_flipped(params, part):
    """The parameters, one bit of one number in a tower being another."""
    flat = flax.traverse_util.flatten_dict(params, sep="/")
    name = max(name for name in flat if name.startswith(part))
    array = np.array(flat[name], np.float32)
    array.reshape(-1).view(np.uint32)[0] ^= 1
    return flax.traverse_util.unflatten_dict({**flat, name: array}, sep="/")


def test_another_query_tower_embeds_no_document(
    blocks, model_store, donor, two_towers, embedded
):
    """Neither in the model directory of the index nor in that of a later stage."""
    build(blocks, donor, two_towers)
    moved = with_one_bit_flipped(two_towers.params, "query_tower")
    places = [(donor, 6, ()), (model_store, 0, (donor.url(),))]
    for store, step, donors in places:
        embedded.clear()
        later = given(two_towers, *donors, params=moved, step=step)
        manifest = build(blocks, store, later)
        assert sum(embedded) == 1  # The sample that is compared.
        # It is of the retriever that asked for it, and says so.
        assert manifest.metadata[builder.RETRIEVER_CRC32C] == later.params_crc32c()
        assert later.params_crc32c() != two_towers.params_crc32c()
        np.testing.assert_array_equal(
            read_embeddings(store, step), read_embeddings(donor, two_towers.step)
        )


def test_one_bit_of_the_document_tower_embeds_them_all(
    blocks, model_store, donor, two_towers, embedded
):
    build(blocks, donor, two_towers)
    moved = with_one_bit_flipped(two_towers.params, "document_tower")
    places = [(model_store, 0, (donor.url(),)), (donor, 6, ())]
    for store, step, donors in places:
        embedded.clear()
        later = given(two_towers, *donors, params=moved, step=step)
        build(blocks, store, later)
        assert sum(embedded) == blocks.num_blocks + 1


def test_what_only_training_or_batching_knows_of_does_not_matter(
    blocks, model_store, donor, retriever, embedded
):
    build(blocks, donor, retriever)
    embedded.clear()
    bert = dataclasses.replace(
        retriever.config.bert, dropout_rate=0.4, broadcast_dropout=True, remat="full"
    )
    config = dataclasses.replace(retriever.config, bert=bert, projection_dropout=0.4)
    other = dataclasses.replace(CONFIG.embed, batch_size=9, shard_blocks=11)
    later = given(retriever, donor.url(), config=config)
    build(blocks, model_store, later, embed=other)
    assert sum(embedded) == 1
    np.testing.assert_array_equal(
        read_embeddings(model_store, 5), read_embeddings(donor, 5)
    )


def test_what_decides_on_embeddings_must_be_the_same_in_another_directory(
    blocks, model_store, donor, retriever, embedded
):
    build(blocks, donor, retriever)
    pooled = dataclasses.replace(retriever.config, pooling="mean")
    shorter = {"embed": dataclasses.replace(CONFIG.embed, document_length=30)}
    cases = [({"config": pooled}, {}), ({}, shorter)]
    for step, (of_retriever, of_index) in enumerate(cases):
        embedded.clear()
        later = given(retriever, donor.url(), step=step, **of_retriever)
        build(blocks, model_store, later, **of_index)
        assert sum(embedded) == blocks.num_blocks + 1


@pytest.mark.parametrize("array", [EMBEDDINGS, embedding_cache.HASHES])
def test_a_damaged_directory_is_passed_over_for_a_sound_one(
    blocks, model_store, donor, retriever, embedded, array
):
    flip_a_bit(donor, build(blocks, donor, retriever), array)
    embedded.clear()
    build(blocks, model_store, given(retriever, donor.url()))
    assert sum(embedded) == blocks.num_blocks + 1
    embedded.clear()
    third = open_store(f"{donor.url()}-third")
    both = given(retriever, donor.url(), model_store.url())
    build(blocks, third, both)
    assert sum(embedded) == 1


def test_directories_without_an_index_are_passed_over(
    blocks, tmp_path, retriever, embedded
):
    (tmp_path / "file").write_text("no folder")
    commits = tmp_path / "broken" / "index" / "commits"
    commits.mkdir(parents=True)
    (commits / "3.json").write_text("no manifest")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"of a BERT")
    places = [tmp_path / name for name in ("gone", "file", "broken", "weights")]
    later = given(retriever, *map(str, places), "ftp://nobody/knows")
    build(blocks, open_store(tmp_path / "model"), later)
    assert sum(embedded) == blocks.num_blocks + 1


def test_an_index_that_is_deleted_while_it_is_copied_is_embedded(
    blocks, model_store, donor, retriever, embedded, monkeypatch, caplog
):
    manifest = build(blocks, donor, retriever)
    embedded.clear()
    read_rows, reads = embedding_cache.KnownRows.read, []

    def read_until_deleted(known, rows):
        if reads:
            donor.delete_folder(f"index/data/5-{manifest.attempt}")
        reads.append(len(rows))
        return read_rows(known, rows)

    monkeypatch.setattr(embedding_cache.KnownRows, "read", read_until_deleted)
    build(blocks, model_store, given(retriever, donor.url()))
    assert len(reads) == 2
    assert sum(embedded) == blocks.num_blocks - reads[0] + 1
    assert "its blocks are embedded instead" in caplog.text
    whole = slow_embeddings(retriever, blocks)
    np.testing.assert_allclose(read_embeddings(model_store, 5), whole, atol=1e-5)


def test_copied_rows_that_are_not_the_encoders_are_refused_by_name(
    blocks, model_store, donor, retriever, monkeypatch
):
    """Sound to every checksum, and wrong: the sample tells."""
    wrong = attempt.embed_shards
    with monkeypatch.context() as patch:
        patch.setattr(
            attempt,
            "embed_shards",
            lambda *a: ((start, 3 - rows) for start, rows in wrong(*a)),
        )
        patch.setattr(attempt.IndexBuild, "verify_sample", lambda *_: None)
        build(blocks, donor, retriever)
    commit = donor.url("index/commits/5.json")
    with pytest.raises(DamagedSnapshotError, match=f"delete {re.escape(commit)}, "):
        build(blocks, model_store, given(retriever, donor.url()))
    assert SnapshotSeries(model_store, INDEX_SERIES).steps() == []


def test_the_builder_copies_from_where_the_published_retriever_says(
    blocks, model_store, donor, retriever, embedded, caplog
):
    build(blocks, donor, retriever)
    embedded.clear()
    caplog.set_level(logging.INFO, "realm_jax")
    later = given(retriever, donor.url(), step=0)
    publish_retriever(model_store, later, blocks.fingerprint)
    # There is no trainer: it ends when it has embedded what was published.
    config = dataclasses.replace(CONFIG, patience_seconds=0.1)
    assert builder.IndexBuilder(model_store, blocks, config).run(threading.Event())
    assert sum(embedded) == 1
    count, commit = blocks.num_blocks, donor.url("index/commits/5.json")
    assert f"{count} of {count} blocks copied from {commit}" in caplog.text
    np.testing.assert_array_equal(
        read_embeddings(model_store, 0), read_embeddings(donor, 5)
    )


def test_the_same_retriever_with_other_donors_is_published_once(
    blocks, model_store, retriever
):
    first = given(retriever, "/runs/before")
    one = publish_retriever(model_store, first, blocks.fingerprint)
    again = given(retriever, "/moved/before")
    assert publish_retriever(model_store, again, blocks.fingerprint) == one
    assert load_retriever(model_store, retriever.step).donors == ("/runs/before",)
