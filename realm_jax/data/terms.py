"""Finds terms, the spans to mask in text whose names nothing marks.

Lower-case text, and scripts without capitals, have few spans that a tagger of names
finds. Their terms are chosen by tf-idf (Salton & Buckley 1988) over the blocks of the
corpus:

- A word is what stands between spaces, without punctuation at its ends, and has a
  letter. It is distinctive if it occurs in another block too, from which it could be
  retrieved, and in at most a tenth of all.
- Of the distinct words of a block, the fifth with the highest tf-idf are masked, those
  that come first where they are equal.
- Such words in a row are one term, as in "turbulent skin friction"; it has at most four
  words.
"""

import collections
import functools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from realm_jax.data.salient_spans import Span

TERM = "TERM"
"""Label of a term."""

_COMMON = 0.1
_SHARE = 0.2
_MAX_WORDS = 4
# In a script without spaces a clause stands between two of them.
_LONGEST_WORD = 40


class TermTagger:
    """Finds the terms of blocks; see `Tagger`."""

    name = "terms-1"

    def __init__(self, bodies: Callable[[], Iterable[str]]):
        """Creates a tagger.

        Args:
          bodies: returns the blocks, or a sample of them, in which words are counted,
            when the first text is tagged.
        """
        self._bodies = bodies

    def tag(self, texts: Sequence[str]) -> list[list[Span]]:
        """Returns the terms of each text: in order, disjoint, not empty."""
        return [self._tag_text(text) for text in texts]

    def _tag_text(self, text: str) -> list[Span]:
        found = list(_words(text))
        chosen = self._distinctive([word for _, _, word in found])
        spans: list[Span] = []
        length = 0
        for start, end, word in found:
            if word not in chosen:
                continue
            is_next = spans and text[spans[-1].end : start] == " "
            if is_next and length < _MAX_WORDS:
                spans[-1] = Span(spans[-1].start, end, TERM)
                length += 1
            else:
                spans.append(Span(start, end, TERM))
                length = 1
        return spans

    def _distinctive(self, words: Sequence[str]) -> set[str]:
        """Returns those of a block's words that are masked."""
        inverse, counts = self._inverse_frequencies, collections.Counter(words)
        scores = {
            word: count * inverse[word]
            for word, count in counts.items()
            if word in inverse
        }
        # Sorting is stable, and a counter keeps the order of the text.
        ranked = sorted(scores, key=lambda word: -scores[word])
        return set(ranked[: math.ceil(_SHARE * len(counts))])

    @functools.cached_property
    def _inverse_frequencies(self) -> Mapping[str, float]:
        """Returns the inverse document frequency of each distinctive word."""
        frequencies: collections.Counter[str] = collections.Counter()
        count = 0
        for body in self._bodies():
            count += 1
            frequencies.update({word for _, _, word in _words(body)})
        most = max(2, _COMMON * count)
        return {
            word: math.log(1 + count / frequency)
            for word, frequency in frequencies.items()
            if 2 <= frequency <= most
        }


def _words(text: str) -> Iterator[tuple[int, int, str]]:
    """Yields start, end and lower-case form of each word."""
    for match in re.finditer(r"\S+", text):
        start, end = match.span()
        while start < end and _is_punctuation(text[start]):
            start += 1
        while start < end and _is_punctuation(text[end - 1]):
            end -= 1
        word = text[start:end]
        if len(word) <= _LONGEST_WORD and any(map(str.isalpha, word)):
            yield start, end, word.casefold()


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] in "PSC"
