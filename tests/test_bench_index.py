"""Benches of the index and of embedding at toy size: what they count, and their end."""

import json
import subprocess
import sys

import numpy as np
import pytest

from bench import embed, index, index_search
from bench.index_embed import invent_blocks, time_both_ways
from bench.index_embeddings import invent
from realm_jax.index.embed import EmbedConfig
from tests.tiny_run import ROOT, environment
from tests.weights import sentence_encoder_twin as twin

MINILM = ROOT / ".cache/data/minilm-l6"

pytestmark = pytest.mark.full


def test_exact_neighbours_over_several_chunks_are_those_of_a_sort(monkeypatch):
    monkeypatch.setattr(index_search, "_EXACT_CHUNK", 50)
    generator = np.random.default_rng(0)
    embeddings = generator.standard_normal((333, 8), np.float32)
    queries = generator.standard_normal((5, 8), np.float32)
    found = index_search.exact_neighbours(embeddings, queries)
    scores = queries.astype(np.float64) @ embeddings.astype(np.float64).T
    expected = np.argsort(-scores)[:, : index_search.K]
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))


def test_invented_queries_are_no_rows_of_the_index(tmp_path):
    files = invent(tmp_path, num_blocks=300, num_queries=10)
    scores = np.load(files.queries) @ np.load(files.blocks).T
    # All have the length of the square root of 128, so a copy would score 128.
    assert 30 < scores.max() < 127.9


def test_padding_is_what_buckets_save(tmp_path):
    store = invent_blocks(tmp_path / "blocks", 64, mean_length=20, longest=96)

    def first_wordpieces(params, ids, segment_ids):
        return ids[:, :8]

    measured = time_both_ways(
        first_wordpieces, None, store, np.arange(64), EmbedConfig(96), repetitions=1
    )
    ids, _ = store.document_ids(np.arange(64), 96)
    padding = float((ids == 0).mean())
    assert measured["full length"]["padding_share"] == pytest.approx(padding)
    assert measured["buckets"]["padding_share"] < 0.7 * padding


def test_a_part_that_lacks_its_input_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        index.main(["--parts", "recall", "--searchers", "scann"])
    assert "--corpus, --retriever and --questions" in capsys.readouterr().err


def test_the_whole_bench_runs_to_its_end(tmp_path, capsys):
    output = tmp_path / "index.json"
    sizes = "--publish_blocks 2000 --num_swaps 2 --trained_blocks 2000"
    search = "--parts search embed publish trainer --blocks 500 --batches 4 8"
    models = "--models toy --model toy --phase_seconds 4 --num_pairs 1"
    # As a person runs it: the processes it starts import its main file.
    said = subprocess.run(
        [
            *(sys.executable, "-m", "bench.index"),
            *(*search.split(), *sizes.split(), *models.split()),
            *("--searchers", "scann", "device float32", "device int8"),
            *(f"--folder={tmp_path}", f"--output={output}"),
        ],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    measured = json.loads(output.read_text())
    searchers = measured["search"][0]["searchers"]
    assert searchers["scann"]["recall_at_8"] == 1.0
    seconds = searchers["scann"]["seconds"]["4"]
    assert 0 < seconds["least"] <= seconds["most"]
    assert searchers["device float32"]["recall_at_8"] == 1.0
    # float32 rows in whole groups of 32; int8 keeps bfloat16 rows and a scale beside.
    row = searchers["device float32"]["device_mib"] / (512 * 128 * 4 / 2**20)
    assert row == pytest.approx(1.0, abs=0.01)
    assert measured["publish"]["swaps"] == 2
    assert measured["publish"]["commit_to_swap_seconds"]["least"] > 0
    assert measured["trainer"]["steps_per_second"]["beside"]["median"] > 0
    index.main(["--markdown", str(output)])
    printed = capsys.readouterr().out
    assert "| scann | 1.000 | " in printed
    assert "ratio of median steps" in printed


def test_what_the_peers_are_compared_with_is_minilm(tmp_path, capsys, monkeypatch):
    store = invent_blocks(tmp_path / "corpus", 6, 20, 40)
    line = [str(tmp_path / "corpus"), f"--case={tmp_path}", f"--weights={MINILM}"]
    line += ["--settings={}", "--blocks=4", "--document_length=40", "--repetitions=1"]
    monkeypatch.setattr("sys.argv", ["embed", *line])
    embed.main()
    measured = json.loads(capsys.readouterr().out)
    assert len(measured["seconds"]) == 1
    found = np.load(tmp_path / "ours.npy")
    assert found.shape == (4, 128)
    ids, segments = store.document_ids(np.linspace(0, 5, 4).astype(int), 40)
    weights = twin.read_weights(MINILM)
    config = twin.read_json(MINILM / "config.json")
    means = [
        twin.bert(weights, config, row[row != 0], part[row != 0]).mean(0)
        for row, part in zip(ids, segments, strict=True)
    ]
    projected = embed._projected(np.stack(means), embed._params(MINILM)["tower"])
    np.testing.assert_allclose(found, projected, atol=2e-3)
