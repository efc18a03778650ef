"""When an answer counts as right.

`normalise_answer` and `exact_match` are the official scoring of the Open-QA sets
(Rajpurkar et al. 2016, with the NFD step of ORQA), so figures compare with published
ones. `has_answer` decides whether a document holds an answer; retrieval is judged by
it. The answers of some sets are regular expressions (`regex_match`, `has_pattern`).
"""

import functools
import logging
import re
import string
import unicodedata
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WORD = re.compile(r"[^\W_]+")
_LEADING_ANYTHING = re.compile(r"\A(?:\.\*\??)+(?![*+?{])")

_log = logging.getLogger(__name__)


def normalise_answer(text: str) -> str:
    """Reduces an answer to the form in which answers are compared.

    NFD, lower case, ASCII punctuation stripped, the articles a/an/the dropped, white
    space collapsed; in this order, which is the official one.
    """
    decomposed = unicodedata.normalize("NFD", text).lower()
    return " ".join(_ARTICLES.sub(" ", decomposed.translate(_PUNCTUATION)).split())


def exact_match(prediction: str, references: Sequence[str]) -> bool:
    """Whether the normalised prediction equals any of the normalised references."""
    normalised = normalise_answer(prediction)
    return any(normalised == normalise_answer(reference) for reference in references)


def regex_match(prediction: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern matches from the start of the prediction (CuratedTREC).

    See `compile_pattern` for how they are read; a broken one never matches.
    """
    return any(pattern.match(prediction) for pattern in compile_patterns(patterns))


def is_right(prediction: str, answers: Sequence[str], are_patterns: bool) -> bool:
    """Whether a prediction counts: `regex_match` of patterns, else `exact_match`."""
    match = regex_match if are_patterns else exact_match
    return match(prediction, answers)


def has_pattern(text: str, patterns: Sequence[str]) -> bool:
    """Whether any pattern matches anywhere in the text.

    As retrieval is judged on CuratedTREC (DPR, Karpukhin et al. 2020).
    """
    searched = (_without_leading_anything(pattern) for pattern in patterns)
    return any(pattern.search(text) for pattern in compile_patterns(list(searched)))


def compile_patterns(patterns: Sequence[str]) -> list[re.Pattern[str]]:
    """The patterns that are regular expressions; the broken ones are left out."""
    compiled = (compile_pattern(pattern) for pattern in patterns)
    return [pattern for pattern in compiled if pattern]


def broken_patterns(patterns: Sequence[str]) -> list[str]:
    """The patterns that are no regular expressions, so that they can be reported."""
    return [pattern for pattern in patterns if compile_pattern(pattern) is None]


@functools.lru_cache(maxsize=65_536)
def compile_pattern(pattern: str) -> re.Pattern[str] | None:
    """Reads the regular expression of an answer; the one place that does.

    Case-insensitive, Unicode, multi-line. Returns None for a broken pattern, which is
    logged once.
    """
    try:
        return re.compile(pattern, re.IGNORECASE | re.UNICODE | re.MULTILINE)
    except (re.error, OverflowError, RecursionError) as error:
        _log.warning(
            "answer pattern %r is broken (%s): it never matches", pattern, error
        )
        return None


def answer_tokens(text: str) -> list[str]:
    """The words of a text, lower-cased, without articles.

    Unlike `normalise_answer`, punctuation separates instead of vanishing: "1914–1918"
    holds the answer "1914", and "Newton's" the answer "Newton".
    """
    words = _WORD.findall(unicodedata.normalize("NFC", text.lower()))
    return [word for word in words if word not in ("a", "an", "the")]


def has_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether the words of any answer stand in the text, one after the other.

    An answer without a single word (only punctuation or articles) is never found.
    """
    return contains_tokens(answer_tokens(text), [answer_tokens(a) for a in answers])


def contains_tokens(words: Sequence[str], answers: Sequence[Sequence[str]]) -> bool:
    """`has_answer` on texts that `answer_tokens` has already split."""
    # Words hold no spaces, so a substring between spaces is a run of whole words.
    text = f" {' '.join(words)} "
    return any(bool(answer) and f" {' '.join(answer)} " in text for answer in answers)


def _without_leading_anything(pattern: str) -> str:
    """Drops `.*` from the front: a search finds the rest wherever it would find both.

    With it, the time to search in vain grows with the square of the text.
    """
    if compile_pattern(pattern) is None:
        return pattern
    return _LEADING_ANYTHING.sub("", pattern)
