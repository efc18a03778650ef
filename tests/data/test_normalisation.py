"""Answers, texts and titles, against the official scripts step by step."""

import re
import string
import unicodedata

from hypothesis import assume, given
from hypothesis import strategies as st

from realm_jax.data.normalisation import (
    answer_tokens,
    normalise_answer,
    normalise_title,
)
from realm_jax.data.words import UNSPACED
from realm_jax.metrics.answers import exact_match, has_answer, has_pattern, regex_match

texts = st.text() | st.lists(
    st.sampled_from(["a", "the", "é", "मे", "ला", "\u0301", "\u00ad", "\u200d", "_"])
    | st.sampled_from([" ", ".", "İ", "K", "½", "서", "東", "-", "\n"])
).map("".join)


def composed(text):
    """The one step that is not the scripts' own."""
    kept = "".join(c for c in text if unicodedata.category(c) != "Cf")
    return unicodedata.normalize("NFC", kept)


def squad(text):
    """`normalize_answer` of SQuAD's evaluation script."""
    kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def dpr_tokens(text):
    r"""DPR's `SimpleTokenizer`: [\p{L}\p{N}\p{M}]+ or one of [^\p{Z}\p{C}]."""
    tokens, word = [], ""
    for character in [*text, " "]:
        category = unicodedata.category(character)[0]
        if category in "LNM":
            word += character
            continue
        tokens += [word] if word else []
        tokens += [character] if category not in "ZC" else []
        word = ""
    return [token.lower() for token in tokens]


@given(texts)
def test_exact_match_is_that_of_squad(text):
    expected = unicodedata.normalize("NFC", squad(composed(text)))
    assert normalise_answer(text) == expected
    if text.isascii():
        assert expected == squad(text)


@given(texts)
def test_words_are_those_of_dpr(text):
    """Without its tokens of punctuation, and without articles."""
    assume(not UNSPACED.search(composed(text)))
    tokens = dpr_tokens(unicodedata.normalize("NFC", composed(text).lower()))
    words = [t for t in tokens if unicodedata.category(t[0])[0] in "LNM"]
    assert answer_tokens(text) == [w for w in words if w not in ("a", "an", "the")]


@given(
    st.sampled_from(["NFC", "NFD"]),
    texts,
    st.integers(0, 40),
    st.sampled_from("\u00ad\u200b\u200e\ufeff"),
)
def test_what_looks_the_same_is_the_same(form, text, place, invisible):
    other = unicodedata.normalize(form, text)
    other = other[:place] + invisible + other[place:]
    for normalise in (normalise_answer, answer_tokens, normalise_title):
        assert normalise(other) == normalise(text)


def test_answers_recall_and_patterns_agree():
    for text, answer, is_same in [
        ("Čerkov", "C\u030cerkov", True),
        ("Donau\u00addampf\u00adschiff", "Donaudampfschiff", True),
        ("Josef Ressel\u200e", "Josef Ressel", True),
        ("माला", "मेला", False),
        ("café", "cafe", False),
    ]:
        assert exact_match(text, [answer]) is is_same, text
        assert has_answer(f"({text})", [answer]) is is_same, text
        assert regex_match(text, [f"{answer}$"]) is is_same, text
        assert has_pattern(f"x {text}.", [answer]) is is_same, text


def test_a_title_is_compared_as_in_wikipedia():
    spelled = ["Rosetta & Sons", "rosetta_&_Sons", " Rosetta  &amp; Sons "]
    for title in [*spelled, "Rosetta &#38; Sons"]:
        assert normalise_title(title) == "Rosetta & Sons"
        assert normalise_title(title.replace("S", "s")) != "Rosetta & Sons"
    assert normalise_title("_") == ""
