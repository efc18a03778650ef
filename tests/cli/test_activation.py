"""Published BERT weights load as they are, and their activation goes with them."""

import json

import numpy as np
import pytest
import safetensors.numpy

from realm_jax import manifests
from realm_jax.cli import activation, configuration
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.evaluation.ask import AskConfig
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import manifest_name
from realm_jax.training.initialization import (
    describe,
    initial_params,
    recorded_activation,
    warm_start_params,
)
from realm_jax.training.pretrain import PretrainConfig
from realm_jax.training.warm_start import WarmStartConfig
from tests import tiny_run
from tests.tiny_world import LENGTHS

VOCABULARY = WordPiece([*SPECIAL_PIECES, *(f"w{i}" for i in range(35))])
SIZE, MLP, LAYERS, POSITIONS = 16, 24, 2, 64
TINY = ["hidden_size=16", "num_layers=2", "num_heads=2", "mlp_size=24"]
TINY += [f"max_positions={POSITIONS}"]


@pytest.fixture(scope="module")
def tensors():
    """All that bert-base-uncased has, by its names, of random values."""
    dense = {
        "attention.self.query": (SIZE, SIZE),
        "attention.self.key": (SIZE, SIZE),
        "attention.self.value": (SIZE, SIZE),
        "attention.output.dense": (SIZE, SIZE),
        "intermediate.dense": (MLP, SIZE),
        "output.dense": (SIZE, MLP),
    }
    shapes = {
        "bert.embeddings.word_embeddings.weight": (VOCABULARY.size, SIZE),
        "bert.embeddings.position_embeddings.weight": (POSITIONS, SIZE),
        "bert.embeddings.token_type_embeddings.weight": (2, SIZE),
        "bert.pooler.dense.weight": (SIZE, SIZE),
        "bert.pooler.dense.bias": (SIZE,),
        "cls.predictions.bias": (VOCABULARY.size,),
        "cls.predictions.transform.dense.weight": (SIZE, SIZE),
        "cls.predictions.transform.dense.bias": (SIZE,),
        "cls.seq_relationship.weight": (2, SIZE),
        "cls.seq_relationship.bias": (2,),
    }
    norms = ["bert.embeddings", "cls.predictions.transform"]
    for layer in range(LAYERS):
        module = f"bert.encoder.layer.{layer}"
        norms += [f"{module}.attention.output", f"{module}.output"]
        for name, shape in dense.items():
            shapes[f"{module}.{name}.weight"] = shape
            shapes[f"{module}.{name}.bias"] = shape[:1]
    for norm in norms:
        shapes |= {f"{norm}.LayerNorm.{name}": (SIZE,) for name in ("gamma", "beta")}
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture
def published(tmp_path, tensors):
    folder = tmp_path / "published"
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    described = {
        "architectures": ["BertForMaskedLM"],
        "vocab_size": VOCABULARY.size,
        "hidden_size": SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": MLP,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def configured(command, config_class, root, *bindings):
    """The configuration with which a command would begin."""
    parser = configuration.make_parser(f"realm {command}", "")
    run_file = f"gin/runs/{command.replace('-', '_')}.gin"
    given = [*tiny_run.bindings(command, root), *bindings]
    given += [f"bert.BertConfig.{size}" for size in TINY]
    arguments = ["--gin_file=gin/models/tiny.gin", f"--gin_file={run_file}"]
    configuration.parse(
        parser, [*arguments, *(f"--gin.{one}" for one in given)], command
    )
    return activation.follow_weights(configuration.configured(config_class))


def towers_of(config):
    return config.models.retriever_config(VOCABULARY.size)


def test_published_weights_load_with_their_activation_and_head(published, tensors):
    config = configured(
        *("warm-start", WarmStartConfig, published.parent, f"WARM_START={published}")
    )
    towers = towers_of(config)
    assert towers.bert.activation == "gelu"
    random, _ = initial_params(
        Retriever(towers), KnowledgeEncoder(towers.bert), LENGTHS, 0
    )
    params = warm_start_params(random, config.warm_start, towers, VOCABULARY)
    reader = params["reader"]
    for place, name in {
        ("head_dense", "kernel"): "transform.dense.weight",
        ("head_dense", "bias"): "transform.dense.bias",
        ("head_norm", "scale"): "transform.LayerNorm.gamma",
        ("head_norm", "bias"): "transform.LayerNorm.beta",
    }.items():
        tensor = tensors[f"cls.predictions.{name}"]
        found = reader[place[0]][place[1]]
        np.testing.assert_array_equal(found, tensor.T)
    np.testing.assert_array_equal(reader["head_bias"], tensors["cls.predictions.bias"])
    second = "bert.encoder.layer.1.output.LayerNorm"
    for encoder in (reader["bert"], params["retriever"]["tower"]["bert"]):
        norm = encoder["layers"]["mlp_norm"]
        np.testing.assert_array_equal(norm["scale"][1], tensors[f"{second}.gamma"])
        np.testing.assert_array_equal(norm["bias"][1], tensors[f"{second}.beta"])


def finish(model_dir, towers):
    """Writes the manifest of a checkpoint, of which nothing else is read here."""
    sealed = manifests.seal({"details": {"model": describe(towers)}, "files": {}})
    open_store(str(model_dir)).create(manifest_name(3), sealed)


def test_what_goes_on_from_them_has_it_too(published, tmp_path):
    source = f"WARM_START={published}"
    towers = towers_of(configured("warm-start", WarmStartConfig, tmp_path, source))
    finish(tmp_path / "warm_start", towers)
    # The stages after it, and the warm start itself once the weights are gone.
    pretrain = configured("pretrain", PretrainConfig, tmp_path)
    assert towers_of(pretrain) == towers
    resumed = configured("warm-start", WarmStartConfig, tmp_path, "WARM_START=gone")
    assert towers_of(resumed) == towers
    finish(tmp_path / "finetune", towers)
    asked = configured("ask", AskConfig, tmp_path)
    assert towers_of(asked.finetuned) == towers


def test_an_activation_that_gin_names_stays(published, tmp_path):
    named = 'bert.BertConfig.activation="gelu_tanh"'
    config = configured(
        *("warm-start", WarmStartConfig, tmp_path, f"WARM_START={published}", named)
    )
    assert towers_of(config).bert.activation == "gelu_tanh"


def test_a_source_that_does_not_say_leaves_berts_own(published, tmp_path):
    (published / "config.json").unlink()
    assert recorded_activation(str(published)) is None
    assert recorded_activation("") is None
    assert recorded_activation(str(tmp_path / "nothing")) is None
    config = configured(
        *("warm-start", WarmStartConfig, tmp_path, f"WARM_START={published}")
    )
    assert towers_of(config).bert.activation == "gelu_tanh"
