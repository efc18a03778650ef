"""The REALM family of `transformers` computes here what it computes there."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from bench.weights_parity import differences
from realm_jax.weights.published import read_published
from tests.refused import refused
from tests.weights.tiny_classifier import edit_tensors


@pytest.fixture
def folder(models, tmp_path):
    """A copy of the encoder, to be changed."""
    shutil.copytree(models / "encoder", tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.mark.parametrize("name", ["embedder", "scorer", "encoder", "reader"])
def test_models_compute_what_transformers_computes(name, models):
    found = differences(models / name)
    assert found
    assert all(difference <= 1e-4 for difference in found.values()), found


def test_settings_come_from_the_source(models):
    reader = read_published(str(models / "reader"))
    assert (reader.bert.activation, reader.bert.layer_norm_epsilon) == ("gelu", 1e-6)
    assert reader.reading is not None
    assert (reader.reading.max_span, reader.reading.layer_norm_epsilon) == (6, 2e-3)
    assert (reader.reading.num_read, reader.reading.length) == (4, 32)


def test_what_is_not_used_is_listed(models, folder):
    embedder = read_published(str(models / "embedder"))
    assert set(embedder.towers) == {"tower"}
    names = {name.partition("predictions.")[2] for name in embedder.unused}
    assert {"bias", "decoder.weight", "transform.dense.weight"} <= names
    edit_tensors(folder, lambda tensors: tensors.update(other=np.zeros(2, np.float32)))
    assert read_published(str(folder)).unused == ["other"]


def test_a_masked_lm_needs_no_pooler(folder):
    def drop(tensors):
        for kind in ("weight", "bias"):
            del tensors[f"realm.pooler.dense.{kind}"]

    edit_tensors(folder, drop)
    model = read_published(str(folder))
    assert model.missing == ["realm.pooler.dense.bias", "realm.pooler.dense.weight"]
    assert not np.any(model.reader["bert"]["pooler"]["kernel"])


def test_a_scorer_of_equal_embedders_has_one_tower(models, tmp_path):
    """As `transformers` saves one whose embedders are the same object."""
    shutil.copy(models / "scorer" / "config.json", tmp_path)
    tensors = safetensors.numpy.load_file(models / "embedder" / "model.safetensors")
    named = {f"embedder.{name}": tensor for name, tensor in tensors.items()}
    safetensors.numpy.save_file(named, tmp_path / "model.safetensors")
    assert set(read_published(str(tmp_path)).towers) == {"tower"}
    both = named | {f"query_{name}": tensor for name, tensor in named.items()}
    safetensors.numpy.save_file(both, tmp_path / "model.safetensors")
    assert set(read_published(str(tmp_path)).towers) == {"tower"}
    assert set(read_published(str(models / "scorer")).towers) == {
        "query_tower",
        "document_tower",
    }


def test_tensors_that_do_not_fit_are_an_error(folder):
    query = "realm.encoder.layer.1.attention.self.query.weight"
    bias = "cls.predictions.bias"
    edit_tensors(folder, lambda t: t.update({query: t[query][:, :-1].copy()}))
    with refused(rf"{query} has shape \(16, 15\)|layer.0.*has shape"):
        read_published(str(folder))
    edit_tensors(folder, lambda t: t.pop(bias))
    with refused(f"{bias} is missing"):
        read_published(str(folder))
    decoder = {"cls.predictions.decoder.weight": np.zeros((35, 16), np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(decoder))
    with refused("decoder.weight is not realm.embeddings.word_embeddings.weight"):
        read_published(str(folder))


def test_other_configurations_are_refused(folder, tmp_path):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"max_span_width": "6"}))
    with refused("max_span_width"):
        read_published(str(folder))
    path.write_text(json.dumps(config | {"model_type": "t5"}))
    with refused("'t5'"):
        read_published(str(folder))
    with refused("config.json of a published model"):
        read_published(str(tmp_path / "nothing"))
