"""Two versions of a corpus: only what changed is embedded, and all of it is found."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from realm_jax.data.corpus import build_corpus
from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.data.wordpiece import WordPiece
from realm_jax.index import build as attempt
from realm_jax.index import builder, reuse
from realm_jax.index.embed import EmbedConfig, document_embedder, embed_blocks
from realm_jax.index.retrievers import TrainedRetriever
from realm_jax.index.searchers import DeviceSearcher
from realm_jax.index.snapshots import EMBEDDINGS, SnapshotSeries
from realm_jax.models.bert import BertConfig
from realm_jax.models.retriever import Retriever, RetrieverConfig

LENGTH = 40
CONFIG = builder.BuilderConfig(
    embed=EmbedConfig(document_length=LENGTH, batch_size=4, shard_blocks=7)
)


def articles(*, changed=False):
    """Thirty towns; in the second version one has another mayor, one is gone, one new.

    As between two snapshots of Wikipedia (REALM, section 4.5).
    """
    mayors = {i: f"Karel Dorm the {i}th" for i in range(30)}
    if changed:
        mayors[11] = "Maria Brel"
        del mayors[3]
        mayors[30] = "Anna Fosk"
    return [
        Document(
            f"Town {i}",
            f"Town {i} lies on the river Fosk. The mayor of Town {i} is {mayor}. It "
            f"has {i} mills and was founded in {1200 + i}.",
            f"town-{i}",
        )
        for i, mayor in mayors.items()
    ]


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    texts = [document.text for document in articles() + articles(changed=True)]
    vocabulary = WordPiece.train(texts, 300, folder / "vocab.txt")
    return [
        build_corpus(
            articles(changed=changed),
            folder / str(changed),
            vocabulary=vocabulary,
            tagger=RuleTagger(),
            chunk_length=LENGTH,
        )
        for changed in (False, True)
    ]


@pytest.fixture(scope="module")
def retriever(versions):
    vocabulary = versions[0].vocabulary
    bert = BertConfig(vocabulary.size, 16, 1, 2, 32, LENGTH, initializer_range=0.5)
    config = RetrieverConfig(bert, projection_size=8)
    ids = np.zeros((1, 8), np.int32)
    params = Retriever(config).init(jax.random.key(0), ids, ids, ids)["params"]
    return TrainedRetriever(5, config, jax.device_get(params), vocabulary.fingerprint)


@pytest.fixture
def embedded(monkeypatch):
    """How many blocks were embedded to be written, not to be compared."""
    counts = []

    def counting(function, count):
        def call(*arguments):
            counts.append(count(arguments[3]))
            return function(*arguments)

        return call

    monkeypatch.setattr(
        attempt,
        "embed_shards",
        counting(attempt.embed_shards, lambda shards: sum(map(len, shards))),
    )
    monkeypatch.setattr(attempt, "embed_blocks", counting(attempt.embed_blocks, len))
    return counts


def build(corpus, store, retriever, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return builder.build_once(retriever, corpus, store, config)


def read(store, corpus, step=5):
    series = reuse.index_series(store, corpus.fingerprint)
    return series.read_array(series.read_manifest(step), EMBEDDINGS)


def test_only_what_changed_is_embedded(versions, model_store, retriever, embedded):
    old, new = versions
    build(old, model_store, retriever)
    embedded.clear()
    build(new, model_store, retriever, sampled_blocks=1)
    fresh = ~np.isin(
        new.content_hashes.view("V16").ravel(), old.content_hashes.view("V16").ravel()
    )
    assert 0 < fresh.sum() < new.num_blocks / 3
    assert sum(embedded) == fresh.sum() + 1  # The sample that is compared.
    whole = embed_blocks(
        document_embedder(retriever.config),
        retriever.params,
        new,
        np.arange(new.num_blocks),
        CONFIG.embed,
    )
    np.testing.assert_allclose(read(model_store, new), whole, atol=1e-5)
    # The index that checkpoints are bound to is what it was.
    assert SnapshotSeries(model_store, reuse.INDEX_SERIES).steps() == [5]
    assert len(read(model_store, old)) == old.num_blocks


def test_what_the_new_version_says_is_found(versions, model_store, retriever):
    old, new = versions
    build(old, model_store, retriever)
    build(new, model_store, retriever)
    of_the_town = [i for i in range(new.num_blocks) if "Maria Brel" in new.text(i).body]
    searcher = DeviceSearcher(read(model_store, new))
    query = read(model_store, new)[of_the_town]
    found = np.asarray(searcher.search(query, 1).ids)[:, 0]
    assert [new.text(int(i)).body for i in found] == [
        new.text(i).body for i in of_the_town
    ]
    gone = [new.text(i).title for i in range(new.num_blocks)]
    assert "Town 3" not in gone
    assert "Town 30" in gone


def test_another_encoder_or_length_reuses_nothing(
    versions, model_store, retriever, embedded
):
    old, new = versions
    build(old, model_store, retriever)
    other = dataclasses.replace(
        retriever,
        params=jax.tree.map(lambda x: x * np.float32(1.5), retriever.params),
    )
    # The same parameters, and other embeddings.
    pooled = dataclasses.replace(
        retriever, config=dataclasses.replace(retriever.config, pooling="mean")
    )
    shorter = dataclasses.replace(CONFIG.embed, document_length=30)
    cases = [(other, {}), (pooled, {}), (retriever, {"embed": shorter})]
    for step, (source, changes) in enumerate(cases, start=6):
        embedded.clear()
        at_step = dataclasses.replace(source, step=step)
        build(new, model_store, at_step, sampled_blocks=1, **changes)
        assert sum(embedded) == new.num_blocks + 1


def test_a_damaged_index_is_not_reused(versions, model_store, retriever, embedded):
    old, new = versions
    manifest = build(old, model_store, retriever)
    name = next(n for n in manifest.files if n.startswith(f"{EMBEDDINGS}/c/"))
    path = f"index/data/5-{manifest.attempt}/{name}"
    data = model_store.read(path)
    model_store.write(path, data[:-1] + bytes([data[-1] ^ 1]))
    embedded.clear()
    build(new, model_store, retriever, sampled_blocks=1)
    assert sum(embedded) == new.num_blocks + 1


def test_an_attempt_that_was_begun_without_hashes_goes_on(
    versions, model_store, retriever
):
    old, _ = versions
    stop = threading.Event()
    stop.set()
    assert builder.build_once(retriever, old, model_store, CONFIG, stop=stop) is None
    for name in model_store.list("index/data"):
        if reuse.HASHES in name:
            model_store.delete(name)
    manifest = build(old, model_store, retriever)
    series = reuse.index_series(model_store, old.fingerprint)
    found = series.read_array(manifest, reuse.HASHES)
    np.testing.assert_array_equal(found, old.content_hashes)
