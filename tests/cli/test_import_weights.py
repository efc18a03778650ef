"""`realm import-weights`: published models become model directories."""

import json
import shutil

import jax
import numpy as np

import realm_jax
from bench.weights_parity import answers
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.run_record import read_records
from realm_jax.storage import open_store
from realm_jax.training.initialization import described_models, warm_start_params
from realm_jax.training.recorded import open_run
from realm_jax.types import Lengths
from realm_jax.weights.published import read_published
from tests.tiny_world import assert_same_bits


def test_questions_have_the_answers_of_transformers(models, tmp_path):
    expected, found = answers(models / "openqa", tmp_path)
    assert found == expected
    assert len(set(found)) > 3
    store = open_store(tmp_path / "finetune")
    series = SnapshotSeries(store, INDEX_SERIES)
    manifest = series.latest()
    series.verify(manifest)
    given = np.load(models / "openqa" / "expected.npz")["block_embeddings"]
    rows = series.read_array(manifest, "embeddings")
    np.testing.assert_array_equal(rows, given)
    # They are random numbers, and not what the embedder makes of the blocks.
    assert "document_crc32c" not in manifest.metadata
    text = realm_jax.open_corpus(tmp_path / "corpus").text(3)
    records = np.load(models / "openqa" / "block_records.npy", allow_pickle=True)
    assert text.body == records[3].decode()


def test_an_embedder_and_an_encoder_are_a_pre_training(
    models, tmp_path, capsys, import_weights
):
    dest = tmp_path / "pretrain"
    restored = import_weights(models / "embedder", models / "encoder", dest)
    said = capsys.readouterr().out
    assert "embedder: RealmEmbedder\n  not used: cls.predictions (1)" in said
    assert f"wrote {dest}, as a run of `realm pretrain`" in said
    embedder, encoder = (
        read_published(str(models / name)) for name in ("embedder", "encoder")
    )
    published = {"retriever": embedder.towers, "reader": encoder.reader}
    assert_same_bits(restored, published)
    trained = open_run(str(dest)).trained
    assert trained.model["shared"]
    assert trained.model["layer_norm_epsilon"] == 1e-6
    (record,) = read_records(open_store(dest))
    listed = list(record.settings["imported"].values())
    assert [found["class"] for found in listed] == [embedder.name, encoder.name]
    assert "cls.predictions.bias" in listed[0]["unused"]

    # Any stage starts from it.
    models_of = described_models(trained.model, Lengths(**trained.lengths))
    vocabulary = load_vocabulary(dest / "vocab.txt")
    config = models_of.retriever_config(vocabulary.size)
    nothing = jax.tree.map(np.zeros_like, published)
    assert_same_bits(
        warm_start_params(nothing, str(dest), config, vocabulary), published
    )


def test_a_fine_tuned_model_has_the_documents_of_the_embedder_before(
    models, tmp_path, refuse, import_weights
):
    dest = tmp_path / "finetune"
    towers = import_weights(models / "embedder", models / "openqa", dest)["retriever"]
    openqa, embedder = (
        read_published(str(models / name)).towers["tower"]
        for name in ("openqa", "embedder")
    )
    assert_same_bits(towers, {"query_tower": openqa, "document_tower": embedder})
    # Of no corpus yet.
    refuse(["search", dest, "the river"], "--corpus")


def test_a_reader_alone_is_something_to_start_from(
    models, tmp_path, refuse, import_weights
):
    dest = tmp_path / "reader"
    assert set(import_weights(models / "reader", dest)) == {"reader"}
    corpus = tmp_path / "corpus"
    import_weights(models / "openqa", tmp_path / "openqa", f"--corpus={corpus}")
    options = [f"--corpus={corpus}", "--allow_corpus_mismatch"]
    refuse(["search", dest, "the river", *options], "reader alone", "embedder")


def test_what_does_not_fit_is_one_line(models, tmp_path, refuse):
    dest = tmp_path / "made"

    def refused(sources, *words, options=()):
        names = [models / name for name in sources]
        refuse(["import-weights", *names, dest, *options], *words)
        assert not dest.exists()

    refused(["encoder", "reader"], "one reader", "RealmReader")
    refused(["embedder", "scorer"], "one embedder", "RealmScorer")
    other = tmp_path / "other"
    shutil.copytree(models / "encoder", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-5}))
    refused(["embedder", other], "one encoder")
    (other / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    shutil.copy(models / "encoder" / "config.json", other)
    refused([other], "35 wordpieces", "got 5")
    (other / "vocab.txt").unlink()
    refused([other], "--vocabulary")
    corpus = [f"--corpus={tmp_path / 'corpus'}"]
    refused(["embedder"], "--blocks", options=corpus)
    refused(["embedder"], "--corpus beside", options=["--blocks=blocks.tfr"])
    records = tmp_path / "blocks.npy"
    for data in (b"", b"\x93NUMPY\x01\x00", (models / "vocab.txt").read_bytes()):
        records.write_bytes(data)
        blocks = [*corpus, f"--blocks={records}"]
        refused(["openqa"], "texts of blocks", options=blocks)
    few = np.array([b"the river", b"a mill"], dtype=object)
    np.save(records, few, allow_pickle=True)
    refused(["openqa"], "2 blocks", "got 12", options=blocks)
    dest.mkdir()
    (dest / "file").touch()
    refuse(["import-weights", models / "embedder", dest], "absent or empty")
