"""Pseudo-queries are pieces of the text that they are drawn from."""

import numpy as np
import pytest

from realm_jax.data.batch_order import Stream, uniform
from realm_jax.data.blocks import BlockText
from realm_jax.data.pseudo_queries import NUM_DRAWS, pseudo_query

TITLE = "The sack of Fosk"
SENTENCES = ["Maria Brel drew the town in 1700.", "It burnt down, with all its mills."]
BODY = " ".join(SENTENCES)
BLOCK = BlockText(
    TITLE, BODY, "id", [(0, len(SENTENCES[0])), (len(SENTENCES[0]) + 1, len(BODY))], []
)


def drawn(block, count=3000):
    numbers = uniform(Stream.PSEUDO_QUERIES, 0, 0, count, NUM_DRAWS)
    return [pseudo_query(block, row) for row in numbers]


def test_a_third_are_titles_a_third_sentences_and_the_others_words_in_a_row():
    queries = drawn(BLOCK)
    spans = [query for query in queries if query not in (TITLE, *SENTENCES)]
    for kind in ([TITLE], SENTENCES, spans):
        share = sum(query in kind for query in queries) / len(queries)
        assert share == pytest.approx(1 / 3, abs=0.04)
    assert queries.count(SENTENCES[0]) == pytest.approx(
        queries.count(SENTENCES[1]), rel=0.2
    )
    # Whole words, as they stand there.
    assert all(f" {span} " in f" {BODY} " for span in spans)
    lengths = [len(span.split()) for span in spans]
    # The body has 14 words.
    assert set(lengths) == set(range(4, 15))
    assert any(span.startswith("Maria Brel") for span in spans)
    assert any(span.endswith("its mills.") for span in spans)


def block_of(title, body):
    return BlockText(title, body, "id", [(0, len(body))] if body else [], [])


@pytest.mark.parametrize(
    ("title", "body", "expected"),
    [
        # A title or a sentence of a word or two asks for nothing.
        ("Fosk", "It burnt.", {"It burnt."}),
        ("", "It burnt down.", {"It burnt down."}),
        ("", "", {""}),
        # Without spaces a character is a word.
        ("東京", "日本の首都", {"日本の首", "本の首都", "日本の首都"}),
    ],
)
def test_short_ones(title, body, expected):
    assert set(drawn(block_of(title, body))) == expected


def test_the_numbers_are_those_of_seed_step_and_row():
    numbers = uniform(Stream.PSEUDO_QUERIES, 3, 5, 8, NUM_DRAWS)
    fewer = uniform(Stream.PSEUDO_QUERIES, 3, 5, 4, NUM_DRAWS)
    np.testing.assert_array_equal(fewer, numbers[:4])
    for others in ((Stream.PSEUDO_QUERIES, 3, 6), (Stream.UNMASKED, 3, 5)):
        assert (uniform(*others, 8, NUM_DRAWS) != numbers).all()
