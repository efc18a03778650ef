"""Labels retrieved blocks, and the spans in them, that answer a question.

These are the labels of fine-tuning by distant supervision (ORQA, section 5): a block is
positive if it contains an answer, a span if it is one.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int

from realm_jax.data.answer_spans import (
    answer_spans,
    answer_starts,
    holds_pattern,
    pattern_spans,
)
from realm_jax.data.blocks import BlockText
from realm_jax.data.questions import decode_patterns
from realm_jax.data.wordpiece import WordPiece
from realm_jax.errors import BadInputError
from realm_jax.metrics.answers import compile_patterns, has_pattern
from realm_jax.types import NULL_BLOCK, Array, Candidates, QuestionBatch

_CONTINUATION = "##"


class TextStore(Protocol):
    """The interface of a block store required for labels."""

    vocabulary: WordPiece
    chunk_length: int

    def body_ids(
        self, block_ids: Int[np.ndarray, "*dims"], length: int
    ) -> Int[np.ndarray, "*dims length"]:
        """Returns the bodies alone, padded with 0; -1 is the null document."""
        ...

    def texts(self, block_ids: Sequence[int] | np.ndarray) -> list[BlockText]:
        """Returns the texts from which the bodies were made."""
        ...


class AnswerLabels:
    """Finds the answers to questions in a corpus.

    Text answers are compared as wordpieces, without reading texts. Regular expressions
    are matched in the texts. The matching blocks are cached, at five bytes for each
    block ever retrieved for a question, because the retriever finds mostly the same
    blocks in the next epoch.
    """

    def __init__(self, store: TextStore, max_span: int):
        """Prepares to find answers.

        Args:
          store: the corpus.
          max_span: length of the reader's longest span, in wordpieces.
        """
        self._store = store
        self._max_span = max_span
        self._begins_word = np.array(
            [not piece.startswith(_CONTINUATION) for piece in store.vocabulary.pieces]
        )
        self._matched: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}

    def blocks(
        self, questions: QuestionBatch, block_ids: Int[Array, "batch neighbour"]
    ) -> Bool[np.ndarray, "batch neighbour"]:
        """Marks the blocks with an answer in their body.

        Args:
          questions: a batch of questions.
          block_ids: the blocks retrieved for each; -1 where nothing was found.
        """
        block_ids = np.asarray(block_ids)
        bodies = self._store.body_ids(block_ids, self._store.chunk_length)
        starts = answer_starts(bodies, np.asarray(questions.answer_ids))
        found = np.asarray(starts.any(axis=(2, 3)))
        for row, patterns in _patterns_by_row(questions):
            real = block_ids[row] != NULL_BLOCK
            found[row, real] |= self._match(patterns, block_ids[row, real])
        return found

    def spans(
        self, questions: QuestionBatch, candidates: Candidates
    ) -> Bool[np.ndarray, "batch candidate span"]:
        """Marks the spans that are an answer, numbered as in `models.span_reader`.

        Args:
          questions: a batch of questions.
          candidates: the blocks that are read, joined with the questions.

        Raises:
          BadInputError: a block's text does not match its stored wordpieces.
        """
        joined_ids = np.asarray(candidates.joined_ids)
        answer_ids = np.asarray(questions.answer_ids)
        found = answer_spans(joined_ids, answer_ids, self._max_span)
        for row, patterns in _patterns_by_row(questions):
            block_ids = np.asarray(candidates.block_ids[row])
            real = np.flatnonzero(block_ids != NULL_BLOCK)
            texts = self._store.texts(block_ids[real])
            for item, text in zip(real, texts, strict=True):
                found[row, item] |= self._pattern_spans(
                    patterns,
                    text.body,
                    int(block_ids[item]),
                    joined_ids[row, item],
                    np.asarray(candidates.joined_segment_ids[row, item]),
                )
        return found

    def _match(
        self, patterns: tuple[str, ...], block_ids: Int[np.ndarray, " block"]
    ) -> Bool[np.ndarray, " block"]:
        nothing = np.zeros(0, np.int32), np.zeros(0, bool)
        known, matched = self._matched.get(patterns, nothing)
        new = np.setdiff1d(block_ids, known).astype(np.int32)
        if len(new):
            known = np.concatenate([known, new])
            matched = np.concatenate([matched, self._match_texts(patterns, new)])
            order = np.argsort(known)
            known, matched = known[order], matched[order]
            self._matched[patterns] = known, matched
        return matched[np.searchsorted(known, block_ids)]

    def _match_texts(
        self, patterns: tuple[str, ...], block_ids: Int[np.ndarray, " block"]
    ) -> Bool[np.ndarray, " block"]:
        bodies = [text.body for text in self._store.texts(block_ids)]
        matched = np.array([has_pattern(body, patterns) for body in bodies])
        # Most blocks are already ruled out; only the others are tokenized.
        rows = np.flatnonzero(matched)
        encodings = self._store.vocabulary.encode_batch([bodies[row] for row in rows])
        compiled = compile_patterns(patterns)
        for row, encoding in zip(rows, encodings, strict=True):
            matched[row] = holds_pattern(
                bodies[row],
                encoding.offsets,
                self._begins_word[encoding.ids],
                compiled,
            )
        return matched

    def _pattern_spans(
        self,
        patterns: tuple[str, ...],
        body: str,
        block_id: int,
        joined_ids: Int[np.ndarray, " joined"],
        segment_ids: Int[np.ndarray, " joined"],
    ) -> Bool[np.ndarray, " span"]:
        start = int(np.argmax(segment_ids))
        length = int(segment_ids.sum()) - 1  # Without [SEP].
        encoding = self._store.vocabulary.encode(body)
        ids = encoding.ids[:length]
        if not np.array_equal(joined_ids[start : start + length], ids):
            raise BadInputError(
                f"expected the text of block {block_id} to have the wordpieces stored "
                "for it, but it has others; prepare the corpus again"
            )
        spans = np.zeros((len(joined_ids), self._max_span), bool)
        spans[start : start + length] = pattern_spans(
            body,
            encoding.offsets[:length],
            self._begins_word[ids],
            compile_patterns(patterns),
            self._max_span,
        )
        return spans.reshape(-1)


def _patterns_by_row(
    questions: QuestionBatch,
) -> list[tuple[int, tuple[str, ...]]]:
    """Returns the rows of questions with patterns as answers, and the patterns."""
    if questions.answer_patterns is None:
        return []
    decoded = (decode_patterns(rows) for rows in np.asarray(questions.answer_patterns))
    return [(row, patterns) for row, patterns in enumerate(decoded) if patterns]
