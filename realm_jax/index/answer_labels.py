"""Labels retrieved blocks, and the spans in them, that answer a question.

These are the labels of fine-tuning by distant supervision (ORQA, section 5): a block is
positive if it contains an answer, a span if it is one and can be given as one: it
begins and ends with a word of the text. `data/answer_spans.py` says what a word is.
Wordpieces can lack accents and vowel signs. So what has the wordpieces of an answer is
compared with it as a text, too, and a right span is one that exact match counts.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from realm_jax.data.answer_spans import (
    answer_spans,
    answer_starts,
    pattern_spans,
)
from realm_jax.data.blocks import BlockStore
from realm_jax.data.questions import decode_patterns, decode_texts
from realm_jax.data.words import (
    PieceEdges,
    continues_word,
    normalise_answer,
    piece_edges,
)
from realm_jax.errors import BadInputError
from realm_jax.metrics.answers import bounded, compile_patterns, has_pattern
from realm_jax.types import NULL_BLOCK, Array, Candidates, QuestionBatch

# Judgements by patterns that are cached, over all questions: 160 MiB.
_MOST_CACHED = 1 << 25


class AnswerLabels:
    """Finds the answers to questions, of up to `max_span` wordpieces, in a corpus.

    Text answers are compared as wordpieces; the blocks with an answer are then looked
    up in their texts. Regular expressions are matched in the texts of all. Which blocks
    match is cached, because the retriever finds mostly the same blocks in the next
    epoch: five bytes for each block retrieved for a question, of the questions asked
    last. There are at most `most_cached`, and always those of one question.
    """

    def __init__(
        self, store: BlockStore, max_span: int, most_cached: int = _MOST_CACHED
    ):
        self._store = store
        self._max_span = max_span
        self._continues_word = continues_word(store.vocabulary.pieces)
        self._most_cached = most_cached
        self._num_cached = 0
        # By patterns, those asked for last at the end.
        self._matched: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}

    def blocks(
        self, questions: QuestionBatch, block_ids: Int[Array, "batch neighbour"]
    ) -> Bool[np.ndarray, "batch neighbour"]:
        """Marks the retrieved blocks with an answer in their body; id -1 has none."""
        block_ids = np.asarray(block_ids)
        answer_ids = np.asarray(questions.answer_ids)
        rows = zip(answer_ids, _texts_by_row(questions), block_ids, strict=True)
        found = np.stack([self._hold_answers(*row) for row in rows])
        for row, patterns in _patterns_by_row(questions):
            real = block_ids[row] != NULL_BLOCK
            found[row, real] |= self._match(patterns, block_ids[row, real])
        return found

    def spans(
        self, questions: QuestionBatch, candidates: Candidates
    ) -> Bool[np.ndarray, "batch candidate span"]:
        """Marks the spans that are an answer, numbered as in `models.span_reader`.

        They begin and end with a word of the text, as those that are given as answers
        (`answering/reader.py`).
        """
        joined_ids = np.asarray(candidates.joined_ids)
        answer_ids = np.asarray(questions.answer_ids)
        found = answer_spans(
            joined_ids, answer_ids, self._continues_word, self._max_span
        )
        patterns, texts = dict(_patterns_by_row(questions)), _texts_by_row(questions)
        block_ids = np.asarray(candidates.block_ids)
        segment_ids = np.asarray(candidates.joined_segment_ids)
        # Texts are read where they decide; of most blocks, wordpieces say enough.
        has_patterns = np.isin(np.arange(len(found)), list(patterns))
        looked_up = found.any(axis=-1) | has_patterns[:, None]
        looked_up &= block_ids != NULL_BLOCK
        found[~looked_up] = False  # A match in the question is none.
        bodies = self._read(np.unique(block_ids[looked_up]))
        by_place = found.reshape(*joined_ids.shape, self._max_span)
        for row, item in zip(*np.nonzero(looked_up), strict=True):
            by_place[row, item] = self._whole_words(
                by_place[row, item],
                {texts[row][i] for i in np.flatnonzero(answer_ids[row, :, 0])},
                patterns.get(row, ()),
                bodies[int(block_ids[row, item])],
                joined_ids[row, item],
                segment_ids[row, item],
            )
        return found

    def _hold_answers(
        self,
        answer_ids: Int[np.ndarray, "answer piece"],
        texts: Sequence[str],
        block_ids: Int[np.ndarray, " block"],
    ) -> Bool[np.ndarray, " block"]:
        """Marks the blocks with a text answer to a question."""
        used = np.flatnonzero(answer_ids[:, 0]).tolist()
        found = np.zeros((len(block_ids), len(used)), bool)
        if used:
            # As one long body: no answer extends over the zeros in it.
            bodies, ends = self._store.consecutive_bodies(
                block_ids, self._store.chunk_length
            )
            starts = answer_starts(
                bodies[None, None], answer_ids[None, used], self._continues_word
            )
            answers, places = np.nonzero(starts[0, 0])
            found[np.searchsorted(ends, places), answers] = True
        wanted = [texts[answer] for answer in used]
        hold = np.any(found, axis=-1)
        by_pieces = found @ np.array([not text for text in wanted], bool)
        compared = np.flatnonzero(hold & ~by_pieces)
        bodies = self._store.texts(block_ids[compared]) if len(compared) else []
        for row, body in zip(compared, bodies, strict=True):
            answers = {
                text for text, has in zip(wanted, found[row], strict=True) if has
            }
            hold[row] = _any_in_text(answers, body.body)
        return np.asarray(hold)

    def _match(
        self, patterns: tuple[str, ...], block_ids: Int[np.ndarray, " block"]
    ) -> Bool[np.ndarray, " block"]:
        nothing = np.zeros(0, np.int32), np.zeros(0, bool)
        known, matched = self._matched.pop(patterns, nothing)
        self._num_cached -= len(known)
        new = np.setdiff1d(block_ids, known).astype(np.int32)
        if len(new):
            texts = self._store.texts(new)
            found = np.array([has_pattern(text.body, patterns) for text in texts], bool)
            known = np.concatenate([known, new])
            matched = np.concatenate([matched, found])
            order = np.argsort(known)
            known, matched = known[order], matched[order]
        self._num_cached += len(known)
        while self._matched and self._num_cached > self._most_cached:
            dropped, _ = self._matched.pop(next(iter(self._matched)))
            self._num_cached -= len(dropped)
        self._matched[patterns] = known, matched
        return matched[np.searchsorted(known, block_ids)]

    def _read(self, block_ids: Int[np.ndarray, " block"]) -> dict[int, "_Body"]:
        texts = [text.body for text in self._store.texts(block_ids)]
        encodings = self._store.vocabulary.encode_batch(texts)
        return {
            block: _Body(block, text, encoding.ids, piece_edges(text, encoding.offsets))
            for block, text, encoding in zip(
                block_ids.tolist(), texts, encodings, strict=True
            )
        }

    def _whole_words(
        self,
        found: Bool[np.ndarray, "joined width"],
        texts: Collection[str],
        patterns: tuple[str, ...],
        body: "_Body",
        joined_ids: Int[np.ndarray, " joined"],
        segment_ids: Int[np.ndarray, " joined"],
    ) -> Bool[np.ndarray, "joined width"]:
        """Marks the spans of one body that are an answer, and begin and end a word.

        `found` are the spans with the wordpieces of a text answer, `texts` the
        normalised answers, "" for one that wordpieces decide. Segments are 1 for the
        body, perhaps cut off, and the [SEP] behind it.
        """
        start = int(np.argmax(segment_ids))
        length = int(segment_ids.sum()) - 1  # Without [SEP].
        if not np.array_equal(joined_ids[start : start + length], body.ids[:length]):
            raise BadInputError(
                f"expected the text of block {body.block_id} to have the wordpieces "
                "stored for it, but it has others; prepare the corpus again"
            )
        # Of the whole body, so that a word that is cut off does not end there.
        begins, ends = body.edges.begins[:length], body.edges.ends[:length]
        padded = np.append(ends, np.zeros(self._max_span - 1, bool))
        windows = np.lib.stride_tricks.sliding_window_view(padded, self._max_span)
        spans = np.zeros_like(found)
        spans[start : start + length] = (
            found[start : start + length] & begins[:, None] & windows
        )
        offsets = body.edges.offsets[:length]
        if "" not in texts:
            for first, width in zip(*np.nonzero(spans[start:]), strict=True):
                text = body.text[offsets[first, 0] : offsets[first + width, 1]]
                spans[start + first, width] = normalise_answer(text) in texts
        for pattern in compile_patterns(patterns):
            with bounded(pattern.pattern):
                spans[start : start + length] |= pattern_spans(
                    body.text, offsets, begins, ends, [pattern], self._max_span
                )
        return spans


class _Body(NamedTuple):
    """The body of a block: its text, its wordpieces, and which begin and end words."""

    block_id: int
    text: str
    ids: np.ndarray
    edges: PieceEdges


def _any_in_text(answers: Collection[str], body: str) -> bool:
    """Returns whether a body that has the wordpieces of answers has their text."""
    # Wordpieces of such texts lack nothing.
    if body.isascii() and any(map(str.isascii, answers)):
        return True
    # Wordpieces do not tell "U. S." from "U.S.".
    text = normalise_answer(body).replace(" ", "")
    return any(answer.replace(" ", "") in text for answer in answers)


def _texts_by_row(questions: QuestionBatch) -> list[list[str]]:
    """Returns the normalised answers of each question, "" where there is none."""
    if questions.answer_texts is None:
        return [[""] * np.shape(questions.answer_ids)[1]] * len(questions.answer_ids)
    return [decode_texts(rows) for rows in np.asarray(questions.answer_texts)]


def _patterns_by_row(
    questions: QuestionBatch,
) -> list[tuple[int, tuple[str, ...]]]:
    """Returns the rows of questions with patterns as answers, and the patterns."""
    if questions.answer_patterns is None:
        return []
    decoded = (decode_patterns(rows) for rows in np.asarray(questions.answer_patterns))
    return [(row, patterns) for row, patterns in enumerate(decoded) if patterns]
