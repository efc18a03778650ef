"""Rows are copied from an index by the same document tower, wherever one lies.

Of another version of the corpus, too: then only what changed is embedded.
"""

import dataclasses
import json
import logging
import re
import threading

import flax.traverse_util
import numpy as np
import pytest

from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.errors import NotReadyError
from realm_jax.index import build as attempt
from realm_jax.index import builder, embedding_cache
from realm_jax.index.manifest import EMBEDDINGS, DamagedSnapshotError
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.prepare import update_corpus
from realm_jax.prepare.update_corpus import UpdateConfig
from realm_jax.storage import open_store
from tests.corpus_builder import build_corpus
from tests.index import tiny_builder
from tests.index.tiny_builder import (
    IN_A_BUCKET,
    RETRIEVER,
    VOCABULARY,
    flip_a_bit,
    given,
    publish,
    random_params,
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
    params = random_params(config, seed=2)
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


@pytest.mark.parametrize("tower", ["query_tower", "document_tower"])
def test_a_bit_of_the_document_tower_embeds_all_and_of_the_other_none(
    blocks, store, donor, two_towers, embedded, tower
):
    """In the model directory of the index and in that of a later stage."""
    build(blocks, donor, two_towers)
    moved = with_one_bit_flipped(two_towers.params, tower)
    for place, step, donors in ((store, 0, (donor.url(),)), (donor, 6, ())):
        embedded.clear()
        later = given(two_towers, *donors, params=moved, step=step)
        manifest = build(blocks, place, later)
        # It is of the retriever that asked for it, and says so.
        assert manifest.metadata[builder.RETRIEVER_CRC32C] == later.params_crc32c()
        assert later.params_crc32c() != two_towers.params_crc32c()
        if tower == "document_tower":
            assert sum(embedded) == blocks.num_blocks + 1
            continue
        assert sum(embedded) == 1  # The sample that is compared.
        np.testing.assert_array_equal(
            read_embeddings(place, step), read_embeddings(donor, two_towers.step)
        )


def test_settings_of_embeddings_must_agree(blocks, store, donor, retriever, embedded):
    build(blocks, donor, retriever)
    bert = dataclasses.replace(
        retriever.config.bert, dropout_rate=0.4, broadcast_dropout=True, remat="full"
    )
    trained = dataclasses.replace(retriever.config, bert=bert, projection_dropout=0.4)
    batched = dataclasses.replace(CONFIG.embed, batch_size=9, shard_blocks=11)
    pooled = dataclasses.replace(retriever.config, pooling="mean")
    shorter = dataclasses.replace(CONFIG.embed, document_length=30)
    for step, (config, embed, is_same) in enumerate(
        (
            (pooled, CONFIG.embed, False),
            (retriever.config, shorter, False),
            (trained, batched, True),
        )
    ):
        embedded.clear()
        later = given(retriever, donor.url(), step=step, config=config)
        build(blocks, store, later, embed=embed)
        assert sum(embedded) == 1 + blocks.num_blocks * (not is_same)
    np.testing.assert_array_equal(read_embeddings(store, 2), read_embeddings(donor, 5))


@pytest.mark.parametrize("array", [EMBEDDINGS, embedding_cache.HASHES])
def test_damaged_rows_are_not_copied(blocks, store, donor, retriever, embedded, array):
    flip_a_bit(donor, build(blocks, donor, retriever), array)
    embedded.clear()
    build(blocks, store, given(retriever, donor.url()))
    assert sum(embedded) == blocks.num_blocks + 1
    embedded.clear()
    third = open_store(f"{donor.url()}-third")
    build(blocks, third, given(retriever, donor.url(), store.url()))
    assert sum(embedded) == 1


def test_places_without_an_index_are_passed_over(blocks, tmp_path, retriever, embedded):
    store = open_store(tmp_path)
    store.write("file", b"no folder")
    store.write("broken/index/commits/3.json", b"no manifest")
    store.write("weights/model.safetensors", b"of a BERT")
    places = [tmp_path / name for name in ("gone", "file", "broken", "weights")]
    later = given(retriever, *map(str, places), "ftp://nobody/knows")
    build(blocks, open_store(tmp_path / "model"), later)
    assert sum(embedded) == blocks.num_blocks + 1


def test_an_index_that_is_deleted_while_it_is_copied_is_embedded(
    blocks, store, donor, retriever, embedded, monkeypatch, caplog
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
    build(blocks, store, given(retriever, donor.url()))
    assert len(reads) == 2
    assert sum(embedded) == blocks.num_blocks - reads[0] + 1
    assert "its blocks are embedded instead" in caplog.text
    whole = slow_embeddings(retriever, blocks)
    np.testing.assert_allclose(read(store, blocks), whole, atol=1e-5)


def test_wrong_copied_rows_are_refused(blocks, store, donor, retriever, monkeypatch):
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
        build(blocks, store, given(retriever, donor.url()))
    assert SnapshotSeries(store, INDEX_SERIES).steps() == []


@IN_A_BUCKET
def test_builders_copy_from_donors(blocks, store, donor, retriever, embedded, caplog):
    build(blocks, donor, retriever)
    embedded.clear()
    caplog.set_level(logging.INFO, "realm_jax")
    publish(store, blocks, given(retriever, donor.url(), step=0))
    # There is no trainer: it ends when it has embedded what was published.
    config = dataclasses.replace(CONFIG, patience_seconds=0.1)
    with pytest.raises(NotReadyError, match="was not heard of"):
        builder.IndexBuilder(store, blocks, config).run(threading.Event())
    assert sum(embedded) == 1
    count, commit = blocks.num_blocks, donor.url("index/commits/5.json")
    assert f"{count} of {count} blocks copied from {commit}" in caplog.text
    np.testing.assert_array_equal(read_embeddings(store, 0), read_embeddings(donor, 5))


def town(i, mayor):
    text = f"Word{i} word1 word2 word3. Word4 word{i} is word{mayor}."
    return {"id": f"town-{i}", "title": f"word{i}", "text": text}


TOWNS = [town(i, 5) for i in range(30)]
# As between two snapshots of Wikipedia (REALM, section 4.5): one has another mayor, one
# is gone, one is new.
CHANGED = [town(11, 6), {"id": "town-3", "deleted": True}, town(30, 7)]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A corpus, and what `realm update-corpus` makes of it."""
    folder = tmp_path_factory.mktemp("versions")
    old = build_corpus(
        [Document(r["title"], r["text"], r["id"]) for r in TOWNS],
        folder / "old",
        vocabulary=VOCABULARY,
        tagger=RuleTagger(),
        chunk_length=24,
    )
    changes = folder / "changes.jsonl"
    changes.write_text("".join(f"{json.dumps(change)}\n" for change in CHANGED))
    config = UpdateConfig(str(old.directory), str(changes), str(folder / "new"))
    return old, update_corpus.run(config).store


def read(store, corpus, array=EMBEDDINGS):
    series = embedding_cache.index_series(store, corpus.fingerprint)
    return series.read_array(series.read_manifest(5), array)


def test_only_what_changed_is_embedded(versions, store, retriever, embedded):
    old, new = versions
    build(old, store, retriever)
    embedded.clear()
    build(new, store, retriever)
    fresh = num_unknown(new, old)
    assert 0 < fresh < new.num_blocks / 3
    assert sum(embedded) == fresh + 1  # The sample that is compared.
    expected = slow_embeddings(retriever, new)
    np.testing.assert_allclose(read(store, new), expected, atol=2e-5)
    # The index that checkpoints are bound to is what it was.
    assert SnapshotSeries(store, INDEX_SERIES).steps() == [5]
    assert len(read(store, old)) == old.num_blocks


def num_unknown(new, old):
    """How many blocks of the newer version the older one has not."""
    keys = [each.content_hashes.view("V16").ravel() for each in (new, old)]
    return np.count_nonzero(~np.isin(*keys))


def test_rows_of_another_version_are_used(versions, store, donor, retriever, embedded):
    old, new = versions
    build(old, donor, retriever)
    embedded.clear()
    build(new, store, given(retriever, donor.url()))
    assert sum(embedded) == num_unknown(new, old) + 1
    third = open_store(f"{donor.url()}-third")
    build(old, third, retriever)  # Nearer and newer, but not all of it.
    embedded.clear()
    build(new, third, given(retriever, store.url()))
    assert sum(embedded) == 1


def test_an_attempt_that_was_begun_without_hashes_goes_on(versions, store, retriever):
    old, _ = versions
    stop = threading.Event()
    stop.set()
    assert builder.build_once(retriever, old, store, CONFIG, stop=stop) is None
    for name in store.list("index/data"):
        if embedding_cache.HASHES in name:
            store.delete(name)
    build(old, store, retriever)
    found = read(store, old, embedding_cache.HASHES)
    np.testing.assert_array_equal(found, old.content_hashes)
