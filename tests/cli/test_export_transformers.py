"""`realm export --format=...` writes what `realm import-weights` reads, to the bit."""

import json

import numpy as np
import pytest
import safetensors.numpy

from realm_jax.cli.main import main
from realm_jax.weights.tensors import read_tensors
from tests.records import change_details
from tests.tiny_world import assert_same_bits


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
    assert all("predictions" in name for name in expected.keys() - found.keys())


@pytest.fixture
def export(tmp_path):
    """Exports a run in a format; returns the folder."""

    def run(model_dir, form, *words, output="out"):
        given = [f"--output={tmp_path / output}", f"--format={form}", *words]
        assert main(["export", str(model_dir), *given]) == 0
        return tmp_path / output

    return run


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("embedder", "encoder"), ("Embedder", "KnowledgeAug")),
        # Two towers.
        (("scorer",), ("Scorer",)),
    ],
)
def test_pre_training_comes_back(
    names, kinds, models, tmp_path, import_weights, export
):
    first = import_weights(*(models / name for name in names), tmp_path / "one")
    out = export(tmp_path / "one", "realm")
    for name, kind in zip(names, kinds, strict=True):
        assert_kept(out / name, models / name)
        card = (out / name / "README.md").read_text()
        assert "`realm pretrain`" in card
        assert kind in card
    second = import_weights(*(out / name for name in names), tmp_path / "two")
    assert_same_bits(second, first)


def test_a_fine_tuned_model_comes_back_with_its_blocks(
    models, tmp_path, refuse, import_weights, export
):
    def imported(source, dest):
        sources = (source / "openqa", source / "embedder")
        corpus = f"--corpus={dest.parent / 'corpus'}"
        return import_weights(corpus, *sources, dest)

    model_dir = tmp_path / "a" / "one"
    first = imported(models, model_dir)
    out = export(model_dir, "realm", "--embeddings")
    assert_kept(out / "openqa", models / "openqa")
    assert_same_bits(imported(out, tmp_path / "b" / "two"), first)
    records, expected = (
        np.load(folder / "openqa" / "block_records.npy", allow_pickle=True)
        for folder in (out, models)
    )
    assert records.tolist() == expected.tolist()
    given = export(model_dir, "realm", "--retrieval_weight=4", output="given")
    change_details(model_dir, trained={"retrieval_weight": 4.0})
    weighted = export(model_dir, "realm", output="weighted")
    names = (folder / "openqa" / "model.safetensors" for folder in (given, weighted))
    assert len({name.read_bytes() for name in names}) == 1
    tensors, plain = (read_tensors(folder / "openqa") for folder in (weighted, out))
    # Only what the queries are multiplied by.
    for name, tensor in tensors.items():
        factor = 4.0 if "cls.LayerNorm" in name else 1.0
        np.testing.assert_array_equal(tensor, factor * plain[name], name)
    refuse(["export", model_dir, f"--output={out}"], "absent or empty")


def test_bert_comes_back(models, tmp_path, refuse, import_weights, export):
    sources = (models / "embedder", models / "encoder")
    first = import_weights(*sources, tmp_path / "one")
    out = export(tmp_path / "one", "bert")
    card = (out / "README.md").read_text()
    assert "BertForMaskedLM.from_pretrained" in card
    second = import_weights(out, tmp_path / "two")
    assert_same_bits(second["reader"], first["reader"])
    again = export(tmp_path / "two", "bert", output="again")
    for name in ("model.safetensors", "config.json", "vocab.txt"):
        assert (out / name).read_bytes() == (again / name).read_bytes()
    # Its towers are no REALM's.
    words = ["export", tmp_path / "two", f"--output={tmp_path / 'no'}"]
    refuse([*words, "--format=realm"], "sentence-transformers")
    assert not (tmp_path / "no").exists()
