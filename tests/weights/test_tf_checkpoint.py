"""Checkpoints of TensorFlow are read as TensorFlow reads them."""

import contextlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from realm_jax.weights.published import block_embeddings, read_published
from realm_jax.weights.stored import DamagedWeightsError
from realm_jax.weights.tensors import read_tensors
from realm_jax.weights.tf_checkpoint import checkpoint_prefix, tf_tensors
from tests.refused import refused
from tests.tiny_world import assert_same_bits
from tests.weights.tf_checkpoints import (
    bert_config,
    of_embedder,
    of_openqa,
    save,
    variables_of,
)

OPTIMIZER = {
    "global_step": np.int64(7),
    "bert/pooler/dense/bias/adam_m": np.ones(16, np.float32),
    "bert/pooler/dense/bias/adam_v": np.ones(16, np.float32),
}


@pytest.mark.parametrize("depth", [0, 2])
def test_the_published_embedder(depth, models, tmp_path):
    """Instantiated within modules, or as the variables of a TF-Hub module."""
    folder = models / "embedder"
    prefix = tmp_path / "embedder" / "variables" / "variables"
    save(prefix, variables_of(folder, of_embedder(depth)) | OPTIMIZER)
    bert_config(folder, prefix.with_name("bert_config.json"))
    found = read_published(str(tmp_path / "embedder"))
    assert_same_bits(found.towers, read_published(str(folder)).towers)
    assert found.retriever.projection_size == 8
    assert (found.bert.activation, found.bert.layer_norm_epsilon) == (
        "gelu_tanh",
        1e-12,
    )
    *others, of_optimizer = found.unused
    assert of_optimizer == "3 variables of the optimizer"
    assert len(others) == 5
    assert all("predictions" in name for name in others)


def test_the_published_encoder_and_bert(models, tmp_path):
    folder = models / "encoder"
    variables = variables_of(folder, lambda name: name)
    extra = {"cls/seq_relationship/output_bias": np.zeros(2, np.float32)}
    save(tmp_path / "bert_model.ckpt", variables | extra | OPTIMIZER)
    bert_config(folder, tmp_path / "bert_config.json")
    for place in (tmp_path, tmp_path / "bert_model.ckpt"):
        found = read_published(str(place))
        assert_same_bits(found.reader, read_published(str(folder)).reader)
        assert found.unused == [*extra, "3 variables of the optimizer"]


def test_a_checkpoint_of_pre_training_has_both(models, tmp_path):
    prefix = tmp_path / "model.ckpt-200000"
    variables = variables_of(models / "embedder", of_embedder(2), ["cls.predictions"])
    save(prefix, variables | variables_of(models / "encoder", lambda name: name))
    bert_config(models / "encoder", tmp_path / "bert_config.json")
    found = read_published(str(prefix))
    assert_same_bits(found.towers, read_published(str(models / "embedder")).towers)
    assert_same_bits(found.reader, read_published(str(models / "encoder")).reader)
    assert not found.unused


def test_a_fine_tuned_checkpoint(models, tmp_path):
    folder = models / "openqa"
    prefix = tmp_path / "best_default" / "checkpoint" / "model.ckpt-300"
    save(prefix, variables_of(folder, of_openqa, ["block_emb"]) | OPTIMIZER)
    bert_config(folder, prefix.with_name("bert_config.json"))
    found, expected = read_published(str(prefix)), read_published(str(folder))
    assert_same_bits(found.towers, expected.towers)
    assert_same_bits(found.reader, expected.reader)
    assert found.reading is not None
    assert (found.reading.num_read, found.reading.layer_norm_epsilon) == (5, 1e-3)


def test_sizes_of_a_checkpoint_without_settings(models, tmp_path):
    save(tmp_path / "model.ckpt", variables_of(models / "encoder", lambda name: name))
    found = read_published(str(tmp_path / "model.ckpt")).bert
    expected = read_published(str(models / "encoder")).bert
    sizes = ("vocab_size", "hidden_size", "num_layers", "mlp_size", "max_positions")
    for name in sizes:
        assert getattr(found, name) == getattr(expected, name)
    # 64 features a head, or one head.
    assert found.num_heads == 1


