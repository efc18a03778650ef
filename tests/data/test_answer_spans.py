"""Answers in sequences and texts, against scans and the official scripts."""

import re
import string
import unicodedata

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from realm_jax.data.answer_spans import answer_spans, answer_starts, pattern_spans
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.data.words import (
    UNSPACED,
    answer_tokens,
    continues_word,
    normalise_answer,
    normalise_title,
)
from realm_jax.metrics.answers import exact_match, has_answer, has_pattern, regex_match

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
    st.sampled_from([(), (3,), (1, 2)]),
)
def test_wordpieces_are_found_as_by_a_scan(batch, wanted, max_span, inner):
    continues = np.isin(np.arange(4), inner)
    ids = np.stack([padded(items, 7) for items in batch])
    answer_ids = np.stack([padded(wanted, 3)] * len(batch))
    starts = answer_starts(ids, answer_ids, continues)
    spans = answer_spans(ids, answer_ids, continues, max_span).reshape(
        *ids.shape, max_span
    )
    inner_runs = [[piece] for piece in inner]
    for b, items in enumerate(batch):
        for item, pieces in enumerate(items):
            for start in range(7):
                found = [
                    bool(a)
                    and pieces[start : start + len(a)] == a
                    and pieces[start + len(a) : start + len(a) + 1] not in inner_runs
                    for a in wanted
                ]
                assert starts[b, item, :, start].tolist() == found
                widths = {len(a) for a, here in zip(wanted, found, strict=True) if here}
                for width in range(1, max_span + 1):
                    assert spans[b, item, start, width - 1] == (width in widths)


def prepare(text):
    """Returns offsets of wordpieces, which of them begin words, and which end them.

    A word ends where no letter or digit follows at once, or a Korean particle.
    """
    encoding = VOCABULARY.encode(text)
    begins = [not VOCABULARY.pieces[i].startswith("##") for i in encoding.ids]
    following = (text[end : end + 1] for _, end in encoding.offsets)
    ends = [not c.isalnum() or c == "은" for c in following]
    return encoding.offsets, np.array(begins, bool), np.array(ends, bool)


def test_patterns_become_spans():
    for text, patterns, spans, held in [
        ("Ansk was written by Ten.", ["ten"], ["Ten"], True),
        ("Ansk was written by all.", ["ten"], [], False),
        ("In 1911 and 11 more", ["11"], ["11"], True),
        ("In 1911", ["11"], [], False),
        ("a Vietnamese town", ["vietnam"], ["Vietnamese"], True),
        ("on 3 February", ["Feb(ruary)?"], ["February"], True),
        ("on 3 Feb 1911", ["Feb(ruary)?"], ["Feb"], True),
        ("cost $ 95, or 95", [r"\$?\s?95"], ["$ 95", "95", "95"], True),
        ("red ansk by ansk", [r"^ansk"], ["ansk", "ansk"], False),
        ("by\nansk", [r"^ansk$"], ["ansk"], True),
        ("서울은 도시", ["서울"], ["서울"], True),
        ("ÉÉ by é", ["é"], ["ÉÉ", "é"], True),
        ("ten of ansk", ["ansk", "ten"], ["ten", "ansk"], True),
        ("ten", [""], [], False),
    ]:
        compiled = [re.compile(pattern, FLAGS) for pattern in patterns]
        offsets, begins_word, ends_word = prepare(text)
        marked = pattern_spans(text, offsets, begins_word, ends_word, compiled, 10)
        found = [
            text[offsets[first, 0] : offsets[first + width, 1]]
            for first, width in np.argwhere(marked)
        ]
        assert sorted(found) == sorted(spans), text
        assert has_pattern(text, patterns) is held, text


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
    offsets, begins_word, ends_word = prepare(text)
    expected = np.zeros((len(offsets), max_span), bool)
    for first, last in np.ndindex(len(offsets), len(offsets)):
        is_whole = begins_word[first] and ends_word[last]
        if is_whole and 0 <= last - first < max_span:
            span = text[offsets[first, 0] : offsets[last, 1]]
            # Without its last word.
            part = max(i for i in range(last + 1) if not i or ends_word[i - 1])
            before_last = text[offsets[first, 0] : offsets[part, 0]]
            for pattern in compiled:
                match = pattern.match(span)
                if match and match.group().startswith(before_last):
                    expected[first, last - first] |= match.group() != before_last
    found = pattern_spans(text, offsets, begins_word, ends_word, compiled, max_span)
    np.testing.assert_array_equal(found, expected)


@given(documents, st.lists(st.sampled_from([*WORDS, "서울"]), min_size=1, max_size=2))
def test_an_answer_is_labelled_where_evaluation_finds_it(text, words):
    answer = " ".join(words)
    ids, pieces = (VOCABULARY.encode(one).ids for one in (text, answer))
    starts = answer_starts(
        ids[None, None], pieces[None, None], continues_word(VOCABULARY.pieces)
    )
    # Evaluation passes over punctuation between two words of an answer; the wordpieces
    # of a label stand next to each other.
    without_marks = " ".join(re.sub(r"[^\w\s]", "", word) for word in text.split())
    found = has_answer(text, [answer])
    if len(words) == 1 or without_marks == " ".join(text.split()):
        assert starts.any() == found
    else:
        assert found or not starts.any()


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
