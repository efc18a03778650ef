"""Finds words in a text, and normalises what is compared by them.

A word is what a reader of the text would not split, and answers are whole words:

- letters and digits in a row, with their accents: "Élan", "H2O", "1960s"
- joined by an apostrophe or a hyphen: "O'Neill", "Jean-Paul", "COVID-19". The hyphen of
  a range joins nothing ("1914-1918" is two words), and neither does a dash. A word may
  end before a possessive: "Darwin" in "Darwin's".
- numbers with their separators, currency and unit: "1,234", "9/11", "$5", "50%"
- abbreviations with their periods: "U.S.", "Ph.D.", "p.m."; and "example.com", "AT&T",
  "C++", "cosh(t)", "Ca(OH)2"
- a character, in scripts that put no spaces between words (Chinese, Thai, ...); there
  every position is a boundary. Katakana, which spells foreign words, is one word a run.
- in Korean, what begins after a space; it may end before any syllable, because
  particles follow a name without a space

Punctuation is no word, so that an answer neither begins nor ends with a comma.

Answers, texts and titles are compared by one rule, for labels, recall and exact match.
Texts that look the same compare equal: composed characters (NFC), and no format
characters (Unicode category Cf, such as soft hyphens and zero-width joiners). Marks are
kept, because the vowel signs of Indic scripts are marks. `normalise_answer` then
follows SQuAD's script (Rajpurkar et al. 2016), and `answer_tokens` the words of DPR's
(Karpukhin et al. 2020).
"""

import functools
import html
import re
import string
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

_LOWER, _LETTER, _DIGIT, _HANGUL = "a", "A", "0", "g"
_KATAKANA, _UNSPACED, _CURRENCY, _UNIT, _SYMBOL = "k", "h", "$", "%", "+"
_MARK, _OTHER = "m", " "
_WORD = "".join(
    (_LOWER, _LETTER, _DIGIT, _HANGUL, _KATAKANA, _UNSPACED, _CURRENCY, _UNIT, _SYMBOL)
)
_SPACED = "aA0g"
_JOINERS = {
    **dict.fromkeys("'’＇", "'"),
    **dict.fromkeys("-\u2010\u2011", "-"),
    **dict.fromkeys(",\u2009\u202f", ","),
    **{joiner: joiner for joiner in ".:/&"},
}
_UNITS, _SYMBOLS = "%‰°", "#@§"
_ZERO_WIDTH_SPACE = "\u200b"
# First and last character of each range.
_RANGES = (
    (_MARK, "\u1160", "\u11ff"),  # Vowels and finals of a decomposed syllable.
    (_HANGUL, "\u1100", "\u115f"),
    (_HANGUL, "\u3130", "\u318f"),
    (_HANGUL, "\uac00", "\ud7a3"),
    (_KATAKANA, "\u30a1", "\u30fa"),
    (_KATAKANA, "\u30fc", "\u30ff"),
    (_KATAKANA, "\u31f0", "\u31ff"),
    (_KATAKANA, "\uff66", "\uff9f"),
    (_UNSPACED, "\u0e00", "\u0eff"),  # Thai and Lao.
    (_UNSPACED, "\u1000", "\u109f"),  # Burmese.
    (_UNSPACED, "\u1780", "\u17ff"),  # Khmer.
    (_UNSPACED, "\u3005", "\u3007"),
    (_UNSPACED, "\u3041", "\u309f"),  # Hiragana.
    (_UNSPACED, "\u3400", "\u4dbf"),
    (_UNSPACED, "\u4e00", "\u9fff"),
    (_UNSPACED, "\uf900", "\ufaff"),
    (_UNSPACED, "\U00020000", "\U0003ffff"),
)

UNSPACED = re.compile("[" + "".join(f"{a}-{b}" for _, a, b in _RANGES) + "]")
"""Matches a character of a script that does not put a space between all words."""

