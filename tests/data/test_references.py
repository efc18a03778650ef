"""Examples that are stored as references into the corpus they are made from."""

import json
import shutil
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.batch_order import Spans
from realm_jax.data.block_writer import Block, write_blocks
from realm_jax.data.blocks import BlockText
from realm_jax.data.examples import Examples, write_examples
from realm_jax.data.inverse_cloze import (
    PairRows,
    inverse_cloze_examples,
    inverse_cloze_rows,
)
from realm_jax.data.masking import SpanRows, salient_examples, salient_rows
from realm_jax.data.random_masking import (
    PieceRows,
    draw_spans,
    draw_tokens,
    random_rows,
)
from realm_jax.data.references import References, SentenceRows
from realm_jax.errors import BadInputError
from realm_jax.types import InverseClozeBatch, PretrainBatch
from tests.data.random_masks import random_examples
from tests.refused import refused

QUERY, MASKS, DOCUMENT = 24, 3, 40


class Kind(NamedTuple):
    """A task; what it writes, and the same examples whole, which other tests hold."""

    layout: SentenceRows
    rows: Callable
    examples: Callable
    batch: type


MASKED = {"query_length": QUERY, "max_masks": MASKS}
PAIRS = {"query_length": QUERY, "document_length": DOCUMENT}


def random_kind(draw):
    return Kind(
        PieceRows(**MASKED),
        lambda store, ids: random_rows(store, ids, draw, **MASKED),
        lambda store, ids: random_examples(store, ids, draw, **MASKED),
        PretrainBatch,
    )


