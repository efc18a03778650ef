"""Registers a set of questions as a SeqIO task, for Open-QA fine-tuning.

Importing this module imports TensorFlow.
"""

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data.features import Example
from realm_jax.data.questions import (
    MAX_ANSWER_LENGTH,
    MAX_ANSWERS,
    QUERY_LENGTH,
    Question,
    pattern_length,
    question_examples,
    question_specs,
    questions_fingerprint,
    require_patterns_fit,
)
from realm_jax.data.wordpiece import WordPiece
from realm_jax.prepare.seqio_tasks import add_task


class QuestionSource(seqio.FunctionDataSource):
    """Rows of the questions of a split, as int32 scalars.

    Attributes:
      vocabulary: the tokenizer of the corpus.
      provenance: fingerprints of the vocabulary and of the questions.
    """

    def __init__(self, questions: list[Question], vocabulary: WordPiece):
        """Creates a source from questions, as returned by `read_questions`."""
        rows: dict[str, list[int]] = {}
        for row, question in enumerate(questions):
            rows.setdefault(question.split, []).append(row)
        self.vocabulary = vocabulary
        self.provenance = {
            "vocabulary_fingerprint": vocabulary.fingerprint,
            "questions_fingerprint": questions_fingerprint(questions),
        }

        def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None):
            del shuffle_files, seed  # A single shard, which the task itself shuffles.
            ids = np.array(rows[split], np.int32)
            return tf.data.Dataset.from_tensor_slices(ids)

        counts = {split: len(ids) for split, ids in rows.items()}
        super().__init__(dataset_fn, splits=tuple(rows), num_input_examples=counts)


def register_question_task(
    name: str,
    questions: list[Question],
    vocabulary: WordPiece,
    *,
    query_length: int = QUERY_LENGTH,
    max_answers: int = MAX_ANSWERS,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    max_pattern_length: int | None = None,
) -> None:
    """Registers a task with rows of a `types.QuestionBatch` as examples.

    It has the splits of the questions.

    Args:
      max_answer_length: longest answer the reader can find, in wordpieces.
      max_pattern_length: longest regular expression as an answer, in characters. None
        is that of `pattern_length`; sets to be mixed need the same.
    """
    if max_pattern_length is None:
        max_pattern_length = pattern_length(questions)
    require_patterns_fit(questions, max_pattern_length)
    lengths = {
        "query_length": query_length,
        "max_answers": max_answers,
        "max_answer_length": max_answer_length,
        "max_pattern_length": max_pattern_length,
    }

    def make_examples(rows: np.ndarray) -> Example:
        chosen = [questions[row] for row in rows]
        return question_examples(chosen, vocabulary, **lengths)

    specs = question_specs(**lengths)
    source = QuestionSource(questions, vocabulary)
    add_task(name, source, make_examples, specs, vocabulary.size)
