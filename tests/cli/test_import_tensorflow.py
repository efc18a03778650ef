"""`realm import-weights` of what REALM was published as: modules, blocks, rows."""

import numpy as np
import pytest
import tensorflow as tf

import realm_jax
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.storage import open_store
from tests.weights.published_models import unpacked
from tests.weights.tf_checkpoints import bert_config, of_embedder, save, variables_of

TITLES = ["river", "mill", "", "old town"]
TEXTS = ["the river is near", "a mill was built. it is old", "king and queen", "bridge"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """An embedder of the published layout, with a vocabulary in assets/."""
    root = tmp_path_factory.mktemp("tensorflow")
    folder = unpacked(root) / "embedder"
    made = root / "tf"
    save(made / "variables" / "variables", variables_of(folder, of_embedder(2)))
    bert_config(folder, made / "variables" / "bert_config.json")
    (made / "assets").mkdir()
    (folder / "vocab.txt").rename(made / "assets" / "vocab.txt")
    return made


def write_records(path, texts):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for text in texts:
            writer.write(text.encode())
    return path


def test_blocks_and_their_embeddings_are_a_corpus_and_an_index(
    embedder, tmp_path, realm, refuse
):
    blocks = write_records(tmp_path / "blocks.tfr", TEXTS)
    titles = write_records(tmp_path / "titles.tfr", TITLES)
    dest, corpus = tmp_path / "pretrain", tmp_path / "corpus"
    rows = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    encoded = tmp_path / "encoded" / "encoded.ckpt"
    save(encoded, {"block_emb": rows})
    words = ["import-weights", embedder, dest, f"--corpus={corpus}"]
    words += [f"--blocks={blocks}", f"--titles={titles}", f"--embeddings={encoded}"]
    assert "index: 4 blocks, verified; embedded not as" in realm(*words)
    store = realm_jax.open_corpus(corpus)
    assert [store.text(i).title for i in range(4)] == TITLES
    assert [store.text(i).body for i in range(4)] == TEXTS
    assert len(store.text(1).sentences) == 2
    series = SnapshotSeries(open_store(dest), INDEX_SERIES)
    manifest = series.latest()
    series.verify(manifest)
    np.testing.assert_array_equal(series.read_array(manifest, "embeddings"), rows)
    model = realm_jax.load(dest)
    scores = rows @ model.embed("the old bridge")
    assert model.search("the old bridge", k=1)[0].block_id == scores.argmax()

    # Embeddings that the embedder makes of the blocks are known as its own.
    made = SnapshotSeries(open_store(tmp_path / "other"), INDEX_SERIES)
    words[2] = tmp_path / "other"
    realm(*words[:4])
    realm_jax.load(tmp_path / "other")
    of_embedder = made.read_array(made.latest(), "embeddings")
    save(encoded, {"block_emb": of_embedder})
    words[2] = tmp_path / "again"
    assert "index: 4 blocks, verified; embedded as" in realm(*words)
    again = SnapshotSeries(open_store(tmp_path / "again"), INDEX_SERIES).latest()
    assert (
        again.metadata["document_crc32c"] == made.latest().metadata["document_crc32c"]
    )

    # What does not belong together.
    words[2] = tmp_path / "more"
    save(encoded, {"block_emb": rows[:3]})
    refuse(words, "4 blocks", "got 3")
    save(encoded, {"block_emb": rows[:, :5]})
    refuse(words, "8 features", "got 5")
    save(encoded, {"block_emb": rows})
    other = write_records(tmp_path / "other.tfr", TEXTS[:2])
    words[4] = f"--blocks={other}"
    refuse(words, "made of", "other.tfr")
    words[3] = f"--corpus={tmp_path / 'new'}"
    refuse(words, "another number")
    data = bytearray(other.read_bytes())
    data[20] ^= 1
    other.write_bytes(data)
    refuse(words[:5], "record 0 is damaged")
    other.write_bytes(data[:-3])
    refuse(words[:5], "record")
    assert not (tmp_path / "more").exists()
    assert not (tmp_path / "new").exists()
