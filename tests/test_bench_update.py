"""Benches of an update, at sizes for a CPU and without the peers or a GPU."""

import argparse
import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from bench import command, gpu, operations, tables, train_step
from bench.encoder_settings import settings_from
from realm_jax.models.bert import BertConfig, EncoderLayer
from realm_jax.training.packed_updates import PackedLengths
from realm_jax.types import NULL_BLOCK
from tests.refused import refused

SIZE = train_step.Size(1, 16, 2, document=12, batch=2)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("case")
    train_step.write_case(folder, SIZE, train_step.random_inputs(SIZE))
    return folder


def test_random_sequences_have_no_padding_but_the_null_documents():
    candidates = train_step.random_inputs(SIZE).candidates
    assert (candidates.block_ids[:, 0] == NULL_BLOCK).all()
    for ids in (candidates.document_ids, candidates.joined_ids):
        assert (ids[:, 1:] != 0).all()
    assert np.count_nonzero(candidates.document_ids[0, 0]) == 3
    assert np.count_nonzero(candidates.joined_ids[0, 0]) == SIZE.lengths.query + 1


@pytest.mark.full
def test_an_update_is_timed_from_what_the_peers_are_given(case):
    found = train_step.time_ours(case, SIZE, steps=2, settings={})
    assert len(found["seconds"]) == 2
    # Random weights know nothing.
    assert found["loss"] == pytest.approx(np.log(30_522), rel=0.02)
    assert "packed" not in found
    shape = json.loads((case / "shape.json").read_text())
    weights = safetensors.numpy.load_file(case / "retriever.safetensors")
    assert weights["cls.dense.weight"].shape == (shape["projection"], shape["hidden"])
    assert weights["bert.embeddings.word_embeddings.weight"].shape == (30_522, 16)


