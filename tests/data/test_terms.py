"""Terms, against a plain count of words and the properties of a tagger."""

import collections
import math

from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.terms import TermTagger

WORDS = ["wing", "skin", "friction", "the", "मेला", "M-1", "7", "."]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


def tagged(text, bodies):
    [spans] = TermTagger(lambda: bodies).tag([text])
    return [text[span.start : span.end] for span in spans]


def masked_words(text, bodies):
    """Returns the set of words that the rule of the module masks."""
    words = [w.lower() for w in text.split() if any(c.isalpha() for c in w)]
    holding = {w: sum(w in body.lower().split() for body in bodies) for w in words}
    most = max(2, len(bodies) / 10)
    score = {
        w: words.count(w) * math.log(1 + len(bodies) / holding[w])
        for w in words
        if 2 <= holding[w] <= most
    }
    best = sorted(score, key=lambda w: (-score[w], words.index(w)))
    return set(best[: math.ceil(len(set(words)) / 5)])


@given(st.lists(TEXTS, min_size=2, max_size=30))
def test_are_the_words_of_the_highest_tf_idf(bodies):
    for text in bodies[:5]:
        found = [w.lower() for term in tagged(text, bodies) for w in term.split()]
        expected = masked_words(text, bodies)
        counts = collections.Counter(w for w in text.lower().split() if w in expected)
        assert collections.Counter(found) == counts


@given(st.lists(st.text(), min_size=1, max_size=5))
def test_spans_are_in_order_disjoint_and_not_empty(texts):
    for text, spans in zip(
        texts, TermTagger(lambda: [*texts, *texts]).tag(texts), strict=True
    ):
        ends = [0, *(end for _, end, _ in spans)]
        for (start, end, _), before in zip(spans, ends, strict=False):
            assert before <= start < end <= len(text)


def test_words_in_a_row_are_one_term_up_to_a_punctuation_mark():
    padding = " ".join(f"w{i}" for i in range(6))
    text = f"skin friction, skin {padding}"
    others = [f"of page {i}" for i in range(40)]
    assert tagged(text, [text, "skin friction", *others]) == ["skin friction", "skin"]
