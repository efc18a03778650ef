"""Answers in sequences, against scans over lists and over characters."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.answer_spans import (
    answer_spans,
    answer_starts,
    holds_pattern,
    pattern_spans,
)
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece

FLAGS = re.IGNORECASE | re.MULTILINE
WORDS = ["ansk", "was", "written", "by", "ten", "of", "feb", "19", "11"]
VOCABULARY = WordPiece(
    [*SPECIAL_PIECES, *WORDS, *"abcdefghijklmnopqrstuvwxyz0123456789.,-$"]
    + [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"]
    + ["##11", "##ruary", "vietnamese", "서울", "##은", "도시", "é", "##é"],
    strip_accents=False,
)

sequences = st.lists(st.integers(1, 3), max_size=7)
answers = st.lists(st.integers(1, 3), max_size=3)


def padded(rows, length):
    return np.array([row + [0] * (length - len(row)) for row in rows], np.int32)


@given(
    st.lists(st.lists(sequences, min_size=2, max_size=2), min_size=1, max_size=3),
    st.lists(answers, min_size=2, max_size=2),
    st.integers(1, 4),
)
def test_wordpieces_are_found_as_by_a_scan(batch, wanted, max_span):
    ids = np.stack([padded(items, 7) for items in batch])
    answer_ids = np.stack([padded(wanted, 3)] * len(batch))
    starts = answer_starts(ids, answer_ids)
    spans = answer_spans(ids, answer_ids, max_span).reshape(*ids.shape, max_span)
    for b, items in enumerate(batch):
        for item, pieces in enumerate(items):
            for start in range(7):
                found = [
                    bool(a) and pieces[start : start + len(a)] == a for a in wanted
                ]
                assert starts[b, item, :, start].tolist() == found
                widths = {len(a) for a, here in zip(wanted, found, strict=True) if here}
                for width in range(1, max_span + 1):
                    assert spans[b, item, start, width - 1] == (width in widths)


def prepare(text):
    encoding = VOCABULARY.encode(text)
    pieces = [VOCABULARY.pieces[i] for i in encoding.ids]
    begins_word = np.array([not piece.startswith("##") for piece in pieces], bool)
    return text, encoding.offsets, begins_word


def texts_of_spans(text, patterns, max_span=10):
    compiled = [re.compile(pattern, FLAGS) for pattern in patterns]
    text, offsets, begins_word = prepare(text)
    spans = pattern_spans(text, offsets, begins_word, compiled, max_span)
    return [
        text[offsets[first, 0] : offsets[first + width, 1]]
        for first, width in zip(*np.nonzero(spans), strict=True)
    ]


def holds(text, patterns):
    compiled = [re.compile(pattern, FLAGS) for pattern in patterns]
    return holds_pattern(*prepare(text), compiled)


@pytest.mark.parametrize(
    ("text", "patterns", "spans", "held"),
    [
        ("Ansk was written by Ten.", ["ten"], ["Ten"], True),
        ("Ansk was written by all.", ["ten"], [], False),
        ("In 1911 and 11 more", ["11"], ["11"], True),
        ("In 1911", ["11"], [], False),
        ("a Vietnamese town", ["vietnam"], ["Vietnamese"], True),
        ("on 3 February", ["Feb(ruary)?"], ["Feb", "February"], True),
        ("on 3 Feb 1911", ["Feb(ruary)?"], ["Feb"], True),
        ("cost $ 95, or 95", [r"\$?\s?95"], ["$ 95", "95", "95"], True),
        ("red ansk by ansk", [r"^ansk"], ["ansk", "ansk"], False),
        ("by\nansk", [r"^ansk$"], ["ansk"], True),
        ("서울은 도시", ["서울"], ["서울"], True),
        ("ÉÉ by é", ["é"], ["É", "é"], True),
        ("ten of ansk", ["ansk", "ten"], ["ten", "ansk"], True),
        ("ten", [""], [], False),
        ("", ["ten"], [], False),
        ("ten", [], [], False),
    ],
)
def test_patterns_become_spans(text, patterns, spans, held):
    assert sorted(texts_of_spans(text, patterns)) == sorted(spans)
    assert holds(text, patterns) is held


def test_a_greedy_pattern_stays_within_the_longest_span():
    text = "by ten of ansk was by ten"
    found = texts_of_spans(text, ["ten.*ansk"], max_span=3)
    assert found == ["ten of ansk"]
    assert texts_of_spans(text, ["ten.*ansk"], max_span=2) == []
    # Any text with the answer in it is right here, as it is when scored.
    found = texts_of_spans("by of ansk", [".*ansk.*"], max_span=2)
    assert found == ["of ansk", "ansk"]
    assert holds(text, [".*ansk.*"])


documents = st.lists(
    st.sampled_from([*WORDS, "1911", "tens", "é", "서울은", "$", ".", "-", "\n"]),
    max_size=9,
).map(" ".join)
PATTERNS = ["ten", r"\bten\b", "19|11", r"\d+", "feb(ruary)?", "w.*n", "ansk$", "^of"]
PATTERNS += [r"\$?\s*ten", "서울", "(?<=19)11", "ten(?= of)", "", ".*by.*"]
patterns = st.lists(st.sampled_from(PATTERNS), max_size=3)


@given(documents, patterns, st.integers(1, 4))
def test_spans_are_those_that_count_as_right(text, patterns, max_span):
    compiled = [re.compile(pattern, FLAGS) for pattern in patterns]
    text, offsets, begins_word = prepare(text)
    expected = np.zeros((len(offsets), max_span), bool)
    for first, last in np.ndindex(len(offsets), len(offsets)):
        if begins_word[first] and 0 <= last - first < max_span:
            span = text[offsets[first, 0] : offsets[last, 1]]
            before_last = text[offsets[first, 0] : offsets[last, 0]]
            for pattern in compiled:
                match = pattern.match(span)
                if match and match.group().startswith(before_last):
                    expected[first, last - first] |= match.group() != before_last
    found = pattern_spans(text, offsets, begins_word, compiled, max_span)
    np.testing.assert_array_equal(found, expected)


@given(documents, st.lists(st.sampled_from(WORDS), min_size=1, max_size=3))
def test_a_pattern_of_plain_words_finds_what_their_wordpieces_do(text, words):
    ids = VOCABULARY.encode(text).ids
    pieces = VOCABULARY.encode(" ".join(words)).ids
    expected = answer_spans(ids[None, None], pieces[None, None], 4).reshape(-1, 4)
    pattern = re.compile(r"\s+".join(words) + r"(?!\w)", FLAGS)
    found = pattern_spans(*prepare(text), [pattern], 4)
    np.testing.assert_array_equal(found, expected)


@given(documents, st.sampled_from(WORDS))
def test_held_is_what_begins_a_word(text, word):
    expected = any(
        text[start:].lower().startswith(word)
        and not (start and text[start - 1].isalnum())
        for start in range(len(text))
    )
    assert holds(text, [re.escape(word)]) == expected
