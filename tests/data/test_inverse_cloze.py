import itertools

import numpy as np

from realm_jax.data.inverse_cloze import (
    inverse_cloze_examples,
    parts_to_pair,
    take_sentence,
)
from tests.refused import refused


def slow_examples(store, removed, query_length, document_length):
    """Sentence by sentence, each taken out of its block or none."""
    vocabulary = store.vocabulary
    for block in range(store.num_blocks):
        text = store.text(block)
        body = vocabulary.encode(text.body)
        parts = parts_to_pair(text.body, body, text.sentences)
        pieces = [vocabulary.encode(text.body[a:b]).ids for a, b in parts]
        for index, sentence in enumerate(pieces):
            kept = [p for i, p in enumerate(pieces) if i != index]
            body = kept if removed else pieces
            if not body:
                continue
            query = [vocabulary.cls, *sentence[: query_length - 2], vocabulary.sep]
            title = vocabulary.encode(text.title).ids
            document = [vocabulary.cls, *title, vocabulary.sep, *np.concatenate(body)]
            document = [*document[: document_length - 1], vocabulary.sep]
            yield block, query, document, len(title) + 2


def padded(pieces, length):
    return [int(piece) for piece in pieces] + [0] * (length - len(pieces))


def test_pairs_sentences_with_their_blocks(small_store):
    blocks = np.arange(small_store.num_blocks)
    for (query, document), remove in itertools.product([(64, 48), (8, 20)], (0, 1)):
        lengths = {"query_length": query, "document_length": document}
        examples = inverse_cloze_examples(
            small_store, blocks, **lengths, removal_probability=float(remove)
        )
        expected = list(slow_examples(small_store, bool(remove), query, document))
        assert len(examples["block_ids"]) == len(expected) > 10
        if not remove:
            # The block is as the store has it.
            ids, segments = small_store.document_ids(examples["block_ids"], document)
            np.testing.assert_array_equal(examples["document_ids"], ids)
            np.testing.assert_array_equal(examples["document_segment_ids"], segments)
        for row, (block, query_ids, ids, body_start) in enumerate(expected):
            assert examples["block_ids"][row] == block
            assert examples["query_ids"][row].tolist() == padded(query_ids, query)
            assert examples["document_ids"][row].tolist() == padded(ids, document)
            segments = [int(body_start <= c < len(ids)) for c in range(document)]
            assert examples["document_segment_ids"][row].tolist() == segments


def test_nine_of_ten_sentences_are_removed(small_store):
    found, expected = (
        inverse_cloze_examples(small_store, np.arange(small_store.num_blocks), **given)
        for given in ({}, {"removal_probability": 0.9})
    )
    np.testing.assert_array_equal(found["document_ids"], expected["document_ids"])


def test_a_lone_sentence_cannot_be_removed_and_a_long_one_is_divided(small_store):
    short = small_store.vocabulary.encode("Ilm is a river.")
    assert take_sentence(short, (0, 15), remove=True) is None
    assert take_sentence(short, (0, 15), remove=False) == slice(0, len(short.ids))
    assert parts_to_pair("Ilm is a river.", short, [(0, 15)]) == [(0, 15)]
    text = "the flow over a thin wing is laminar, and further behind it turbulent"
    body = small_store.vocabulary.encode(text)
    assert len(body.ids) > 32
    parts = parts_to_pair(text, body, [(0, len(text))])
    assert len(parts) > 1
    assert "".join(text[start:end] for start, end in parts) == text
    for part in parts:
        query = take_sentence(body, part, remove=True)
        assert query is not None
        assert 0 < query.stop - query.start <= (len(body.ids) + 1) // 2
    several = [(0, 37), (38, len(text))]
    assert parts_to_pair(text, body, several) == several


def test_lengths_without_room_are_refused_and_no_block_gives_no_example(small_store):
    with refused("got 2 and 288"):
        inverse_cloze_examples(small_store, np.arange(1), query_length=2)
    with refused("got 64 and 3"):
        inverse_cloze_examples(small_store, np.arange(1), document_length=3)
    examples = inverse_cloze_examples(
        small_store, np.arange(0), query_length=3, document_length=4
    )
    shapes = {name: array.shape[1:] for name, array in examples.items()}
    documents = {"document_ids": (4,), "document_segment_ids": (4,)}
    assert shapes == {"query_ids": (3,), **documents, "block_ids": ()}
    assert {len(array) for array in examples.values()} == {0}
