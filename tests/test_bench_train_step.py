"""What `bench.train_step` compares, without the peers, which have their own Python."""

import argparse
import json

import numpy as np
import pytest
import safetensors.numpy

from bench import command, tables, train_step
from realm_jax.errors import BadInputError
from realm_jax.training.packed_updates import PackedLengths
from realm_jax.types import NULL_BLOCK

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
    assert alone[3:] == [
        *(*seconds, "-", "2.00", "2.50", "2.50", memory, "1.25", "0.625")
    ]
    assert both[3:12] == [*seconds, "1.00", "2.00", "4.00", "4.00"]
    assert both[-2:] == ["0.50", "1.000"]


def test_a_table_stands_where_the_page_has_its_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench: one -->\nold\n<!-- end -->\nafter\n")
    text = tables.table(["a", "b"], [["1", r"\2"]])
    tables.replace_place(page, "one", text)
    assert page.read_text() == (
        "before\n<!-- bench: one -->\n| a | b |\n| --- | --- |\n| 1 | \\2 |\n"
        "<!-- end -->\nafter\n"
    )
    with pytest.raises(BadInputError, match="bench: two"):
        tables.replace_place(page, "two", text)


@pytest.mark.parametrize(
    ("page", "output", "named"),
    [
        ("missing.md", None, "missing.md, got none"),
        ("page.md", None, "bench: here"),
        (None, "missing/figures.json", "make .*missing first"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path, page, output, named
):
    (tmp_path / "page.md").write_text("no place\n")
    flags = argparse.Namespace(
        page=page and tmp_path / page, output=output and tmp_path / output
    )
    with pytest.raises(BadInputError, match=named) as told:
        command.require_room("here", flags)
    assert "\n" not in str(told.value)
