"""Imported BERT weights: torch's answers, a round trip, and every refusal."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from realm_jax.models.bert import Bert, BertConfig
from realm_jax.weights import bert as weights
from tests.refused import refused
from tests.weights.tiny_classifier import edit_tensors

MINILM = pathlib.Path(__file__).parents[2] / ".cache/data/minilm-l6"
GOLDEN = pathlib.Path(__file__).parent / "minilm_golden.npz"

CONFIG = BertConfig(
    vocab_size=20,
    hidden_size=12,
    num_layers=3,
    num_heads=2,
    mlp_size=20,
    max_positions=8,
    activation="gelu",
)
CONFIG_JSON = {
    "vocab_size": 20,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 8,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


@pytest.fixture(scope="module")
def params():
    ids = np.zeros((1, 2), np.int32)
    shapes = jax.eval_shape(Bert(CONFIG).init, jax.random.key(0), ids, ids)["params"]
    # Biases and scales too must differ, or swapping two of them would not show.
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


@pytest.fixture
def folder(tmp_path, params):
    weights.save_bert(tmp_path / "model.safetensors", params, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_JSON))
    return tmp_path


def test_minilm_computes_what_torch_computes():
    golden = np.load(GOLDEN)
    config = weights.config_from_json(MINILM)
    sizes = {"vocab_size": 30522, "hidden_size": 384, "mlp_size": 1536}
    assert config == BertConfig(num_layers=6, num_heads=12, activation="gelu", **sizes)
    params = weights.load_bert(MINILM, config)
    encoded = jax.jit(Bert(config).apply)(
        {"params": params}, golden["ids"], golden["segment_ids"]
    )
    features = encoded.sequence[..., :: int(golden["feature_stride"])]
    is_token = golden["ids"] != 0
    np.testing.assert_allclose(
        features[is_token], golden["sequence"][is_token], atol=1e-4, rtol=0
    )
    np.testing.assert_allclose(encoded.pooled, golden["pooled"], atol=1e-4, rtol=0)


def test_saving_and_loading_gives_the_same_parameters(folder, params):
    loaded = weights.load_bert(folder, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert weights.config_from_json(folder) == CONFIG
    # A file without a head gives the encoder alone.
    assert set(weights.load_masked_lm(folder, CONFIG)) == {"bert"}


def test_all_that_does_not_fit_is_named_in_one_line(folder):
    def damage(tensors):
        del tensors["encoder.layer.1.output.dense.weight"]
        tensors["encoder.layer.3.output.dense.bias"] = np.zeros(12, np.float32)
        tensors["pooler.dense.bias"] = np.zeros(13, np.float32)

    edit_tensors(folder, damage)
    for said in (
        r"encoder\.layer\.1\.output\.dense\.weight is missing",
        r"encoder\.layer\.3\.output\.dense\.bias is not known",
        r"pooler\.dense\.bias has shape \(13,\)",
        "3 in all",
    ):
        with refused(said):
            weights.load_bert(folder, CONFIG)


def test_weights_of_another_configuration_are_refused(folder):
    for name, value, said in [
        ("num_layers", 2, r"model\.safetensors"),
        ("num_layers", 4, r"model\.safetensors"),
        ("vocab_size", 21, r"model\.safetensors"),
        ("mlp_size", 24, r"model\.safetensors"),
        # Settings that no shape shows.
        ("activation", "gelu_tanh", """activation='"gelu"'"""),
        ("num_heads", 3, "num_heads=2"),
        ("layer_norm_epsilon", 1e-5, "layer_norm_epsilon=1e-12"),
    ]:
        binding = rf"{name} {value!r} in .*set --gin\.bert\.BertConfig\.{said}$"
        with refused(said if said.startswith("model") else binding):
            weights.load_bert(folder, dataclasses.replace(CONFIG, **{name: value}))


def as_tensorflow_spells(tensors):
    """The names of bert-base-uncased."""
    for name in list(tensors):
        for new, old in (("weight", "gamma"), ("bias", "beta")):
            if name.endswith(f"LayerNorm.{new}"):
                tensors[name.removesuffix(new) + old] = tensors.pop(name)


def test_layer_norm_in_both_spellings_at_once_is_refused(folder):
    def repeat(tensors):
        as_tensorflow_spells(tensors)
        assert sum(name.endswith((".gamma", ".beta")) for name in tensors) == 2 * 7
        tensors["embeddings.LayerNorm.bias"] = np.zeros(12, np.float32)

    edit_tensors(folder, repeat)
    with refused(r"LayerNorm\.\w+ is not known"):
        weights.load_bert(folder, CONFIG)


@pytest.fixture
def reader_params(params):
    rng = np.random.default_rng(1)

    def drawn(*shape):
        return rng.normal(size=shape).astype(np.float32)

    return {
        "bert": params,
        "head_dense": {"kernel": drawn(12, 12), "bias": drawn(12)},
        "head_norm": {"scale": drawn(12), "bias": drawn(12)},
        "head_bias": drawn(20),
    }


@pytest.fixture
def masked_lm(folder, reader_params):
    weights.save_masked_lm(folder / "model.safetensors", reader_params, CONFIG)
    return folder


def tie_decoder(tensors):
    embeddings = tensors["bert.embeddings.word_embeddings.weight"]
    tensors["cls.predictions.decoder.weight"] = embeddings
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    tensors["cls.seq_relationship.bias"] = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    "edit", [lambda tensors: None, as_tensorflow_spells, tie_decoder]
)
def test_a_masked_lm_comes_back_with_its_head(masked_lm, reader_params, edit):
    edit_tensors(masked_lm, edit)
    loaded = weights.load_masked_lm(masked_lm, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, loaded, reader_params)
    encoder = weights.load_bert(masked_lm, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, encoder, reader_params["bert"])


def test_a_head_that_does_not_fit_is_refused(masked_lm):
    path = masked_lm / "model.safetensors"
    sound = safetensors.numpy.load_file(path)
    other = np.zeros((20, 12), np.float32)
    for name, value, said in [
        ("transform.dense.bias", None, "transform.dense.bias is missing"),
        ("bias", np.zeros(19, np.float32), r"bias has shape \(19,\)"),
        ("decoder.weight", other, "decoder.weight is not embeddings.word_embeddings"),
    ]:
        tensors = {**sound, f"cls.predictions.{name}": value}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        safetensors.numpy.save_file(kept, path)
        with refused(rf"cls\.predictions\.{said}"):
            weights.load_masked_lm(masked_lm, CONFIG)
        # The encoder is whole.
        weights.load_bert(masked_lm, CONFIG)


def test_missing_damaged_or_other_files_are_refused(folder):
    other = json.dumps({**CONFIG_JSON, "hidden_act": "relu"})
    (folder / "config.json").write_text(other)
    with refused(r"config\.json"):
        weights.config_from_json(folder)
    for name, read in (
        ("config.json", weights.config_from_json),
        ("model.safetensors", lambda path: weights.load_bert(path, CONFIG)),
    ):
        for content in (b"", b"not safetensors", None):
            path = folder / name
            path.unlink() if content is None else path.write_bytes(content)
            with refused(name.replace(".", r"\.")):
                read(folder)
