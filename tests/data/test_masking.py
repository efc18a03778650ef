import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.data import masking
from realm_jax.data.masking import (
    find_span,
    masked_example,
    salient_examples,
    sentence_id,
    sentence_specs,
)
from tests.refused import refused


def slow_example(vocabulary, body, sentence, span, query_length, max_masks):
    """One piece at a time: (query, positions, answers), or None."""
    encoding = vocabulary.encode(body)
    query, positions, answers = [vocabulary.cls], [], []
    for piece, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if not sentence[0] <= start < sentence[1]:
            continue
        if any(span[0] <= character < span[1] for character in range(start, end)):
            positions.append(len(query))
            answers.append(int(piece))
            query.append(vocabulary.mask)
        else:
            query.append(int(piece))
    if not positions or positions[-1] > query_length - 2:
        return None
    query = [*query[: query_length - 1], vocabulary.sep]
    return query, positions[:max_masks], answers[:max_masks]


TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab cé.İß\u0301 漢𝔸\n")),
    max_size=40,
)


@settings(max_examples=200)
@given(
    before=TEXTS,
    left=TEXTS,
    span=st.one_of(TEXTS, st.sampled_from(["Karel Čudo", "16 February 1507"])),
    right=TEXTS,
    after=TEXTS,
    query_length=st.integers(3, 40),
    max_masks=st.integers(1, 12),
)
def test_masks_exactly_the_wordpieces_of_the_span(
    small_store, before, left, span, right, after, query_length, max_masks
):
    vocabulary = small_store.vocabulary
    # Sentences part where BERT parts words: see chunking.split_sentences.
    body = f"{before} {left}{span}{right} {after}"
    sentence = (len(before) + 1, len(body) - len(after) - 1)
    start = sentence[0] + len(left)
    place = (start, start + len(span))
    encoding = vocabulary.encode(body)
    found = find_span(encoding.offsets, sentence, place, query_length)
    expected = slow_example(vocabulary, body, sentence, place, query_length, max_masks)
    if found is None or expected is None:
        assert found is expected
        return
    start, stop, first, end = found
    settings = {"vocabulary": vocabulary, "source_block": 5, "max_masks": max_masks}
    settings["query_length"] = query_length
    pieces, places = encoding.ids[start:stop], np.arange(first, end)
    example = masked_example(pieces, places, **settings)
    query, positions, answers = expected
    scored = len(positions)
    padding = [0] * (max_masks - scored)
    assert example["query_ids"].tolist() == query + [0] * (query_length - len(query))
    assert example["mask_positions"].tolist() == positions + padding
    assert example["mask_ids"].tolist() == answers + padding
    assert example["mask_weights"].tolist() == [1.0] * scored + padding
    assert example["source_block"] == 5


def test_every_span_of_a_corpus_has_its_row(small_store):
    blocks = np.arange(small_store.num_blocks)
    examples = salient_examples(small_store, blocks, query_length=64)
    rows = 0
    for block, text in zip(blocks, small_store.texts(blocks), strict=True):
        for span in text.spans:
            [sentence] = [s for s in text.sentences if s[0] <= span.start < s[1]]
            expected = slow_example(
                small_store.vocabulary, text.body, sentence, span[:2], 64, 10
            )
            scored = examples["mask_weights"][rows] == 1
            names = ("query_ids", "mask_positions", "mask_ids")
            query, *masks = (examples[name][rows] for name in names)
            found = query[query != 0], *(array[scored] for array in masks)
            assert [array.tolist() for array in found] == [*map(list, expected or ())]
            assert examples["source_block"][rows] == block
            rows += 1
    assert rows == len(examples["query_ids"]) > 40
    assert {n: (a.shape[1:], a.dtype) for n, a in examples.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in sentence_specs(64, 10).items()
    }


def test_spans_of_a_sentence_share_its_id_and_ids_ascend(small_store):
    blocks = np.arange(small_store.num_blocks)
    ids = salient_examples(small_store, blocks)["sentence_id"]
    expected = [
        (block, [s[0] <= span.start < s[1] for s in text.sentences].index(True))
        for block in blocks
        for text in [small_store.text(block)]
        for span in text.spans
    ]
    ranks = {place: rank for rank, place in enumerate(sorted(set(expected)))}
    _, found = np.unique(ids, return_inverse=True)
    assert found.tolist() == [ranks[place] for place in expected]
    assert (np.diff(ids) >= 0).all()
    assert len(ranks) < len(ids)
    # There is room for the last block there can be.
    last = int(sentence_id(2**31 - 1, 2**16))
    assert last > int(sentence_id(2**31 - 1, 0)) > int(sentence_id(2**31 - 2, 2**16))


def test_a_span_outside_its_sentence_gives_no_example(small_store):
    text = "It is. Ansk grew. Brel did not. Dorm neither."
    offsets = small_store.vocabulary.encode(text).offsets
    sentence = (7, 17)
    assert find_span(offsets, sentence, (7, 11), 96)
    for span in [(0, 5), (5, 11), (6, 11), (12, 12), (12, 18), (12, 22), (18, 22)]:
        assert find_span(offsets, sentence, span, 96) is None, span


def test_lengths_without_room_are_refused(small_store):
    with refused(r"got 2 and 10"):
        salient_examples(small_store, np.arange(1), query_length=2)
    with refused(r"got 96 and 0"):
        salient_examples(small_store, np.arange(1), max_masks=0)
    least = salient_examples(small_store, np.arange(0), query_length=3, max_masks=1)
    assert least["query_ids"].shape == (0, 3)
    assert least["mask_positions"].shape == (0, 1)
    with refused("another corpus"):
        salient_examples(small_store, np.array([small_store.num_blocks]))


@given(data=st.data())
def test_spans_that_are_masked_together_are_those_of_the_sentence(data):
    length, max_masks, mask = 20, 5, 103
    sentence = data.draw(
        st.lists(st.integers(200, 400), min_size=length, max_size=length)
    )
    cuts = data.draw(st.sets(st.integers(1, length - 2), min_size=2, max_size=8))
    spans = list(itertools.pairwise(sorted(cuts)))
    rows = []
    for first, end in spans:
        query = np.array(sentence)
        query[first:end] = mask
        scored = list(range(first, end))[:max_masks]
        padding = [0] * (max_masks - len(scored))
        ids, weights = [sentence[i] for i in scored], [1.0] * len(scored)
        padded = (part + padding for part in (scored, ids, weights))
        rows.append((query, *padded, 7))
    names = ("query_ids", "mask_positions", "mask_ids", "mask_weights", "source_block")
    columns = map(np.array, zip(*rows, strict=True))
    found = masking.mask_together(dict(zip(names, columns, strict=True)))
    # The slow twin: pieces that are asked for, and pieces that are hidden.
    asked = list(range(*spans[0]))[:max_masks]
    hidden = set(range(*spans[0]))
    for first, end in spans[1:]:
        if len(asked) + end - first <= max_masks:
            asked += range(first, end)
            hidden |= set(range(first, end))
    count = len(asked)
    assert found["mask_positions"].tolist() == asked + [0] * (max_masks - count)
    assert found["mask_ids"][:count].tolist() == [sentence[i] for i in asked]
    assert found["mask_weights"].tolist() == [1] * count + [0] * (max_masks - count)
    assert set(np.flatnonzero(found["query_ids"] == mask)) == hidden
    kept = [i for i in range(length) if i not in hidden]
    assert found["query_ids"][kept].tolist() == [sentence[i] for i in kept]
    assert found["source_block"] == 7
