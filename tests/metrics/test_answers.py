import logging
import re
import signal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from realm_jax.data.words import answer_tokens, word_edges
from realm_jax.errors import StoppedError
from realm_jax.metrics import answers
from realm_jax.metrics.answers import (
    compile_pattern,
    compile_patterns,
    exact_match,
    has_answer,
    has_pattern,
    is_right,
    regex_match,
    token_f1,
)
from tests.refused import refused


def test_exact_match():
    for prediction, references, right in (
        ("The Beatles", ["beatles"], True),
        ("Łódź", ["Łódź"], True),
        ("theory", ["ory"], False),
        ("16 February 1981", ["February 16, 1981", "16 february 1981"], True),
        ("1981", ["16 February 1981"], False),
        ("1981", [], False),
    ):
        assert exact_match(prediction, references) is right, prediction


def test_f1_of_words():
    for prediction, references, f1 in (
        ("Neil Armstrong", ["Neil Armstrong"], 1.0),
        ("the Armstrong", ["Neil Armstrong"], 2 / 3),  # Precision 1, recall 1/2.
        ("24 November 1859", ["1859"], 1 / 2),  # Precision 1/3, recall 1.
        ("New York New York", ["York York, old"], 4 / 7),  # Words count as often.
        ("Rome", ["Paris", "Rome, Italy"], 2 / 3),  # The best of the references.
        ("Rome", ["Paris"], 0.0),
        ("", ["Paris"], 0.0),
        ("The", ["a"], 1.0),  # Neither has a word: they match exactly.
        ("Rome", [], 0.0),
    ):
        assert token_f1(prediction, references) == pytest.approx(f1), prediction


@given(st.text("ab .", max_size=12), st.lists(st.text("ab .", max_size=12)))
def test_f1_is_1_where_the_answer_matches_and_is_not_moved_by_order(text, references):
    f1 = token_f1(text, references)
    assert 0.0 <= f1 <= 1.0
    if exact_match(text, references):
        assert f1 == 1.0
    backwards = " ".join(reversed(text.split(" ")))
    assert token_f1(backwards, references) == pytest.approx(f1)


def test_regex_match():
    for prediction, patterns, right in (
        ("Paris, France", ["paris"], True),
        ("in Paris", ["paris"], False),  # Anchored at the start.
        ("in Paris", ["london", ".*paris"], True),
        ("ÉLYSÉE", ["élysée"], True),
        ("Paris\nFrance", ["paris$"], True),
        ("Paris", ["(paris"], False),
        ("Paris", ["(paris", "par.s"], True),
    ):
        assert regex_match(prediction, patterns) is right, (prediction, patterns)


def test_has_pattern():
    for text, patterns, found in (
        ("It was written by ten.", ["ten"], True),
        ("It was written.", [".*ten"], True),  # As "written" is a right answer.
        ("1,234 ships", ["234"], False),
        ("Jean-Paul O'Neill", ["paul", "neill"], False),
        ("cost $95", [r"\$?95"], True),
        ("In the\nÉlysée", ["^élysée$"], True),
        ("in Paris", ["(paris", "rome"], False),
        ("in Paris", [], False),
        # Minutes, if every place began the search of the rest of the text anew.
        ("in Paris " * 100_000, [".*rome.*"], False),
    ):
        assert has_pattern(text, patterns) is found, (text[:99], patterns)


searched = st.lists(
    st.sampled_from([".", ".*", ".*?", "a", "b?", "|", "(a|b)", ".+", "$"])
)


@given(
    st.sampled_from(["", ".*", ".*?", ".*.*", ".+"]),
    searched.map("".join),
    st.text("ab \n", max_size=6),
)
def test_has_pattern_equals_a_match_at_every_word(start, rest, text):
    pattern = re.compile(start + rest, re.IGNORECASE | re.MULTILINE)
    words = re.finditer(r"\w+", text)
    matches = [pattern.match(text, word.start()) for word in words]
    expected = any(match and match.group() for match in matches)
    assert has_pattern(text, [start + rest]) == expected


