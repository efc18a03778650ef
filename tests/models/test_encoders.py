"""An encoder of one's own is trained, recorded and opened again like BERT's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import realm_jax
from examples.own_encoder import SharedLayersConfig
from realm_jax.index.retrievers import (
    TrainedRetriever,
    load_retriever,
    publish_retriever,
)
from realm_jax.models import encoders
from realm_jax.models.bert import BertConfig, Encoder
from realm_jax.models.retriever import Retriever, RetrieverConfig
from realm_jax.storage import open_store
from realm_jax.training import finetune, pretrain
from realm_jax.weights import bert, bert_tensors
from tests import tiny_world as tiny
from tests.refused import refused

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "mlp_size": 32}


def models():
    def make(vocab_size):
        return SharedLayersConfig(vocab_size, max_positions=40, **SIZES)

    return dataclasses.replace(tiny.models(), bert=make)


@pytest.fixture
def unknown(monkeypatch):
    """As in a process that has not imported the encoder."""
    return lambda: monkeypatch.setattr(encoders._ENCODERS, "_things", {})


@pytest.mark.full
def test_every_stage_and_whoever_opens_a_model(world, tmp_path, unknown):
    before = tiny.pretrain_config(world, tmp_path / "pretrain", models=models())
    assert pretrain.run(before, tiny.silent, tiny.NEVER)
    config = tiny.finetune_config(
        world, tmp_path / "model", models=models(), warm_start=before.model_dir
    )
    assert finetune.run(config, tiny.silent, tiny.NEVER)
    assert realm_jax.load(config.model_dir).answer("kise posa feso fedi").documents
    unknown()
    with refused("expected an encoder that is registered, got 'shared_layers'"):
        realm_jax.load(config.model_dir)


def test_the_index_builder_reads_what_the_trainer_publishes(tmp_path):
    config = RetrieverConfig(SharedLayersConfig(30, **SIZES), projection_size=8)
    ids = jnp.ones((1, 4), jnp.int32)
    params = Retriever(config).init(jax.random.key(0), ids, ids, ids)["params"]
    store = open_store(tmp_path)
    publish_retriever(store, TrainedRetriever(3, config, params, "words"), "corpus")
    assert load_retriever(store, 3).config == config


def test_its_record_makes_the_same_and_that_of_bert_is_as_ever():
    own = SharedLayersConfig(30, remat="none", **SIZES)
    assert encoders.from_record(encoders.recorded(own)) == own
    one = encoders.from_record(encoders.recorded(own), dtype="bfloat16")
    assert one == dataclasses.replace(own, dtype="bfloat16")
    plain = BertConfig(30, **SIZES)
    assert encoders.recorded(plain) == dataclasses.asdict(plain)
    assert encoders.from_record(encoders.recorded(plain)) == plain


def test_what_nobody_could_open_again_is_refused():
    class Unregistered(BertConfig):
        pass

    with refused("expected a registered encoder, got .*Unregistered"):
        encoders.recorded(Unregistered(30, **SIZES))


def test_published_weights_are_for_bert_alone(tmp_path):
    own = SharedLayersConfig(30, **SIZES)
    message = "expected BERT's encoder, .* got that of SharedLayersConfig"
    with refused(message):
        bert_tensors.expected_shapes(own)
    with refused(message):
        bert.save_config(tmp_path, own)


def test_what_encoders_share_is_what_bert_does_faster():
    """BERT's last layer computes the positions that are read, and no others."""
    config = BertConfig(30, **SIZES, initializer_range=0.3)
    encoder, ids = config.make_encoder(), jnp.array([[2, 7, 9, 3, 0]])
    variables = encoder.init(jax.random.key(0), ids, ids * 0)
    positions = jnp.array([[2, 0]])
    fast, plain = (
        encoder.apply(variables, ids, ids * 0, positions, method=method)
        for method in (encoder.encode_positions, Encoder.encode_positions)
    )
    np.testing.assert_allclose(fast, plain, atol=1e-5)
