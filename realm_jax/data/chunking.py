"""Splits text into sentences, and packs sentences greedily into blocks.

What is too long for a block is divided, so that no part of a text is left unread.
"""

import ctypes
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import blingfire
import numpy as np
from jaxtyping import Int
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from realm_jax.errors import BadInputError

NUM_SPECIAL_PIECES = 3
"""Special pieces of a document: `[CLS] title [SEP] body [SEP]`."""

# Cased: word boundaries found without accent stripping are boundaries with it too.
_BERT_CLEANING = {
    chinese: BertNormalizer(lowercase=False, handle_chinese_chars=chinese)
    for chinese in (True, False)
}
_BERT_WORDS = BertPreTokenizer()
# The library itself, which the package of the same name wraps.
_BLINGFIRE: Any = blingfire.blingfire
_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
# Korean sentences end in these syllables, which no abbreviation does, and often begin
# with a year: blingfire starts no sentence at a digit, nor right after a full stop.
_KOREAN_END = re.compile(r"[다요까죠][.!?](?:\[\d+\])*(?:\s+(?=\S)|(?=[가-힣]))")
_KOREAN = re.compile("[가-힣]")
# "2021. 3. 5." is a date in Korean text, which blingfire splits into three sentences.
_DOTTED_DATE = re.compile(r"\d{4}\.\s?\d{1,2}\.\s?\d{1,2}\.?\s*")
# Full stops and question marks of other scripts, which blingfire does not know: of
# Devanagari and its relatives, Arabic and Urdu, Armenian, Ethiopic, Burmese and Khmer.
_FULL_STOPS = "।॥۔؟։።။។"
_FURTHER_END = re.compile(rf"[{_FULL_STOPS}]+[\"'”’»)\]]*\s*(?=\S)")
# Where a sentence that is too long is divided, after one of these or at the end of a
# line: best first.
_MARKS = (frozenset(f"{_FULL_STOPS}.!?。．！？"), frozenset(",;:|،؛،、，；：–—"))
# Parts that end at a mark fill at least this share of a block.
_LEAST_FILLED = 0.5
# In text without capitals blingfire finds few sentences, so it is shown a capital after
# each of these, unless it is an abbreviation such as "e.g." or "fig.".
_LOWER_CASE_END = re.compile(r"(?P<word>\S*?)[.!?]+[\"')\]]*\s+(?P<letter>[^\W\d_])")
_ABBREVIATIONS = ("al", "cf", "dr", "eq", "eqs", "fig", "figs", "mr", "mrs", "no", "vs")
# blingfire starts no sentence at a letter such as "Á" or "Ç".
_PLAIN = str.maketrans("ÀÁÂÃÄÅÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝ", "AAAAAACEEEEIIIINOOOOOOUUUUY")


def split_sentences(
    text: str, tokenize_chinese_chars: bool = True
) -> list[tuple[int, int]]:
    """Returns the sentences of `text` as character ranges [start, end).

    They are in order, do not overlap, neither begin nor end with white space, and
    cover everything else. Sentence boundaries are also WordPiece word boundaries, so
    the wordpieces of a text are the concatenation of those of its sentences.
    """
    paragraphs = [0, *(match.end() for match in _PARAGRAPH_BREAK.finditer(text))]
    starts = [
        paragraph_start + start
        for paragraph_start, paragraph_end in pairwise([*paragraphs, len(text)])
        for start in _blingfire_starts(
            _with_capitals(text[paragraph_start:paragraph_end])
        )
    ]
    if not text.isascii():
        further = {match.end() for match in _FURTHER_END.finditer(text)}
        starts = sorted(further.union(starts)) if further else starts
        if _KOREAN.search(text):
            starts = _korean_starts(text, starts)
    return split_at(text, starts, tokenize_chinese_chars)


def divide(
    text: str,
    offsets: Int[np.ndarray, "piece 2"],
    room: int,
    tokenize_chinese_chars: bool = True,
) -> list[int]:
    """Returns the wordpieces that begin a part of a sentence too long for a block.

    Each part is as long as fits and ends with a line or a full stop, else at a comma
    or the like, else with a word. A word that is itself too long stays whole.

    Args:
      offsets: characters [start, end) of each of its wordpieces.
      room: most wordpieces of a part.
    """
    starts = offsets[:, 0].tolist()

    def begins_word(piece: int) -> bool:
        return starts[piece - 1] < starts[piece] and _parts_words(
            text, starts[piece], tokenize_chinese_chars
        )

    def rank(piece: int) -> tuple[int, int]:
        """Compares pieces to divide before; the largest is the best."""
        before = text[starts[piece - 1] : starts[piece]]
        mark = before.rstrip()[-1:]
        if piece - begins[-1] < _LEAST_FILLED * room:
            return 0, piece
        if "\n" in before or mark in _MARKS[0]:
            return 2, piece
        return int(mark in _MARKS[1]), piece

    begins = [0]
    while len(starts) - (first := begins[-1]) > room:
        fitting = filter(begins_word, range(first + 1, first + room + 1))
        found = max(fitting, key=rank, default=None)
        if found is None:
            later = range(first + room, len(starts))
            found = next(filter(begins_word, later), None)
        if found is None:
            break
        begins.append(found)
    return begins


