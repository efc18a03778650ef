"""Splits text into sentences, and packs sentences greedily into blocks."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

import blingfire
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from realm_jax.errors import BadInputError

NUM_SPECIAL_PIECES = 3
"""Special pieces of a document: `[CLS] title [SEP] body [SEP]`."""

# Cased: word boundaries found without accent stripping are boundaries with it too.
_BERT_CLEANING = BertNormalizer(lowercase=False)
_BERT_WORDS = BertPreTokenizer()
_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
# Korean sentences end in these syllables, which no abbreviation does, and often begin
# with a year: blingfire starts no sentence at a digit, nor right after a full stop.
_KOREAN_END = re.compile(r"[다요까죠][.!?](?:\[\d+\])*(?:\s+(?=\S)|(?=[가-힣]))")
_KOREAN = re.compile("[가-힣]")
# "2021. 3. 5." is a date in Korean text, which blingfire splits into three sentences.
_DOTTED_DATE = re.compile(r"\d{4}\.\s?\d{1,2}\.\s?\d{1,2}\.?\s*")
# blingfire starts no sentence at a letter such as "Á" or "Ç".
_PLAIN = str.maketrans("ÀÁÂÃÄÅÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜÝ", "AAAAAACEEEEIIIINOOOOOOUUUUY")


def split_sentences(text: str) -> list[tuple[int, int]]:
    """Returns the sentences of `text` as character ranges [start, end).

    They are in order, do not overlap, neither begin nor end with white space, and
    cover everything else. Sentence boundaries are also WordPiece word boundaries, so
    the wordpieces of a text are the concatenation of those of its sentences.
    """
    paragraphs = [0, *(match.end() for match in _PARAGRAPH_BREAK.finditer(text))]
    starts = [
        paragraph_start + start
        for paragraph_start, paragraph_end in pairwise([*paragraphs, len(text)])
        for start in _blingfire_starts(text[paragraph_start:paragraph_end])
    ]
    if not text.isascii() and _KOREAN.search(text):
        starts = _korean_starts(text, starts)
    return split_at(text, starts)


def split_at(text: str, starts: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the sentences of `text` that begin at `starts`, in ascending order.

    They have the properties stated in `split_sentences`; a start inside a word is
    ignored.
    """
    starts = [start for start in starts if start and _parts_words(text, start)]
    edges = [0, *starts, len(text)]
    stripped = (_strip(text, start, end) for start, end in pairwise(edges))
    return [(start, end) for start, end in stripped if start < end]


def pack(
    title_length: int, sentence_lengths: Sequence[int], chunk_length: int
) -> list[range]:
    """Packs whole sentences greedily into blocks without overlap.

    A block grows while `3 + title + sentences <= chunk_length`. A sentence that is too
    long for any block becomes its own block; the model sees it truncated.

    Args:
      title_length: wordpieces of the title, repeated in every block.
      sentence_lengths: wordpieces of each sentence.
      chunk_length: wordpieces of a block, title and special pieces included.

    Returns:
      For each block, the indices of its sentences. Every sentence is in one block.

    Raises:
      BadInputError: `chunk_length` has no room for a single wordpiece.
    """
    if chunk_length <= NUM_SPECIAL_PIECES:
        raise BadInputError(
            f"expected a chunk length above {NUM_SPECIAL_PIECES}, the special pieces "
            f"of a document, got {chunk_length}; raise it (the paper uses 288)."
        )
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


def _blingfire_starts(paragraph: str) -> list[int]:
    """Returns the starts of sentences; the library's ends leave characters out."""
    if not paragraph.strip():
        return []  # blingfire fails on white space.
    _, ranges = blingfire.text_to_sentences_and_offsets(paragraph.translate(_PLAIN))
    return [0, *(start for start, _ in ranges[1:])]


def _korean_starts(text: str, starts: Sequence[int]) -> list[int]:
    """Returns the starts of sentences, given those that blingfire found."""
    dates = [match.span() for match in _DOTTED_DATE.finditer(text)]
    found = {*starts, *(match.end() for match in _KOREAN_END.finditer(text))}
    return sorted(start for start in found if not any(a < start <= b for a, b in dates))


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    sentence = text[start:end]
    start += len(sentence) - len(sentence.lstrip())
    return start, start + len(sentence.strip())


def _parts_words(text: str, position: int) -> bool:
    """Returns whether BERT is certain to begin a new word at `position`.

    Calls the tokenizer, whose punctuation tables differ from Python's.
    """
    before = text[position - 1]
    if before in " \t\n\r":
        return True
    pair = _BERT_CLEANING.normalize_str(before + text[position])
    return len(_BERT_WORDS.pre_tokenize_str(pair)) > 1