# Of the kinds of characters, one each. A period joins only what is followed by a small
# letter, because the space after a sentence is sometimes missing.
_JOINED = re.compile(
    r"(?<=[aA0g])'(?=[aA0g])|(?<=[aA0g])-(?=[aAg])|(?<=[aAg])-(?=0)"
    r"|(?<=0)[.,:/](?=0)|(?<=[aAg])&(?=[aAg])|(?<=[aA])\.(?=a)"
)
_ABBREVIATION = re.compile(r"(?<![aA0g])(?:[aA]{1,2}\.)+[aA]{1,2}(?![aA0g])\.?")
_AFTER_ABBREVIATION = re.compile(r"(?<=\.)-(?=[aA0g])")
# Of the text itself.
_ARGUMENT = re.compile(r"(?<=\w)\([^\W\d_]{1,4}\)")
_POSSESSIVE = re.compile(r"(?<=\w)['’＇](?=[sS](?!\w))")
_SUFFIX = re.compile(r"(?<=[^\W\d_])[+#]+(?!\w)")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class WordEdges(NamedTuple):
    """Where words begin and end, by position in a text.

    Attributes:
      begins: whether a word begins with the character at this position.
      ends: whether a word ends before this position.
      resumes: the first position, from this one on, that is not an accent or another
        mark of the character before it.
    """

    begins: Bool[np.ndarray, " position"]
    ends: Bool[np.ndarray, " position"]
    resumes: Int[np.ndarray, " position"]


class PieceEdges(NamedTuple):
    """Which wordpieces a span of whole words may begin and end with.

    Attributes:
      begins: whether a piece is the first of a word.
      ends: whether a piece is the last of a word.
      offsets: the characters [start, end) of each piece, with marks that the tokenizer
        has stripped from its end.
    """

    begins: Bool[np.ndarray, " piece"]
    ends: Bool[np.ndarray, " piece"]
    offsets: Int[np.ndarray, "piece 2"]


def piece_edges(text: str, offsets: Int[np.ndarray, "piece 2"]) -> PieceEdges:
    """Finds the wordpieces that begin and end words of the original text."""
    edges = word_edges(text)
    starts, stops = offsets[:, 0], offsets[:, 1]
    # Several pieces can be of one character, such as a decomposed syllable.
    apart = starts[1:] >= stops[:-1]
    ends = edges.resumes[stops]
    return PieceEdges(
        begins=edges.begins[starts] & np.concatenate([[True], apart])[: len(starts)],
        ends=edges.ends[ends] & np.concatenate([apart, [True]])[-len(starts) :],
        offsets=np.stack([starts, ends], axis=-1),
    )


def continues_word(pieces: Sequence[str]) -> Bool[np.ndarray, " piece"]:
    """Marks the wordpieces before which no word ends, such as "##man" in "bat ##man".

    This is coarser than `piece_edges`, which needs the text: a hyphen or an apostrophe
    always separates words, as it does for `answer_tokens`. Korean words
    may end before any syllable here too, and scripts without spaces before any letter.
    """
    ends_before = (_HANGUL, _UNSPACED)
    return np.array(
        [
            piece.startswith("##")
            and len(piece) > 2
            and _kind(piece[2]) not in ends_before
            for piece in pieces
        ],
        bool,
    )


def split_unspaced(run: str) -> list[str]:
    """Splits a run of letters, numbers and marks where words end without a space.

    A character of a script without spaces is a word; a run of Katakana, or of other
    letters, is one. Korean words may end before any syllable and begin at none but the
    first, so each later syllable is marked: "한국의" gives "한", "##국", "##의".
    """
    kinds, is_mark = _kinds_of(run)
    words: list[str] = []
    before = _OTHER
    for character, kind, mark in zip(run, kinds, is_mark[:-1].tolist(), strict=True):
        spaced = before in _SPACED and kind in _SPACED
        katakana = before == kind == _KATAKANA
        if mark or katakana or (spaced and kind != _HANGUL):
            words[-1] += character
        else:
            words.append(f"##{character}" if spaced else character)
        before = kind
    return words