KINDS = {
    "salient": Kind(
        SpanRows(**MASKED),
        lambda store, ids: salient_rows(store, ids, query_length=QUERY),
        lambda store, ids: salient_examples(store, ids, **MASKED),
        PretrainBatch,
    ),
    "random_spans": random_kind(draw_spans),
    "random_tokens": random_kind(draw_tokens),
    "ict": Kind(
        PairRows(**PAIRS),
        inverse_cloze_rows,
        lambda store, ids: inverse_cloze_examples(store, ids, **PAIRS),
        InverseClozeBatch,
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def write(store, kind, folder):
    """Writes the references of all blocks, some of them at a time."""
    ids = np.arange(store.num_blocks)
    batches = [kind.rows(store, part) for part in (ids[:5], ids[5:])]
    metadata = {"corpus_fingerprint": store.fingerprint}
    references = References(kind.layout, store)
    return write_examples(folder, batches, metadata, references=references)


FIVES, NO_TEXT = np.full(40, 5, np.int32), BlockText("", "", "", [], [])


def write_corpus(store, folder, ids, text=NO_TEXT, count=1):
    """Writes blocks of these wordpieces, whatever the text."""
    blocks = [Block(ids[:0], ids, text)] * count
    return write_blocks(folder, blocks, vocabulary=store.vocabulary, chunk_length=48)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_batches_are_those_of_examples_stored_whole(small_store, kind, tmp_path):
    batch = kind.examples(small_store, np.arange(small_store.num_blocks))
    whole = write_examples(tmp_path / "whole", [batch], {})
    now = write(small_store, kind, tmp_path / "now")
    assert len(now) == len(whole) > 20
    assert_equal(now.batch(np.arange(len(now))), whole.batch(np.arange(len(whole))))
    rows = np.array([7, 0, 7, len(now) - 1])
    assert_equal(now.batch(rows), whole.batch(rows))
    assert_equal(now.together(rows), whole.together(rows))
    kind.batch(**now.batch(rows))
    np.testing.assert_array_equal(now.sentence_starts, whole.sentence_starts)
    for spans in Spans:
        rows, others = (
            examples.step_rows(3, batch_size=48, seed=5, spans=spans)
            for examples in (now, whole)
        )
        np.testing.assert_array_equal(rows, others)
        assert_equal(now.batch(rows), whole.batch(rows))


def test_features_are_indexed_like_arrays(small_store, kind, tmp_path):
    examples = write(small_store, kind, tmp_path / "set")
    whole = examples.batch(np.arange(len(examples)))
    assert examples.features.keys() == whole.keys()
    for name, feature in examples.features.items():
        assert (feature.shape, feature.dtype) == (whole[name].shape, whole[name].dtype)
        assert len(feature) == len(examples)
        np.testing.assert_array_equal(feature, whole[name])
        np.testing.assert_array_equal(feature[3], whole[name][3])
        np.testing.assert_array_equal(feature[2:9], whole[name][2:9])


def test_a_row_is_a_few_bytes(small_store, tmp_path):
    """Of so few blocks, all of less than 256 wordpieces, each integer is a byte."""
    # block, first, end, and: two places; two bits for each of 22 pieces; a flag.
    sizes = {"salient": 5, "random_spans": 9, "random_tokens": 9, "ict": 4}
    for name, num_bytes in sizes.items():
        examples = write(small_store, KINDS[name], tmp_path / name)
        paths = {path.stem: path for path in examples.directory.glob("*.npy")}
        paths.pop("sentence_starts", None)
        arrays = [np.load(path) for path in paths.values()]
        assert sum(array.nbytes for array in arrays) == num_bytes * len(examples), name


def test_integers_are_as_wide_as_the_corpus_needs(small_store, tmp_path):
    ids = np.zeros(300, np.int32)
    wide = write_corpus(small_store, tmp_path / "wide", ids, count=300)
    layout = KINDS["salient"].layout
    columns = dict.fromkeys(layout.columns, np.array([299]))
    columns |= {"mask_first": np.array([0]), "mask_end": np.array([1])}
    kind = KINDS["salient"]._replace(rows=lambda store, ids: columns)
    place = write(wide, kind, tmp_path / "set").directory
    names = {path.stem: np.load(path).dtype.name for path in place.glob("*.npy")}
    places = {"block": "uint16", "first": "uint16", "end": "uint16"}
    assert names == {**places, "mask_first": "uint8", "mask_end": "uint8"}


def test_a_reference_to_what_is_not_there_is_one_line(small_store, tmp_path):
    outside = "expected masks within the sentence"
    for name, column, value, message in [
        ("ict", "end", 255, r"got wordpieces 0 to 255 of block 0, whose body has \d+"),
        ("ict", "first", 255, "got wordpieces 255 to "),
        ("ict", "end", 0, "got wordpieces 0 to 0 of block 0"),
        ("ict", "block", 255, r"expected block ids from -1 to \d+, got 255"),
        ("salient", "end", 255, "got wordpieces "),
        ("salient", "mask_end", 255, outside),
        ("salient", "mask_first", 22, outside),
        ("salient", "mask_end", 0, outside),
        ("random_spans", "masked", 255, outside),
        ("random_spans", "masked", 0, outside),
        ("random_spans", "scored", 0, outside),
        ("random_tokens", "scored", 255, outside),
    ]:
        folder = tmp_path / f"{name}-{column}-{value}"
        write(small_store, KINDS[name], folder)
        array = np.load(folder / f"{column}.npy", mmap_mode="r+")
        array[0] = value
        array.flush()
        unverified = Examples.open(folder, corpus=small_store)
        with refused(f"{message}.*{folder}|{folder}.*{message}"):
            unverified.batch(np.array([4, 0]))
        unverified.batch(np.array([4]))
        with refused(rf"/{column}\.npy is damaged"):
            Examples.open(folder, corpus=small_store, verify=True)


@given(kind=st.sampled_from([*KINDS.values()]), data=st.data())
def test_whatever_a_row_holds_no_other_block_is_read(small_store, kind, data):
    byte = st.integers(0, 255)
    row = {
        name: np.array(data.draw(st.lists(byte, min_size=n, max_size=n)), np.uint8)
        for name, spec in kind.layout.columns.items()
        for n in [int(np.prod(spec.shape))]
    }
    # Most of all blocks and places are none.
    row["block"] %= small_store.num_blocks + 1
    row["end"] %= 40
    row["first"] %= 32
    specs = kind.layout.columns
    rows = {name: row[name].reshape(1, *spec.shape) for name, spec in specs.items()}
    try:
        batch = kind.layout.lay_out(small_store, rows)
    except BadInputError:
        return
    block, vocabulary = int(row["block"][0]), small_store.vocabulary
    body = small_store.body_ids(np.array([block]), 60)[0]
    sentence = body[int(row["first"][0]) : int(row["end"][0])]
    assert (sentence != 0).all()
    query = batch["query_ids"][0][1 : QUERY - 1]
    seen = query[: len(sentence)]
    kept = seen != vocabulary.mask
    np.testing.assert_array_equal(seen[kept], sentence[: QUERY - 2][kept])
    if "mask_ids" in batch:
        scored = batch["mask_weights"][0] > 0
        places = batch["mask_positions"][0][scored] - 1
        answers = batch["mask_ids"][0][scored]
        np.testing.assert_array_equal(answers, sentence[places])


def test_another_corpus_is_refused(small_store, tmp_path):
    folder = tmp_path / "corpus"
    shutil.copytree(small_store.directory, folder)
    kind = KINDS["salient"]
    (folder / "examples/t").mkdir(parents=True)
    place = write(small_store, kind, folder / "examples/t/train").directory
    # Its corpus lies around it.
    assert len(Examples.open(place)) == len(Examples.open(place, corpus=small_store))
    shutil.move(place, tmp_path / "moved")
    with refused("or given as `corpus`"):
        Examples.open(tmp_path / "moved")
    other = write_corpus(small_store, tmp_path / "other", FIVES, count=40)
    with refused(r"with corpus_fingerprint .* got "):
        Examples.open(tmp_path / "moved", corpus=other)


def test_rows_of_a_later_release_are_refused(small_store, tmp_path):
    folder = write(small_store, KINDS["ict"], tmp_path / "set").directory
    path = folder / "examples.json"
    info = json.loads(path.read_text())
    del info["crc32c"]
    for change in ({"kind": "essay"}, {"rows": "halves"}, {"query_length": 2}):
        layout = info["layout"] | change
        path.write_text(json.dumps(info | {"layout": layout}))
        with refused(r"prepare` again\.$"):
            Examples.open(folder, corpus=small_store)


def test_a_text_of_other_wordpieces_than_the_stored_ones_is_refused(
    small_store, tmp_path
):
    odd = write_corpus(small_store, tmp_path / "odd", FIVES, small_store.text(0))
    for kind in KINDS.values():
        with refused("wordpieces of block 0 of"):
            kind.rows(odd, np.arange(1))
