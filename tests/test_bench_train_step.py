"""What `bench.train_step` compares, without the peers, which have their own Python."""

import json

import numpy as np
import pytest
import safetensors.numpy

from bench import tables, train_step
from realm_jax.errors import BadInputError
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
    shape = json.loads((case / "shape.json").read_text())
    weights = safetensors.numpy.load_file(case / "retriever.safetensors")
    assert weights["cls.dense.weight"].shape == (shape["projection"], shape["hidden"])
    assert weights["bert.embeddings.word_embeddings.weight"].shape == (30_522, 16)


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
