"""Registers a file of questions with SeqIO.

    tasks.questions.register_questions("vital_questions", VITAL_QUESTIONS, vocabulary)

Importing this module imports TensorFlow.
"""

import os
from pathlib import Path

import numpy as np
import seqio
import tensorflow as tf

from realm_jax.data.features import Example
from realm_jax.data.questions import (
    MAX_ANSWER_LENGTH,
    MAX_ANSWERS,
    QUERY_LENGTH,
    Question,
    question_examples,
    question_specs,
    read_questions,
)
from realm_jax.data.wordpiece import WordPiece
from tasks.corpora import add_task

VITAL_QUESTIONS = Path(__file__).parent / "data" / "vital_questions.jsonl"
"""Questions on Wikipedia's vital articles, for the corpus of the quickstart."""


class QuestionSource(seqio.FunctionDataSource):
    """Rows of the questions of a split, as int32 scalars.

    Attributes:
      provenance: fingerprint of the vocabulary.
    """

    def __init__(self, questions: list[Question], vocabulary: WordPiece):
        """Describes questions, as `read_questions` returns them."""
        rows: dict[str, list[int]] = {}
        for row, question in enumerate(questions):
            rows.setdefault(question.split, []).append(row)
        self.provenance = {"vocabulary_fingerprint": vocabulary.fingerprint}

        def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None):
            del shuffle_files, seed  # One shard: the task's own shuffling is enough.
            ids = np.array(rows[split], np.int32)
            return tf.data.Dataset.from_tensor_slices(ids)

        counts = {split: len(ids) for split, ids in rows.items()}
        super().__init__(dataset_fn, splits=tuple(rows), num_input_examples=counts)


def register_questions(
    name: str,
    path: str | os.PathLike[str],
    vocabulary: WordPiece,
    *,
    query_length: int = QUERY_LENGTH,
    max_answers: int = MAX_ANSWERS,
    max_answer_length: int = MAX_ANSWER_LENGTH,
) -> str:
    """Registers the task `name`, with the splits that the questions name.

    Args:
      name: letters, digits and underscores.
      path: JSON lines, see `read_questions`.
      vocabulary: the tokenizer of the corpus they are asked of.
      query_length: wordpieces of a question, special pieces included.
      max_answers: answers kept of each question.
      max_answer_length: wordpieces of the longest answer the reader can find.

    Returns:
      The name.

    Raises:
      BadInputError: the file is missing or wrong, or the name is taken.
    """
    questions = read_questions(path)
    lengths = {
        "query_length": query_length,
        "max_answers": max_answers,
        "max_answer_length": max_answer_length,
    }

    def make_examples(rows: np.ndarray) -> Example:
        chosen = [questions[row] for row in rows]
        return question_examples(chosen, vocabulary, **lengths)

    specs = question_specs(**lengths)
    source = QuestionSource(questions, vocabulary)
    add_task(name, source, make_examples, specs, vocabulary.size)
    return name
