"""Scores answers as correct or not.

`exact_match` and `token_f1` are the official scoring of the Open-QA sets (Rajpurkar et
al. 2016), so scores are comparable with published ones. `has_answer` decides whether a
document contains an answer, which retrieval metrics rely on. The answers of some sets
are regular expressions (`regex_match`, `has_pattern`). Texts and answers are compared
as `data/words.py` normalises them.

A pattern may backtrack without end, so a search for one is bounded.
"""

import collections
import functools
import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from realm_jax.data.words import (
    answer_tokens,
    begins_word,
    canonical_text,
    normalise_answer,
    word_edges,
)
from realm_jax.errors import BadInputError, StoppedError

_LEADING_ANYTHING = re.compile(r"\A(?:\.\*\??)+(?![*+?{])")
LONGEST_SECONDS = 10.0
"""Longest that one pattern is searched for in one text; most take microseconds."""

SECONDS_AFTER_CTRL_C = 0.5
"""Longest that a search goes on after Ctrl-C."""

_log = logging.getLogger(__name__)


def exact_match(prediction: str, references: Sequence[str]) -> bool:
    """Returns whether the normalised prediction equals a normalised reference."""
    normalised = normalise_answer(prediction)
    return any(normalised == normalise_answer(reference) for reference in references)


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Returns the largest F1 of the prediction's words and those of a reference.

    As in SQuAD's script: words of the normalised texts, counted as often as they occur.
    Where one of two texts has no words, F1 is 1.0 if the other has none either, else
    0.0; so an exact match always has F1 1.0. With no references it is 0.0.
    """
    return max((_f1_of_words(prediction, text) for text in references), default=0.0)


def _f1_of_words(prediction: str, reference: str) -> float:
    predicted, right = (normalise_answer(x).split() for x in (prediction, reference))
    if not predicted or not right:
        return float(predicted == right)
    shared = (collections.Counter(predicted) & collections.Counter(right)).total()
    # 2PR / (P + R) with P = shared / predicted and R = shared / right.
    return 2.0 * shared / (len(predicted) + len(right))


def regex_match(prediction: str, patterns: Sequence[str]) -> bool:
    """Returns whether any pattern matches at the start of the prediction (CuratedTREC).

    See `compile_pattern` for the flags; an invalid pattern never matches.
    """
    text = canonical_text(prediction)
    for pattern in compile_patterns(patterns):
        with bounded(pattern.pattern):
            if pattern.match(text):
                return True
    return False


def is_right(prediction: str, answers: Sequence[str], are_patterns: bool) -> bool:
    """Returns `regex_match` for answers that are patterns, else `exact_match`."""
    match = regex_match if are_patterns else exact_match
    return match(prediction, answers)


def has_pattern(text: str, patterns: Sequence[str]) -> bool:
    """Returns whether any pattern matches from the beginning of a word on.

    A match inside a word does not count ("ten" in "written"), for no answer is given
    that begins there (`data/words.py`). It may end inside a word, because patterns are
    often stems ("manufactur"): the answer is then the whole word. An empty match does
    not count. Recall is measured by it, and fine-tuning's labels follow it. DPR's own
    recall on CuratedTREC (Karpukhin et al. 2020) finds a match anywhere.
    """
    text = canonical_text(text)
    return any(_begins_a_word(pattern, text) for pattern in compile_patterns(patterns))


def _begins_a_word(pattern: re.Pattern[str], text: str) -> bool:
    """Returns whether a match that is not empty begins where a word does."""
    with bounded(pattern.pattern):
        # Most texts hold no match, and most matches begin a word. It takes a
        # millisecond to find all words of a block. A leading `.*` does not change
        # whether a search finds a match; with it, the time of an unsuccessful one is
        # quadratic in the length of the text.
        searched = compile_pattern(_LEADING_ANYTHING.sub("", pattern.pattern))
        found = searched.search(text) if searched else None
        if found is None:
            return False
        if searched is pattern and found.group() and begins_word(text, found.start()):
            return True
        words = np.flatnonzero(word_edges(text).begins).tolist()
        matches = ((pattern.match(text, word), word) for word in words)
        return any(match is not None and match.end() > word for match, word in matches)


def compile_patterns(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """Compiles patterns; invalid ones are left out."""
    compiled = (compile_pattern(pattern) for pattern in patterns)
    return [pattern for pattern in compiled if pattern]


@functools.lru_cache(maxsize=65_536)
def compile_pattern(pattern: str) -> re.Pattern[str] | None:
    """Compiles the regular expression of an answer.

    All answer patterns are compiled here: case-insensitive, Unicode, multi-line, and
    spelled as the texts are (`canonical_text`). Returns None for an invalid pattern,
    which is logged once.
    """
    try:
        flags = re.IGNORECASE | re.UNICODE | re.MULTILINE
        return re.compile(canonical_text(pattern), flags)
    except (re.error, OverflowError, RecursionError) as error:
        _log.warning(
            "answer pattern %r is broken (%s): it never matches", pattern, error
        )
        return None


def has_answer(text: str, answers: Sequence[str]) -> bool:
    """Returns whether the text contains the words of any answer, consecutively.

    An answer without words (only punctuation or articles) is never found. Recall is
    measured by it, and fine-tuning's labels of blocks follow it as far as wordpieces
    can (`data/answer_spans.py` says where they differ). ORQA's own recall finds an
    answer inside a word, too.
    """
    return contains_tokens(answer_tokens(text), [answer_tokens(a) for a in answers])


def contains_tokens(words: Sequence[str], answers: Sequence[Sequence[str]]) -> bool:
    """Returns `has_answer` for texts already split by `answer_tokens`."""
    # Words hold no spaces, so a substring between spaces is a run of whole words.
    text = f" {' '.join(words)} "
    return any(bool(answer) and f" {' '.join(answer)} " in text for answer in answers)


@contextmanager
def bounded(pattern: str) -> Iterator[None]:
    """Bounds the time in which a regular expression is matched, and heeds Ctrl-C.

    Python's `re` holds the interpreter, so no other thread can end it. It does let
    signal handlers run, in the main thread; in other threads nothing is bounded.

    Raises:
      StoppedError: it went on after Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt, stopped = signal.getsignal(signal.SIGINT), False

    def on_interrupt(number, frame):
        nonlocal stopped
        stopped = True
        signal.setitimer(signal.ITIMER_REAL, SECONDS_AFTER_CTRL_C)
        if callable(interrupt):
            interrupt(number, frame)

    def on_alarm(number, frame):
        if stopped:
            raise StoppedError(
                f"stopped in the search for the pattern {pattern!r:.200}"
            )
        raise BadInputError(
            f"expected answer patterns that take at most {LONGEST_SECONDS:g} s a text, "
            f"got {pattern!r:.200}, which tries ever more ways to match; write "
            "it without a repetition of what repeats itself, such as (a+)+"
        )

    alarm = signal.signal(signal.SIGALRM, on_alarm)
    if callable(interrupt):
        signal.signal(signal.SIGINT, on_interrupt)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, alarm)