def test_bert_of_the_model_garden(models, tmp_path):
    """TF2: object paths, and heads as axes of their own."""
    folder, heads = models / "encoder", 2
    expected = read_published(str(folder)).reader["bert"]
    modules = {
        "attention.self.query": "_attention_layer/_query_dense",
        "attention.self.key": "_attention_layer/_key_dense",
        "attention.self.value": "_attention_layer/_value_dense",
        "attention.output.dense": "_attention_layer/_output_dense",
        "attention.output.LayerNorm": "_attention_layer_norm",
        "intermediate.dense": "_intermediate_dense",
        "output.dense": "_output_dense",
        "output.LayerNorm": "_output_layer_norm",
    }
    others = {
        "embeddings.word_embeddings": 0,
        "embeddings.position_embeddings": 1,
        "embeddings.token_type_embeddings": 2,
        "embeddings.LayerNorm": 3,
        "pooler.dense": 6,
    }
    variables = {"save_counter/.ATTRIBUTES/VARIABLE_VALUE": np.int64(1)}
    for name, value in read_tensors(folder).items():
        if not name.startswith("realm."):
            continue
        module, _, kind = name.removeprefix("realm.").rpartition(".")
        if module.endswith("_embeddings"):
            leaf = "embeddings"
        elif module.endswith("LayerNorm"):
            leaf = {"weight": "gamma", "bias": "beta"}[kind]
        else:
            leaf, value = {"weight": "kernel", "bias": "bias"}[kind], value.T
        place = others.get(module)
        if place is None:
            _, _, number, module = module.split(".", 3)
            place = f"{int(number) + 4}/{modules[module]}"
            if module.startswith("attention.self"):
                value = value.reshape(*value.shape[:-1], heads, -1)
            elif module == "attention.output.dense" and kind == "weight":
                value = value.reshape(heads, -1, value.shape[-1])
        variable = f"model/layer_with_weights-{place}/{leaf}"
        variables[f"{variable}/.ATTRIBUTES/VARIABLE_VALUE"] = value
    save(tmp_path / "bert_model.ckpt", variables)
    bert_config(folder, tmp_path / "bert_config.json")
    found = read_published(str(tmp_path))
    assert_same_bits(found.reader["bert"], expected)


def test_variables_are_those_that_tensorflow_reads(tmp_path):
    rng = np.random.default_rng(0)
    variables = {
        f"scope_{i}/variable_{j}": rng.normal(size=(i + 1, j)).astype(dtype)
        for i in range(40)
        for j, dtype in enumerate(("float32", "float64", "float16", "int32", "int64"))
    }
    variables["scalar"] = np.float32(2.5)
    save(tmp_path / "many.ckpt", variables | {"text": np.array([b"text"])})
    found = tf_tensors(tmp_path / "many.ckpt")
    assert set(found) == set(variables)
    for name, value in variables.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value)


def test_embeddings_of_blocks_are_read_row_by_row(tmp_path):
    rows = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    save(tmp_path / "encoded.ckpt", {"block_emb": rows})
    found = block_embeddings(str(tmp_path / "encoded.ckpt"))
    np.testing.assert_array_equal(found.rows(17, 63), rows[17:63])
    save(tmp_path / "two.ckpt", {"a": rows, "b": rows})
    for name in ("two.ckpt", "none.ckpt"):
        with refused("one matrix"):
            block_embeddings(str(tmp_path / name))


def test_damage_is_refused(models, tmp_path):
    rng = np.random.default_rng(0)
    variables = {f"bert/{i}": rng.normal(size=(4, i)) for i in range(9)}
    save(tmp_path / "whole.ckpt", variables)
    prefix = tmp_path / "model.ckpt"
    index, data = (
        prefix.with_name(f"{prefix.name}.{end}")
        for end in ("index", "data-00000-of-00001")
    )
    whole = (tmp_path / "whole.ckpt.index").read_bytes()
    of_data = (tmp_path / "whole.ckpt.data-00000-of-00001").read_bytes()
    data.write_bytes(of_data)
    for size in (0, 10, 48, len(whole) // 2, len(whole) - 1):
        index.write_bytes(whole[:size])
        with pytest.raises(DamagedWeightsError):
            tf_tensors(prefix)
    for place in range(0, len(whole), 3):
        flipped = bytearray(whole)
        flipped[place] ^= 0x5A
        index.write_bytes(flipped)
        # A footer has bytes of no meaning.
        with contextlib.suppress(DamagedWeightsError):
            assert set(tf_tensors(prefix)) == set(variables)
    index.write_bytes(whole)
    data.write_bytes(of_data[:-1])
    with refused("checkpoint of TensorFlow.*cannot be read"):
        read_published(str(prefix))
    data.unlink()
    with refused("data-00000-of-00001 is missing"):
        read_published(str(prefix))


def test_a_checkpoint_may_be_named_in_several_ways(tmp_path):
    save(tmp_path / "model.ckpt-3", {"a": np.zeros(2, np.float32)})
    expected = tmp_path / "model.ckpt-3"
    for place in (tmp_path, expected, tmp_path / "model.ckpt-3.index"):
        assert checkpoint_prefix(place) == expected
    shutil.copy(tmp_path / "model.ckpt-3.index", tmp_path / "model.ckpt-4.index")
    assert checkpoint_prefix(tmp_path) is None
    safetensors.numpy.save_file({"a": np.zeros(2)}, tmp_path / "a.safetensors")
    assert checkpoint_prefix(tmp_path / "a.safetensors") is None
