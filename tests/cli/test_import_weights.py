"""`realm import-weights`: published models become model directories."""

import json
import shutil

import jax
import numpy as np
import pytest

import realm_jax
from bench.weights_parity import answers
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.index.snapshots import INDEX_SERIES, SnapshotSeries
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.run_record import read_records
from realm_jax.storage import open_store
from realm_jax.training.initialization import described_models, warm_start_params
from realm_jax.training.recorded import open_run
from realm_jax.types import Lengths
from realm_jax.weights.published import read_published
from realm_jax.weights.sentence_encoder import save_sentence_encoder
from tests.tiny_world import assert_same_bits
from tests.weights.sentence_encoder_twin import encode
from tests.weights.tiny_classifier import edit_tensors


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


# BERT and sentence encoders, whatever their files.

TEXTS = ["the river", "who was near the old mill"]


@pytest.fixture
def folder(models, tmp_path):
    """The encoder of REALM as a BertForMaskedLM."""
    made = tmp_path / "bert"
    shutil.copytree(models / "encoder", made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    rename(made, lambda name: name.replace("realm.", "bert."))
    return made


def rename(folder, renamed):
    """Renames the tensors of a folder; those without a new name are left out."""

    def edit(tensors):
        for name in list(tensors):
            tensor = tensors.pop(name)
            if renamed(name):
                tensors[renamed(name)] = tensor

    edit_tensors(folder, edit)


def test_bert_is_retriever_and_reader(folder, models, tmp_path, capsys, import_weights):
    more = {"cls.seq_relationship.bias": np.zeros(2, np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(more))
    found = import_weights(folder, tmp_path / "made")
    expected = read_published(str(models / "encoder")).reader
    assert_same_bits(found["reader"], expected)
    assert_same_bits(found["retriever"], {"tower": {"bert": expected["bert"]}})
    said = capsys.readouterr().out
    assert "BertForMaskedLM\n  not used: cls.seq_relationship (1)" in said
    trained = open_run(str(tmp_path / "made")).trained
    assert (trained.stage, trained.model["pooling"]) == ("warm_start", "mean")


def test_both_spellings_and_neither_head_nor_pooler(
    folder, models, tmp_path, import_weights
):
    def old(name):
        bare = name.removeprefix("bert.")
        bare = bare.replace("LayerNorm.weight", "LayerNorm.gamma")
        bare = bare.replace("LayerNorm.bias", "LayerNorm.beta")
        return "" if bare.startswith(("cls.", "pooler.")) else bare

    rename(folder, old)
    found = import_weights(folder, tmp_path / "made")
    expected = dict(read_published(str(models / "encoder")).reader["bert"])
    expected["pooler"] = {n: np.zeros_like(a) for n, a in expected["pooler"].items()}
    assert_same_bits(found["reader"], {"bert": expected})
    assert read_published(str(folder)).missing == [
        "cls.predictions.* (a new one is drawn)",
        "pooler.dense",
    ]


def test_beside_an_embedder_bert_is_the_reader(
    folder, models, tmp_path, import_weights
):
    found = import_weights(models / "embedder", folder, tmp_path / "made")
    embedder = read_published(str(models / "embedder"))
    assert_same_bits(found["retriever"], embedder.towers)
    assert set(found["reader"]) == {"bert", "head_dense", "head_norm", "head_bias"}


def test_a_sentence_encoder_embeds_as_it_did(models, tmp_path, import_weights):
    """With prompts, a dense layer and normalised, as sentence-transformers has it."""
    bert = read_published(str(models / "encoder"))
    vocabulary = load_vocabulary(models / "encoder" / "vocab.txt")
    rng = np.random.default_rng(0)
    tower = {
        "bert": bert.reader["bert"],
        "dense": {
            "kernel": rng.normal(size=(16, 6)).astype(np.float32),
            "bias": rng.normal(size=6).astype(np.float32),
        },
    }
    config = RetrieverConfig(
        bert=bert.bert,
        projection_size=6,
        pooling="cls_state",
        dense_size=6,
        dense_activation="tanh",
        normalize=True,
        projected=False,
        query_prefix=tuple(vocabulary.encode("who is ").ids.tolist()),
    )
    source = tmp_path / "encoder"
    source.mkdir()
    save_sentence_encoder(source, tower, config, vocabulary, max_length=30)
    found = import_weights(source, tmp_path / "made")
    assert_same_bits(found["retriever"], {"tower": tower})
    blocks = np.array([b"the river is near", b"a mill"], dtype=object)
    np.save(tmp_path / "blocks.npy", blocks, allow_pickle=True)
    options = [f"--corpus={tmp_path / 'corpus'}", f"--blocks={tmp_path / 'blocks.npy'}"]
    import_weights(*options, source, tmp_path / "searched")
    model = realm_jax.load(tmp_path / "searched")
    expected = encode(source, TEXTS, "who is ")
    np.testing.assert_allclose(model.embed(TEXTS), expected, atol=1e-5)
