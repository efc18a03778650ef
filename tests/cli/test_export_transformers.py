"""`realm export --format=...` writes what `realm import-weights` reads, to the bit."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from realm_jax.cli.main import main
from realm_jax.storage import open_store
from realm_jax.training.checkpoints import restore_params
from realm_jax.weights.tensors import read_tensors
from tests.weights.published_models import unpacked


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return unpacked(tmp_path_factory.mktemp("published"))


def run(command, *words):
    assert main([command, *map(str, words)]) == 0


def params(model_dir):
    return restore_params(open_store(model_dir)).tree


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_kept(exported, original):
    """Every tensor that was written is the one that was read."""
    found = safetensors.numpy.load_file(exported / "model.safetensors")
    expected = read_tensors(original)
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, expected[name])
    config, wanted = (
        json.loads((folder / "config.json").read_text())
        for folder in (exported, original)
    )
    assert config["hidden_act"] == wanted["hidden_act"]
    # It is 1 where `transformers` is not told, and [PAD] is 0 in all vocabularies.
    for name in (config.keys() & wanted.keys()) - {"pad_token_id"}:
        assert config[name] == wanted[name], name
    return set(found), set(expected)


def test_pre_training_comes_back(models, tmp_path):
    run("import-weights", models / "embedder", models / "encoder", tmp_path / "one")
    out = tmp_path / "out"
    run("export", tmp_path / "one", f"--output={out}", "--format=realm")
    for name in ("embedder", "encoder"):
        found, expected = assert_kept(out / name, models / name)
        assert all("predictions" in tensor for tensor in expected - found)
        card = (out / name / "README.md").read_text()
        assert "`realm pretrain`" in card
        assert f"{'Embedder' if name == 'embedder' else 'KnowledgeAug'}" in card
    run("import-weights", out / "embedder", out / "encoder", tmp_path / "two")
    assert_equal(params(tmp_path / "two"), params(tmp_path / "one"))


def test_two_towers_come_back(models, tmp_path):
    run("import-weights", models / "scorer", tmp_path / "one")
    out = tmp_path / "out"
    run("export", tmp_path / "one", f"--output={out}", "--format=realm")
    assert_kept(out / "scorer", models / "scorer")
    run("import-weights", out / "scorer", tmp_path / "two")
    assert_equal(params(tmp_path / "two"), params(tmp_path / "one"))


def test_a_fine_tuned_model_comes_back_with_its_blocks(models, tmp_path, refuse):
    first, out, second = (
        tmp_path / "a" / "one",
        tmp_path / "out",
        tmp_path / "b" / "two",
    )
    for source, dest in ((models, first), (out, second)):
        sources = [source / "openqa", source / "embedder"]
        run("import-weights", *sources, dest, f"--corpus={dest.parent / 'corpus'}")
        if source is models:
            options = [f"--output={out}", "--format=realm", "--embeddings"]
            run("export", first, *options)
    assert_kept(out / "openqa", models / "openqa")
    assert_equal(params(second), params(first))
    records, expected = (
        np.load(folder / "openqa" / "block_records.npy", allow_pickle=True)
        for folder in (out, models)
    )
    assert records.tolist() == expected.tolist()
    refuse(["export", first, f"--output={out}", "--format=realm"], "absent or empty")


def test_bert_comes_back(models, tmp_path, refuse):
    run("import-weights", models / "embedder", models / "encoder", tmp_path / "one")
    out = tmp_path / "out"
    run("export", tmp_path / "one", f"--output={out}", "--format=bert")
    card = (out / "README.md").read_text()
    assert "BertForMaskedLM.from_pretrained" in card
    run("import-weights", out, tmp_path / "two")
    assert_equal(params(tmp_path / "two")["reader"], params(tmp_path / "one")["reader"])
    run("export", tmp_path / "two", f"--output={tmp_path / 'again'}", "--format=bert")
    for name in ("model.safetensors", "config.json", "vocab.txt"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    # Its towers are no REALM's.
    words = ["export", tmp_path / "two", f"--output={tmp_path / 'no'}"]
    refuse([*words, "--format=realm"], "sentence-transformers")
    assert not (tmp_path / "no").exists()