def word_edges(text: str) -> WordEdges:
    """Finds where words begin and end; arrays have one position more than the text."""
    kinds, is_mark = _kinds_of(text)
    inside = _inside(text, kinds, is_mark)
    # The ends of the text are like spaces.
    before, after = np.array(list(f" {kinds}")), np.array(list(f"{kinds} "))
    begins = np.isin(after, list(_WORD)) & ~inside
    particle = (after == _HANGUL) & np.isin(before, list(_SPACED)) & ~is_mark
    ends = np.isin(before, list(_WORD)) & (~inside | particle)
    for match in _POSSESSIVE.finditer(text):
        ends[match.start()] = True
    # These end with punctuation.
    for match in (*_ABBREVIATION.finditer(kinds), *_ARGUMENT.finditer(text)):
        ends[match.end()] = not inside[match.end()]
    positions = np.where(is_mark, len(text), np.arange(len(text) + 1))
    resumes = np.minimum.accumulate(positions[::-1])[::-1]
    return WordEdges(begins, ends, resumes)


def begins_word(text: str, position: int) -> bool:
    """Returns `word_edges(text).begins[position]`, without looking at all of the text.

    No word extends over a space, so what stands between two of them decides.
    """
    start = max(0, text.rfind(" ", 0, position))
    end = text.find(" ", position)
    near = text[start:] if end < 0 else text[start:end]
    return bool(word_edges(near).begins[position - start])


def _inside(
    text: str, kinds: str, is_mark: Bool[np.ndarray, " position"]
) -> Bool[np.ndarray, " position"]:
    """Marks the positions that are inside a word, between two of its characters."""
    before, after = np.array(list(f" {kinds}")), np.array(list(f"{kinds} "))
    spaced = np.isin(before, list(_SPACED)) & np.isin(after, list(_SPACED))
    inside = (
        is_mark
        | spaced
        | ((before == _KATAKANA) & (after == _KATAKANA))
        | ((before == _CURRENCY) & (after == _DIGIT))
        | ((before == _DIGIT) & (after == _UNIT))
    )
    for match in _JOINED.finditer(kinds):
        inside[match.start() : match.end() + 1] = True
    for match in _ABBREVIATION.finditer(kinds):
        inside[match.start() + 1 : match.end()] = True
        if _AFTER_ABBREVIATION.match(kinds, match.end()):
            inside[match.end() : match.end() + 2] = True
    for match in _SUFFIX.finditer(text):
        inside[match.start() : match.end()] = True
    for match in _ARGUMENT.finditer(text):
        inside[match.start() : match.end()] = True
        inside[match.end()] |= after[match.end()] in _SPACED
    return inside


def _kinds_of(text: str) -> tuple[str, Bool[np.ndarray, " position"]]:
    """Returns each character's kind, a mark's being that of the character it is on.

    Also returns which characters are marks; the position after the last one is not.
    """
    kinds: list[str] = []
    is_mark = np.zeros(len(text) + 1, bool)
    for position, character in enumerate(text):
        kind = _kind(character)
        if kind == _MARK:
            is_mark[position] = position > 0
            kind = kinds[-1] if kinds else _OTHER
        kinds.append(kind)
    return "".join(kinds), is_mark


@functools.lru_cache(maxsize=1 << 14)
def _kind(character: str) -> str:
    if character in _JOINERS:
        return _JOINERS[character]
    category = unicodedata.category(character)
    # Format characters, such as a soft hyphen, show nothing and separate nothing.
    if category[0] == "M" or (category == "Cf" and character != _ZERO_WIDTH_SPACE):
        return _MARK
    if character in _UNITS:
        return _UNIT
    if character in _SYMBOLS:
        return _SYMBOL
    for kind, first, last in _RANGES:
        if first <= character <= last:
            return kind if category[0] in "LN" else _OTHER
    if category == "Ll":
        return _LOWER
    if category == "Sc":
        return _CURRENCY
    kinds = {"L": _LETTER, "N": _DIGIT, "S": _SYMBOL}
    return _LETTER if character == "_" else kinds.get(category[0], _OTHER)


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
    `split_unspaced` divides them; DPR's has a sentence of Chinese for a word.
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
