"""`realm import-weights` of BERT and of sentence encoders, whatever their files."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

import realm_jax
from realm_jax.data.tokenizer_files import load_vocabulary
from realm_jax.models.retriever import RetrieverConfig
from realm_jax.training.recorded import open_run
from realm_jax.weights.published import read_published
from realm_jax.weights.sentence_encoder import save_sentence_encoder
from tests.tiny_world import assert_same_bits
from tests.weights.sentence_encoder_twin import encode

TEXTS = ["the river", "who was near the old mill"]


@pytest.fixture
def folder(models, tmp_path):
    """The encoder of REALM as a BertForMaskedLM."""
    made = tmp_path / "bert"
    shutil.copytree(models / "encoder", made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    edit(made, lambda name: name.replace("realm.", "bert."))
    return made


def edit(folder, rename, add=None):
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in renamed.items() if name}
    safetensors.numpy.save_file(kept | (add or {}), path)


def test_bert_is_retriever_and_reader(folder, models, tmp_path, capsys, import_weights):
    add = {"cls.seq_relationship.bias": np.zeros(2, np.float32)}
    edit(folder, lambda name: name, add)
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

    edit(folder, old)
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