@pytest.mark.full
def test_packed_updates_compute_the_same_loss_and_say_whether_all_fit(case, tmp_path):
    inputs = train_step.random_inputs(SIZE)
    ids = inputs.candidates.document_ids
    ids[..., 6:], inputs.candidates.joined_ids[..., -6:] = 0, 0
    losses = []
    for length in (12, 11):  # The second is too short for two documents of 6.
        packing = PackedLengths(document=length, joined=2 * SIZE.lengths.joined)
        train_step.write_case(tmp_path, SIZE, inputs, packing)
        found = train_step.time_ours(tmp_path, SIZE, steps=1, settings={}, packs=True)
        assert found["packed"] == (length == 12)
        losses.append(found["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_ratios_are_to_the_fastest_that_does_the_same_work():
    peers = {name: {"seconds": 4.0, "peak_gib": 2.0} for name in train_step.PEERS}
    ours = {"seconds": 2.0, "peak_gib": 3.0, "teraflop": 1.0}
    less = {"seconds": 1.6, "peak_gib": 2.5, "teraflop": 1.0}
    packed = {"seconds": 1.0, "peak_gib": 1.0, "teraflop": 1.0}
    measured = {**peers, train_step.OURS_AS_BERT: ours, train_step.OURS: less}
    of = {"size": "small", "lengths": "real", "dtype": "float32"}
    alone, both = train_step.rows(
        [
            {**of, "measured": measured},
            {**of, "measured": {**measured, f"{train_step.OURS}, packed": packed}},
        ]
    )
    seconds = ["4.00"] * 3 + ["2.00", "1.60"]
    memory = "2.0 / 2.0 / 2.0 / 3.0 / 2.5 / -"
    assert alone[3:] == [*seconds, "-", "2.00", "2.50", "2.50", memory, "1.25", "0.625"]
    assert both[3:12] == [*seconds, "1.00", "2.00", "4.00", "4.00"]
    assert both[-2:] == ["0.50", "1.000"]


def test_settings_that_are_compared_are_those_of_the_encoder():
    found = settings_from("products=bfloat16,scan_unroll=6,attention_dropout_rate=None")
    expected = {"products": "bfloat16", "scan_unroll": 6}
    assert found == {**expected, "attention_dropout_rate": None}
    for text, said in (
        ("layers=6", "'layers=6'"),
        ("remat", "'remat'"),
        ("products=int8", "products"),
    ):
        with refused(said):
            settings_from(text)


def test_a_table_stands_where_the_page_has_its_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench: one -->\nold\n<!-- end -->\nafter\n")
    text = tables.table(["a", "b"], [["1", r"\2"]])
    tables.replace_place(page, "one", text)
    assert page.read_text() == (
        "before\n<!-- bench: one -->\n| a | b |\n| --- | --- |\n| 1 | \\2 |\n"
        "<!-- end -->\nafter\n"
    )
    with refused("bench: two"):
        tables.replace_place(page, "two", text)


def test_what_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    (tmp_path / "page.md").write_text("no place\n")
    for page, output, named in (
        ("missing.md", None, "missing.md, got none"),
        ("page.md", None, "bench: here"),
        (None, "missing/figures.json", "make .*missing first"),
    ):
        flags = argparse.Namespace(
            page=page and tmp_path / page, output=output and tmp_path / output
        )
        with refused(named):
            command.require_room("here", flags)


def test_operations_are_told_apart_by_what_the_model_calls_them():
    layer = EncoderLayer(BertConfig(9, 16, 1, 2, 32, dropout_rate=0.5))
    x, is_token = jnp.ones((2, 8, 16)), jnp.ones((2, 8), bool)
    params = layer.init(jax.random.key(0), x, is_token, True)["params"]

    @jax.jit
    def step(params):
        rngs = {"dropout": jax.random.key(1)}
        y, _ = layer.apply({"params": params}, x, is_token, False, rngs=rngs)
        return (y**3).sum()

    compiled = jax.jit(jax.grad(step)).lower(params).compile()
    names = operations.names_of(compiled.as_text())
    kinds = {operations.kind_of(name) for name in names.values()}
    assert kinds >= {
        *("products of attention", "products of dense layers"),
        *("gradients of biases", "dropout", "softmax", "norms"),
    }
    assert operations.kind_of("jit(step)/something/else") == "all else"


def test_the_products_own_time_stands_beside_the_limit():
    kinds = {"softmax": 3.0, "dropout": 1.0}
    measured = {"seconds": 4.0, "kinds": kinds, "teraflop": 0.2, "rate": 0.1}
    text = operations.markdown(measured, "python -m bench.operations CORPUS")
    assert "would take 2.00 s (50%)" in text
    assert "| softmax | 3.00 | 75% |" in text


@pytest.mark.full
def test_a_profile_of_an_update_holds_its_operations(monkeypatch):
    given = train_step.random_inputs(SIZE)
    monkeypatch.setattr(train_step, "real_inputs", lambda *arguments: given)
    measured = operations.measure(SIZE, "-", "-", packs=False)
    assert "products with the vocabulary" in measured["kinds"]
    # All threads together, in less than they could have worked.
    threads = os.cpu_count() or 1
    assert 0 < sum(measured["kinds"].values()) <= 2 * threads * measured["seconds"]
    # 30,522 wordpieces, 10 masks, 2 sentences, 8 candidates, 16 features, and thrice.
    assert measured["teraflop"] * 1e12 > 6 * 30_522 * 10 * 2 * 8 * 16


TINY = dataclasses.replace(
    gpu.QUICK,
    update=train_step.Size(1, 16, 2, document=16, batch=2, query=16),
    blocks=500,
    embedded=4,
    matrix=64,
    bytes=1 << 20,
    repetitions=1,
)


@pytest.mark.full
def test_every_figure_stands_beside_its_limit():
    result = gpu.measure(TINY, peers=None, torch_device="cpu")
    text = gpu.markdown(result, "python -m bench.gpu --quick")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == len(list(gpu.rows(result))) + 2
    assert "45 %" in text
    assert "500 blocks" in text
    update = result["update"]
    assert 0 <= update["search_share"] < 1
    rate = result["limits"]["flops"]
    assert update["utilisation"] * update["seconds"] * rate == pytest.approx(
        update["teraflop"] * 1e12
    )


def test_the_random_corpus_fills_the_inputs_of_an_update():
    embeddings, tokens = gpu.corpus(TINY)
    assert embeddings.rows.shape[0] == tokens.ids.shape[0] >= TINY.blocks
    pieces = np.asarray(tokens.ids)
    assert pieces.min() >= 1000
    assert pieces.max() < 30_522
    lengths = np.asarray(tokens.title_lengths) + np.asarray(tokens.body_lengths)
    # [CLS], two [SEP], and no padding.
    assert (lengths + 3 == TINY.update.document).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a CPU")
def test_the_full_form_is_refused_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit, match=r"^2$"):
        gpu.main()
    assert "--quick" in capsys.readouterr().err
