"""Imported BERT weights: torch's answers, a round trip, and every refusal."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy

from realm_jax.errors import BadInputError
from realm_jax.models.bert import Bert, BertConfig
from realm_jax.weights import bert as weights

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


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    edit(tensors)
    safetensors.numpy.save_file(tensors, path)


def test_minilm_computes_what_torch_computes():
    golden = np.load(GOLDEN)
    config = weights.config_from_json(MINILM)
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


def test_config_of_minilm():
    assert weights.config_from_json(MINILM) == BertConfig(
        vocab_size=30522,
        hidden_size=384,
        num_layers=6,
        num_heads=12,
        mlp_size=1536,
        activation="gelu",
    )


def test_saving_and_loading_gives_the_same_parameters(folder, params):
    loaded = weights.load_bert(folder, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert weights.config_from_json(folder) == CONFIG


def test_saved_tensors_have_torch_names_and_shapes(folder, params):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    # 5 of embeddings, 16 a layer, 2 of the pooler.
    assert len(tensors) == 5 + 16 * CONFIG.num_layers + 2
    assert tensors["encoder.layer.2.intermediate.dense.weight"].shape == (20, 12)
    query = params["layers"]["attention"]["query"]
    # torch computes x @ weight.T: row h * head_dim + d makes feature d of head h.
    weight = tensors["encoder.layer.1.attention.self.query.weight"]
    np.testing.assert_array_equal(weight[6 + 2], query["kernel"][1, :, 1, 2])
    bias = tensors["encoder.layer.1.attention.self.query.bias"]
    np.testing.assert_array_equal(bias[6 + 2], query["bias"][1, 1, 2])


def test_prefix_and_masked_lm_head_of_other_exports_are_accepted(folder, params):
    def as_masked_lm(tensors):
        for name in list(tensors):
            tensors[f"bert.{name}"] = tensors.pop(name)
        tensors["cls.predictions.bias"] = np.zeros(20, np.float32)

    edit_tensors(folder, as_masked_lm)
    loaded = weights.load_bert(folder, CONFIG)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_all_that_does_not_fit_is_named_in_one_line(folder):
    def damage(tensors):
        del tensors["encoder.layer.1.output.dense.weight"]
        tensors["encoder.layer.3.output.dense.bias"] = np.zeros(12, np.float32)
        tensors["pooler.dense.bias"] = np.zeros(13, np.float32)

    edit_tensors(folder, damage)
    with pytest.raises(BadInputError) as error:
        weights.load_bert(folder, CONFIG)
    message = str(error.value)
    assert "encoder.layer.1.output.dense.weight is missing" in message
    assert "encoder.layer.3.output.dense.bias is not known" in message
    assert "pooler.dense.bias has shape (13,)" in message
    assert "3 in all" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 2}, {"num_layers": 4}, {"vocab_size": 21}, {"mlp_size": 24}],
    ids=str,
)
def test_weights_of_another_size_are_refused(folder, change):
    with pytest.raises(BadInputError, match=r"model\.safetensors"):
        weights.load_bert(folder, dataclasses.replace(CONFIG, **change))


def test_a_transposed_square_matrix_of_heads_is_not_mistaken(folder, params):
    """Kernels are turned: a weight read without that would have another product."""
    loaded = weights.load_bert(folder, CONFIG)
    output = loaded["layers"]["attention"]["output"]["kernel"]
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    x = np.arange(12, dtype=np.float32)
    np.testing.assert_allclose(
        np.einsum("hd,hde->e", x.reshape(2, 6), output[0]),
        tensors["encoder.layer.0.attention.output.dense.weight"] @ x,
        rtol=1e-4,
        atol=1e-4,
    )


def test_another_activation_is_refused(folder):
    with pytest.raises(BadInputError, match=r"'gelu_tanh'.*'gelu'"):
        weights.load_bert(folder, dataclasses.replace(CONFIG, activation="gelu_tanh"))


@pytest.mark.parametrize("content", [None, b"", b"not safetensors"])
def test_missing_or_damaged_files_are_refused(folder, content):
    for name, read in (
        ("config.json", weights.config_from_json),
        ("model.safetensors", lambda path: weights.load_bert(path, CONFIG)),
    ):
        path = folder / name
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(BadInputError, match=name.replace(".", r"\.")):
            read(folder)
        path.unlink(missing_ok=True)


def test_a_configuration_of_another_architecture_is_refused(folder):
    (folder / "config.json").write_text(
        json.dumps({**CONFIG_JSON, "hidden_act": "relu"})
    )
    with pytest.raises(BadInputError, match=r"config\.json"):
        weights.config_from_json(folder)
