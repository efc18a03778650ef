"""Normalises answers, texts and titles before they are compared.

One rule for labels, recall and exact match. Texts that look the same compare equal:
composed characters (NFC), and no format characters (Unicode category Cf, such as soft
hyphens and zero-width joiners). Marks are kept, because the vowel signs of Indic
scripts are marks. `normalise_answer` then follows SQuAD's script (Rajpurkar et al.
2016), and `answer_tokens` the words of DPR's (Karpukhin et al. 2020).
"""

import html
import re
import string
import unicodedata

from realm_jax.data.words import UNSPACED, split_unspaced

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class _WithoutFormat(dict[int, int | None]):
    """Of `str.translate`: drops format characters. Filled in as characters occur."""

    def __missing__(self, code: int) -> int | None:
        is_format = unicodedata.category(chr(code)) == "Cf"
        self[code] = None if is_format else code
        return self[code]


class _WordsAndSpaces(dict[int, int]):
    """Of `str.translate`: a space for all but letters, numbers and marks."""

    def __missing__(self, code: int) -> int:
        is_word = unicodedata.category(chr(code))[0] in "LNM"
        self[code] = code if is_word else ord(" ")
        return self[code]


_WITHOUT_FORMAT, _WORDS_AND_SPACES = _WithoutFormat(), _WordsAndSpaces()


def canonical_text(text: str) -> str:
    """Returns the text in NFC, without format characters."""
    if text.isascii():
        return text
    # Most texts have none: to look at their alphabet takes less time.
    if None in (_WITHOUT_FORMAT[ord(character)] for character in set(text)):
        text = text.translate(_WITHOUT_FORMAT)
    return unicodedata.normalize("NFC", text)


def normalise_answer(text: str) -> str:
    """Normalises an answer for exact match.

    Lowercases the canonical text, strips ASCII punctuation, drops the articles a/an/the
    and collapses white space, in this order, which is the official one.
    """
    lowered = _lowered(text).translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", lowered).split())


def answer_tokens(text: str) -> list[str]:
    """Returns the words of a text, lowercased, without articles.

    A word is a run of letters, numbers and marks, as in DPR's tokenizer. Unlike in
    `normalise_answer`, punctuation separates words: "1914–1918" contains the answer
    "1914", and "Newton's" the answer "Newton". Where words have no spaces between them,
    `words.split_unspaced` divides them; DPR's has a sentence of Chinese for a word.
    """
    words = _lowered(text).translate(_WORDS_AND_SPACES).split()
    if not text.isascii():
        words = [part for word in words for part in _parts(word)]
    return [word for word in words if word not in ("a", "an", "the")]


def _parts(word: str) -> list[str]:
    return split_unspaced(word) if UNSPACED.search(word) else [word]


def normalise_title(title: str) -> str:
    """Returns a title as MediaWiki compares it.

    Underscores are spaces, white space is trimmed and collapsed, and case does not
    matter in the first letter; HTML entities are resolved.
    """
    title = canonical_text(html.unescape(title)).replace("_", " ")
    title = " ".join(title.split())
    return unicodedata.normalize("NFC", title[:1].upper() + title[1:])


def _lowered(text: str) -> str:
    # Lowercase letters can be decomposed, as that of "İ" is.
    lowered = canonical_text(text).lower()
    return lowered if lowered.isascii() else unicodedata.normalize("NFC", lowered)
