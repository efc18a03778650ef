"""Two versions of a corpus: only what changed is embedded, and all of it is found."""

import dataclasses
import json
import threading

import numpy as np
import pytest

from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.data.wordpiece import WordPiece
from realm_jax.index import builder, embedding_cache
from realm_jax.index.embed import (
    EmbedConfig,
    document_embedder,
    embed_blocks,
)
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.index.searchers import DeviceSearcher
from realm_jax.index.snapshots import EMBEDDINGS, INDEX_SERIES, SnapshotSeries
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.prepare import update_corpus
from realm_jax.prepare.update_corpus import UpdateConfig
from realm_jax.storage import open_store
from tests.corpus_builder import build_corpus
from tests.index.tiny_builder import given, random_params

LENGTH = 40
CONFIG = builder.BuilderConfig(
    embed=EmbedConfig(document_length=LENGTH, batch_size=4, shard_blocks=7)
)


def town(i, mayor):
    return {
        "id": f"town-{i}",
        "title": f"Town {i}",
        "text": f"Town {i} lies on the river Fosk. The mayor of Town {i} is {mayor}. "
        f"It has {i} mills and was founded in {1200 + i}.",
    }


TOWNS = [town(i, f"Karel Dorm the {i}th") for i in range(30)]
# As between two snapshots of Wikipedia (REALM, section 4.5): one has another mayor, one
# is gone, one is new.
CHANGED = [
    town(11, "Maria Brel"),
    {"id": "town-3", "deleted": True},
    town(30, "Anna Fosk"),
]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    """A corpus, and what `realm update-corpus` makes of it."""
    folder = tmp_path_factory.mktemp("versions")
    texts = [record["text"] for record in [*TOWNS, *CHANGED] if "text" in record]
    old = build_corpus(
        [Document(r["title"], r["text"], r["id"]) for r in TOWNS],
        folder / "old",
        vocabulary=WordPiece.train(texts, 300, folder / "vocab.txt"),
        tagger=RuleTagger(),
        chunk_length=LENGTH,
    )
    changes = folder / "changes.jsonl"
    changes.write_text("".join(f"{json.dumps(change)}\n" for change in CHANGED))
    config = UpdateConfig(str(old.directory), str(changes), str(folder / "new"))
    return old, update_corpus.run(config).store


@pytest.fixture(scope="module")
def retriever(versions):
    vocabulary = versions[0].vocabulary
    bert = BertConfig(vocabulary.size, 16, 1, 2, 32, LENGTH, initializer_range=0.5)
    config = RetrieverConfig(bert, projection_size=8)
    return TrainedRetriever(5, config, random_params(config), vocabulary.fingerprint)


def build(corpus, store, retriever, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return builder.build_once(retriever, corpus, store, config)


def read(store, corpus, step=5):
    series = embedding_cache.index_series(store, corpus.fingerprint)
    return series.read_array(series.read_manifest(step), EMBEDDINGS)


def test_only_what_changed_is_embedded_and_what_is_new_is_found(
    versions, store, retriever, embedded
):
    old, new = versions
    build(old, store, retriever)
    embedded.clear()
    build(new, store, retriever, sampled_blocks=1)
    fresh = num_unknown(new, old)
    assert 0 < fresh < new.num_blocks / 3
    assert sum(embedded) == fresh + 1  # The sample that is compared.
    whole = embed_blocks(
        document_embedder(retriever.config),
        retriever.params,
        new,
        np.arange(new.num_blocks),
        CONFIG.embed,
    )
    rows = read(store, new)
    np.testing.assert_allclose(rows, whole, atol=1e-5)
    # The index that checkpoints are bound to is what it was.
    assert SnapshotSeries(store, INDEX_SERIES).steps() == [5]
    assert len(read(store, old)) == old.num_blocks
    of_the_town = [i for i in range(new.num_blocks) if "Maria Brel" in new.text(i).body]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    found = np.asarray(DeviceSearcher(unit).search(unit[of_the_town], 1).ids)[:, 0]
    assert [new.text(int(i)).body for i in found] == [
        new.text(i).body for i in of_the_town
    ]
    titles = {new.text(i).title for i in range(new.num_blocks)}
    assert "Town 3" not in titles
    assert "Town 30" in titles


def num_unknown(new, old):
    """How many blocks of the newer version the older one has not."""
    keys = [each.content_hashes.view("V16").ravel() for each in (new, old)]
    return np.count_nonzero(~np.isin(*keys))


def test_rows_of_another_version_are_used_and_those_of_the_same_come_first(
    versions, store, donor, retriever, embedded
):
    old, new = versions
    build(old, donor, retriever)
    embedded.clear()
    build(new, store, given(retriever, donor.url()), sampled_blocks=1)
    assert sum(embedded) == num_unknown(new, old) + 1
    third = open_store(f"{donor.url()}-third")
    build(old, third, retriever)  # Nearer and newer, but not all of it.
    embedded.clear()
    build(new, third, given(retriever, store.url()), sampled_blocks=1)
    assert sum(embedded) == 1


def test_an_attempt_that_was_begun_without_hashes_goes_on(versions, store, retriever):
    old, _ = versions
    stop = threading.Event()
    stop.set()
    assert builder.build_once(retriever, old, store, CONFIG, stop=stop) is None
    for name in store.list("index/data"):
        if embedding_cache.HASHES in name:
            store.delete(name)
    manifest = build(old, store, retriever)
    series = embedding_cache.index_series(store, old.fingerprint)
    found = series.read_array(manifest, embedding_cache.HASHES)
    np.testing.assert_array_equal(found, old.content_hashes)