def test_a_pattern_that_backtracks_without_end_is_named(monkeypatch):
    monkeypatch.setattr(answers, "LONGEST_SECONDS", 0.01)
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)
    pattern, text = r"(a+)+\Z", "a" * 60 + "b"
    for search in (has_pattern, regex_match):
        with refused(re.escape(repr(pattern))):
            search(text, [pattern, "b"])
    assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def interrupted_search():
    with answers.bounded("(a+)+"):
        signal.raise_signal(signal.SIGINT)
        re.match(r"(a+)+\Z", "a" * 60 + "b")


def test_ctrl_c_ends_the_search_for_a_pattern(monkeypatch):
    """It is heard by who listens, and the search that goes on ends."""
    monkeypatch.setattr(answers, "SECONDS_AFTER_CTRL_C", 0.01)
    heard = []
    before = signal.signal(signal.SIGINT, lambda *signal: heard.append(signal))
    try:
        with pytest.raises(StoppedError):
            interrupted_search()
        assert len(heard) == 1
        with answers.bounded("a"):
            signal.raise_signal(signal.SIGINT)
        assert has_pattern("a", ["a"])
    finally:
        signal.signal(signal.SIGINT, before)


def test_answers_and_patterns_are_judged_by_their_own_rule():
    assert is_right("The Sun.", ["sun"], are_patterns=False)
    assert not is_right("The Sun.", ["sun"], are_patterns=True)
    assert is_right("sunday", ["sun"], are_patterns=True)
    assert not is_right("sunday", ["sun"], are_patterns=False)


def test_patterns_are_compiled_once_and_broken_ones_reported_once(caplog):
    assert compile_pattern("sun(day)?") is compile_pattern("sun(day)?")
    good = compile_pattern("sun")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert compile_pattern("(sun here") is None
            assert compile_patterns(["(sun here", "sun", "here{99999999999}"]) == [good]
    reported = [record.args[0] for record in caplog.records]
    assert reported == ["(sun here", "here{99999999999}"]


def test_has_answer():
    for text, right, found in (
        ("It ran from 1914–1918.", ["1914"], True),
        ("the New York Times", ["York Times"], True),
        ("New Yorkers", ["New York"], False),
        ("Battle of the Bulge", ["battle of bulge"], True),
        ("a café", ["cafe\u0301"], True),
        ("他是北京大学的学生。", ["北京大学"], True),
        ("東京は日本の首都です", ["日本", "大阪"], True),
        ("アメリカ合衆国", ["メリカ"], False),
        ("กรุงเทพมหานครเป็นเมืองหลวง", ["เมืองหลวง"], True),
        ("한국의 수도는 서울이다", ["서울"], True),
        ("대한국의 수도", ["한국"], False),
        ("anything", ["the", "?!"], False),
        ("anything", [], False),
    ):
        assert has_answer(text, right) is found, (text, right)


def slow_has_answer(text, answers):
    words = answer_tokens(text)
    return any(
        words[start : start + len(wanted)] == wanted
        for wanted in filter(None, map(answer_tokens, answers))
        for start in range(len(words))
    )


words = st.lists(st.sampled_from(["x", "y", "xy", "a", "the", "é", "İ", "-", "."]))


@given(words.map(" ".join), st.lists(words.map(" ".join), max_size=3))
def test_has_answer_equals_a_scan_over_words(text, answers):
    assert has_answer(text, answers) == slow_has_answer(text, answers)


@given(st.text(), st.text(), st.text())
def test_an_answer_set_apart_in_a_text_is_found(before, answer, after):
    found = has_answer(f"{before} | {answer} | {after}", [answer])
    assert found == bool(answer_tokens(answer))


unspaced = st.lists(st.sampled_from([*"北京アイกข한국x1 ", "กั"])).map(
    lambda characters: " ".join("".join(characters).split())
)


@given(unspaced, unspaced)
def test_without_spaces_an_answer_is_whole_words(text, answer):
    """The rule by which spans are given as answers."""
    edges = word_edges(text)
    starts = [i for i in range(len(text)) if text.startswith(answer, i)]
    found = [i for i in starts if edges.begins[i] and edges.ends[i + len(answer)]]
    assume(answer_tokens(answer))
    assert has_answer(text, [answer]) == bool(found)