def split_at(
    text: str, starts: Iterable[int], tokenize_chinese_chars: bool = True
) -> list[tuple[int, int]]:
    """Returns the sentences of `text` that begin at `starts`, in ascending order.

    They have the properties stated in `split_sentences`; a start inside a word is
    ignored.
    """
    starts = [
        start
        for start in starts
        if start and _parts_words(text, start, tokenize_chinese_chars)
    ]
    edges = [0, *starts, len(text)]
    stripped = (strip_range(text, start, end) for start, end in pairwise(edges))
    return [(start, end) for start, end in stripped if start < end]


def pack(
    title_length: int, sentence_lengths: Sequence[int], chunk_length: int
) -> list[range]:
    """Packs whole sentences greedily into blocks; returns the sentences of each.

    A block grows while `3 + title + sentences <= chunk_length`. A sentence that is too
    long for any block becomes its own block; the model sees it truncated (see
    `divide`).
    """
    require_room(chunk_length)
    room = chunk_length - NUM_SPECIAL_PIECES - title_length
    packed, first, used = [], 0, 0
    for index, length in enumerate(sentence_lengths):
        if index > first and used + length > room:
            packed.append(range(first, index))
            first, used = index, 0
        used += length
    if sentence_lengths:
        packed.append(range(first, len(sentence_lengths)))
    return packed


def require_room(chunk_length: int) -> None:
    """Checks that a block has room for more than its special pieces."""
    if chunk_length <= NUM_SPECIAL_PIECES:
        raise BadInputError(
            f"expected a chunk length above {NUM_SPECIAL_PIECES}, the special pieces "
            f"of a document, got {chunk_length}; raise it (the paper uses 288)."
        )


def _with_capitals(paragraph: str) -> str:
    """Returns a lower-case paragraph with a capital after each end of a sentence."""
    if not paragraph.islower():
        return paragraph

    def capital_after(end: re.Match[str]) -> str:
        word, found = end["word"].lstrip("(["), end.group()
        is_initial = len(word) == 1 and word.isalpha()
        is_part = is_initial or "." in word or word in _ABBREVIATIONS
        return found if is_part else f"{found[:-1]}A"

    return _LOWER_CASE_END.sub(capital_after, paragraph)


def _blingfire_starts(paragraph: str) -> list[int]:
    """Returns the starts of sentences; the library's ends leave characters out.

    They are those of `blingfire.text_to_sentences_and_offsets`, which looks at every
    byte in Python to find them, and takes most of the time of preparing a corpus.
    """
    if not paragraph.strip():
        return []  # blingfire fails on white space.
    text = (paragraph if paragraph.isascii() else paragraph.translate(_PLAIN)).encode()
    size = 2 * len(text)
    sentences = ctypes.create_string_buffer(size)
    starts, ends = (ctypes.c_int32 * size)(), (ctypes.c_int32 * size)()
    made = _BLINGFIRE.TextToSentencesWithOffsets(
        text, len(text), sentences, starts, ends, size
    )
    if not 0 <= made <= size:
        return [0]
    count = sentences.value.count(b"\n") + 1
    found = starts[1:count]
    if len(text) > len(paragraph):
        begins_character = (np.frombuffer(text, np.uint8) & 0xC0) != 0x80
        found = (begins_character.cumsum()[found] - 1).tolist()
    return [0, *found]


def _korean_starts(text: str, starts: Sequence[int]) -> list[int]:
    """Returns the starts of sentences, given those that blingfire found."""
    dates = [match.span() for match in _DOTTED_DATE.finditer(text)]
    found = {*starts, *(match.end() for match in _KOREAN_END.finditer(text))}
    return sorted(start for start in found if not any(a < start <= b for a, b in dates))


def strip_range(text: str, start: int, end: int) -> tuple[int, int]:
    """Returns [start, end) without the white space at both ends; may be empty."""
    part = text[start:end]
    start += len(part) - len(part.lstrip())
    return start, start + len(part.strip())


def _parts_words(text: str, position: int, tokenize_chinese_chars: bool) -> bool:
    """Returns whether BERT is certain to begin a new word at `position`.

    Calls the tokenizer, whose punctuation tables differ from Python's.
    """
    before = text[position - 1]
    if before in " \t\n\r":
        return True
    cleaning = _BERT_CLEANING[tokenize_chinese_chars]
    pair = cleaning.normalize_str(before + text[position])
    return len(_BERT_WORDS.pre_tokenize_str(pair)) > 1
