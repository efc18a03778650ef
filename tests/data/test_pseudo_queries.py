"""Pseudo-queries are pieces of the text that they are drawn from."""

import pytest

from realm_jax.data.batch_order import Stream, uniform
from realm_jax.data.blocks import BlockText
from realm_jax.data.pseudo_queries import NUM_DRAWS, pseudo_query

TITLE = "The sack of Fosk"
SENTENCES = ["Maria Brel drew the town in 1700.", "It burnt down, with all its mills."]
BODY = " ".join(SENTENCES)
BORDER = len(SENTENCES[0])
BLOCK = BlockText(TITLE, BODY, "id", [(0, BORDER), (BORDER + 1, len(BODY))], [])


def drawn(block):
    numbers = uniform(Stream.PSEUDO_QUERIES, 0, 0, 3000, NUM_DRAWS)
    return [pseudo_query(block, row) for row in numbers]


def test_a_third_are_titles_a_third_sentences_and_the_others_words_in_a_row():
    queries = drawn(BLOCK)
    spans = [query for query in queries if query not in (TITLE, *SENTENCES)]
    for kind in ([TITLE], SENTENCES, spans):
        share = sum(query in kind for query in queries) / len(queries)
        assert share == pytest.approx(1 / 3, abs=0.04)
    first, second = map(queries.count, SENTENCES)
    assert first == pytest.approx(second, rel=0.2)
    # Whole words, as they stand there.
    assert all(f" {span} " in f" {BODY} " for span in spans)
    lengths = [len(span.split()) for span in spans]
    # The body has 14 words.
    assert set(lengths) == set(range(4, 15))
    assert any(span.startswith("Maria Brel") for span in spans)
    assert any(span.endswith("its mills.") for span in spans)


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
    sentences = [(0, len(body))] if body else []
    assert set(drawn(BlockText(title, body, "id", sentences, []))) == expected


def test_another_stream_has_other_numbers():
    numbers, others = (
        uniform(stream, 3, 5, 8) for stream in (Stream.PSEUDO_QUERIES, Stream.UNMASKED)
    )
    assert (numbers != others).all()
