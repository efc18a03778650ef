"""`realm export`: the model of a run, as other software reads it."""

import json
import os

import faiss
import numpy as np
import pyarrow.parquet
import pytest

import realm_jax
from realm_jax.cli.main import main
from realm_jax.data.blocks import BlockStore
from realm_jax.data.store_files import write_header
from realm_jax.evaluation import embedding_files
from tests import tiny_run, tiny_world
from tests.records import change_record
from tests.weights.sentence_encoder_twin import encode

QUERIES = ["When was Town7 founded?", "the river near Town8"]


def exported(run, output, *words):
    assert main(["export", str(run), f"--output={output}", "--embeddings", *words]) == 0
    rows = np.load(output / "embeddings.npy")
    lines = (output / "ids.jsonl").read_text().splitlines()
    return rows, [json.loads(line) for line in lines]


def as_pairs(corpus):
    texts = corpus.texts(np.arange(corpus.num_blocks))
    return [(text.title, text.body) for text in texts]


def test_one_tower_is_one_model_for_queries_and_documents(
    finished, tmp_path, monkeypatch, capsys
):
    embedded = tiny_world.count_embedded(monkeypatch)
    rows, ids = exported(finished / "pretrain", tmp_path / "made" / "here")
    folder = tmp_path / "made" / "here"
    model = realm_jax.load(finished / "pretrain")
    np.testing.assert_allclose(encode(folder, QUERIES), model.embed(QUERIES), atol=1e-5)
    np.testing.assert_allclose(encode(folder, as_pairs(model.corpus)), rows, atol=1e-5)
    assert rows.dtype == np.float32
    assert embedded == []
    assert [line["id"] for line in ids] == list(range(model.corpus.num_blocks))
    for line in ids:
        text = model.corpus.text(line["id"])
        assert (line["source_id"], line["title"]) == (text.source_id, text.title)
    assert f'SentenceTransformer("{folder}")' in capsys.readouterr().out
    # Nothing of the work in between is left.
    assert [path.name for path in folder.parent.iterdir()] == ["here"]
    card = (folder / "README.md").read_text()
    for said in (
        "Retriever of towns",
        f"60 documents, {model.corpus.num_blocks} blocks",
        model.corpus.fingerprint,
        "`realm pretrain`",
        "12 of 12",
        "held out by training",
    ):
        assert said in card
    report = json.loads((finished / "evaluate" / "report.json").read_text())
    (row,) = (r for r in report["comparison"]["rows"] if r["label"] == "After REALM")
    (line,) = (text for text in card.splitlines() if "After REALM" in text)
    assert f"recall@5 {100 * row['metrics']['recall@5']['mean']:.1f} [" in line


def test_a_tower_that_fine_tuning_has_changed_is_two_models(finished, tmp_path):
    """Of one tower: documents stay what pre-training made of them, as in its index."""
    rows, _ = exported(finished, tmp_path / "out")
    model = realm_jax.load(finished)
    corpus = model.corpus
    queries = encode(tmp_path / "out" / "query", QUERIES)
    np.testing.assert_allclose(queries, model.embed(QUERIES), atol=1e-5)
    documents = encode(tmp_path / "out" / "document", as_pairs(corpus)[:9])
    np.testing.assert_allclose(documents, rows[:9], atol=1e-5)
    by_query_tower = encode(tmp_path / "out" / "query", as_pairs(corpus)[:9])
    assert np.abs(by_query_tower - documents).max() > 1e-3
    card = (tmp_path / "out" / "README.md").read_text()
    assert "DIR/document" in card


def test_embeddings_are_the_same_in_every_format(finished, tmp_path, monkeypatch):
    # Several parts, the last one smaller.
    monkeypatch.setattr(embedding_files, "_PART", 25)
    rows, ids = exported(
        finished, tmp_path / "out", "--embeddings_format=faiss,npy,parquet"
    )
    table = pyarrow.parquet.read_table(tmp_path / "out" / "embeddings.parquet")
    names = ["id", "source_id", "title"]
    assert table.select(names).to_pylist() == ids
    vectors = table["embedding"].combine_chunks()
    np.testing.assert_array_equal(vectors.flatten().to_numpy(), rows.ravel())
    index = faiss.read_index(str(tmp_path / "out" / "embeddings.faiss"))
    np.testing.assert_array_equal(index.reconstruct_n(0, index.ntotal), rows)
    queries = realm_jax.load(finished).embed(QUERIES)
    scores, found = index.search(np.float32(queries), 3)
    np.testing.assert_array_equal(found, np.argsort(-queries @ rows.T)[:, :3])
    np.testing.assert_allclose(scores, -np.sort(-queries @ rows.T)[:, :3], rtol=1e-5)


@pytest.mark.parametrize("form", ["parquet", "faiss"])
def test_formats_are_written_alone(finished, tmp_path, form, realm):
    out = tmp_path / "out"
    words = [f"--output={out}", f"--embeddings_format={form}"]
    realm("export", finished / "pretrain", *words)
    assert [path.name for path in out.glob("embeddings.*")] == [f"embeddings.{form}"]
    assert (out / "ids.jsonl").exists() == (form == "faiss")


def test_bad_input_leaves_nothing(finished, tmp_path, refuse):
    full, empty = tmp_path / "full", tmp_path / "empty"
    full.mkdir()
    (full / "mine.txt").touch()
    empty.mkdir()
    run, output = finished / "pretrain", f"--output={tmp_path / 'new'}"
    for words, said in (
        ((run, f"--output={full}"), f"{full} to be absent or empty"),
        ((empty, output), "no checkpoint"),
        ((run, output, "--embeddings_format=npy,csv"), "'csv'"),
        ((run, output, "--embeddings_format=npy", "--format=bert"), "--format=bert"),
        ((tmp_path / "nowhere", output), "does not exist"),
        ((run, "--output=gs://bucket/model"), "local folder"),
        ((run, output, "--checkpoint=first"), "CHECKPOINT"),
        ((run, output, "--checkpoint=first", "--format=bert"), "CHECKPOINT"),
        ((run, output, "--num_read=3"), "leave num_read out"),
        ((run, output, "--retrieval_weight=2"), "leave retrieval_weight out"),
        ((run, output, "--pretrained=x", "--format=bert"), "leave pretrained out"),
    ):
        assert "expected " in refuse(["export", *words], said)
    # Without what it was fine-tuned from, nobody has the documents' encoder.
    alone = tiny_run.copy(finished, empty, "corpus", "finetune")
    change_record(alone / "finetune", source="/nowhere/pretrain")
    refuse(["export", alone, output], "fine-tuned from")
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty"}


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(
    finished, tmp_path, monkeypatch, refuse
):
    def begin_on_a_small_disk(file, *header):
        write_header(file, *header)
        with open("/dev/full", "wb") as full:
            os.dup2(full.fileno(), file.fileno())

    monkeypatch.setattr(embedding_files, "write_header", begin_on_a_small_disk)
    run, output = finished / "pretrain", tmp_path / "out"
    words = ["export", run, f"--output={output}", "--embeddings"]
    refuse(words, f"room for the models {output}", "disk is full")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", embedding_files.FORMATS)
def test_in_no_format_embeddings_are_lost_on_a_full_disk(form, finished, tmp_path):
    corpus = BlockStore.open(finished / "corpus")
    rows = np.ones((corpus.num_blocks, 2), np.float32)
    (tmp_path / f"embeddings.{form}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        embedding_files.write_embeddings(tmp_path, [form], rows, corpus, 1.0)
