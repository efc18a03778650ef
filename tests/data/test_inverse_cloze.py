import numpy as np
import pytest

from realm_jax.data.inverse_cloze import (
    inverse_cloze_examples,
    parts_to_pair,
    take_sentence,
)
from realm_jax.errors import BadInputError


def slow_examples(store, removed, query_length, document_length):
    """Sentence by sentence; `removed(block, index)` says what was taken out."""
    vocabulary = store.vocabulary
    for block in range(store.num_blocks):
        text = store.text(block)
        body = vocabulary.encode(text.body)
        parts = parts_to_pair(text.body, body, text.sentences)
        pieces = [vocabulary.encode(text.body[a:b]).ids for a, b in parts]
        for index, sentence in enumerate(pieces):
            kept = [p for i, p in enumerate(pieces) if i != index]
            body = kept if removed(block, index) else pieces
            if not body:
                continue
            query = [vocabulary.cls, *sentence[: query_length - 2], vocabulary.sep]
            title = vocabulary.encode(text.title).ids
            document = [vocabulary.cls, *title, vocabulary.sep, *np.concatenate(body)]
            document = [*document[: document_length - 1], vocabulary.sep]
            yield block, query, document, len(title) + 2


def padded(pieces, length):
    return [int(piece) for piece in pieces] + [0] * (length - len(pieces))


@pytest.mark.parametrize("probability", [0.0, 1.0])
@pytest.mark.parametrize(("query", "document"), [(64, 48), (8, 20)])
def test_pairs_sentences_with_their_blocks(small_store, probability, query, document):
    examples = inverse_cloze_examples(
        small_store,
        np.arange(small_store.num_blocks),
        query_length=query,
        document_length=document,
        removal_probability=probability,
    )
    expected = list(
        slow_examples(small_store, lambda *_: probability == 1, query, document)
    )
    assert len(examples["block_ids"]) == len(expected) > 10
    for row, (block, query_ids, ids, body_start) in enumerate(expected):
        assert examples["block_ids"][row] == block
        assert examples["query_ids"][row].tolist() == padded(query_ids, query)
        assert examples["document_ids"][row].tolist() == padded(ids, document)
        segments = [int(body_start <= column < len(ids)) for column in range(document)]
        assert examples["document_segment_ids"][row].tolist() == segments


def test_a_kept_sentence_leaves_the_block_as_the_store_has_it(small_store):
    blocks = np.arange(small_store.num_blocks)
    examples = inverse_cloze_examples(
        small_store, blocks, document_length=48, removal_probability=0.0
    )
    ids, segments = small_store.document_ids(examples["block_ids"], 48)
    np.testing.assert_array_equal(examples["document_ids"], ids)
    np.testing.assert_array_equal(examples["document_segment_ids"], segments)


def test_nine_of_ten_sentences_are_removed(small_store):
    blocks = np.arange(small_store.num_blocks)
    removed = total = 0
    for seed in range(60):
        examples = inverse_cloze_examples(
            small_store, blocks, document_length=48, seed=seed
        )
        whole, _ = small_store.document_ids(examples["block_ids"], 48)
        # A lone short sentence is dropped when it would be removed: leave them out.
        several = np.array(
            [len(small_store.text(b).sentences) > 1 for b in examples["block_ids"]]
        )
        shorter = (examples["document_ids"] != whole).any(axis=1)
        removed += shorter[several].sum()
        total += several.sum()
    # Five standard deviations of a binomial share.
    assert removed / total == pytest.approx(0.9, abs=5 * (0.09 / total) ** 0.5)


def test_what_is_removed_does_not_depend_on_how_blocks_are_grouped(small_store):
    blocks = np.arange(small_store.num_blocks)
    whole = inverse_cloze_examples(small_store, blocks, seed=3)
    parts = [
        inverse_cloze_examples(small_store, part, seed=3)
        for part in (blocks[:5], blocks[5:6], blocks[6:])
    ]
    for name, array in whole.items():
        np.testing.assert_array_equal(array, np.concatenate([p[name] for p in parts]))


def test_a_lone_sentence_cannot_be_removed(small_store):
    body = small_store.vocabulary.encode("Ilm is a river.")
    assert take_sentence(body, (0, 15), remove=True) is None
    query = take_sentence(body, (0, 15), remove=False)
    assert query == slice(0, len(body.ids))


def test_a_long_lone_sentence_is_divided(small_store):
    text = "the flow over a thin wing is laminar, and further behind it turbulent"
    body = small_store.vocabulary.encode(text)
    whole = [(0, len(text))]
    assert len(body.ids) > 32
    parts = parts_to_pair(text, body, whole)
    assert len(parts) > 1
    assert "".join(text[start:end] for start, end in parts) == text
    for part in parts:
        query = take_sentence(body, part, remove=True)
        assert query is not None
        assert 0 < query.stop - query.start <= (len(body.ids) + 1) // 2
    several = [(0, 37), (38, len(text))]
    assert parts_to_pair(text, body, several) == several
    short = small_store.vocabulary.encode("Ilm is.")
    assert parts_to_pair("Ilm is.", short, [(0, 7)]) == [(0, 7)]


def test_no_block_gives_no_example(small_store):
    examples = inverse_cloze_examples(small_store, np.arange(0), document_length=48)
    assert {name: array.shape for name, array in examples.items()} == {
        "query_ids": (0, 64),
        "document_ids": (0, 48),
        "document_segment_ids": (0, 48),
        "block_ids": (0,),
    }


def test_lengths_without_room_are_refused(small_store):
    with pytest.raises(BadInputError, match="got 2 and 288"):
        inverse_cloze_examples(small_store, np.arange(1), query_length=2)
    with pytest.raises(BadInputError, match="got 64 and 3"):
        inverse_cloze_examples(small_store, np.arange(1), document_length=3)
