"""Registers a set of questions with SeqIO: one call, two tasks.

    tasks.questions.register_questions("vital_questions", VITAL_QUESTIONS, vocabulary)
    tasks.questions.register_questions("nq", "gs://mine/nq", vocabulary, "nq_open")

Importing this module imports TensorFlow.
"""

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
    pattern_length,
    question_examples,
    question_specs,
    require_patterns_fit,
)
from realm_jax.data.wordpiece import WordPiece
from tasks.closed_book import register_closed_book
from tasks.corpora import add_task
from tasks.open_qa.sets import JSON_LINES, read_set
from tasks.open_qa.sources import Source

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
        self.vocabulary = vocabulary
        self.provenance = {"vocabulary_fingerprint": vocabulary.fingerprint}

        def dataset_fn(split: str, shuffle_files: bool, seed: int | None = None):
            del shuffle_files, seed  # One shard: the task's own shuffling is enough.
            ids = np.array(rows[split], np.int32)
            return tf.data.Dataset.from_tensor_slices(ids)

        counts = {split: len(ids) for split, ids in rows.items()}
        super().__init__(dataset_fn, splits=tuple(rows), num_input_examples=counts)


def register_questions(
    name: str,
    path: Source,
    vocabulary: WordPiece,
    kind: str = JSON_LINES,
    *,
    query_length: int = QUERY_LENGTH,
    max_answers: int = MAX_ANSWERS,
    max_answer_length: int = MAX_ANSWER_LENGTH,
    max_pattern_length: int | None = None,
    text_vocabulary: seqio.Vocabulary | None = None,
    prompt: str = "",
) -> str:
    """Registers the tasks `name` and `<name>_closed_book`.

    The first is for the retrieving reader (`types.QuestionBatch`), the second for a
    T5 (`closed_book.register_closed_book`). They have the splits of the set.

    Args:
      name: letters, digits and underscores.
      path: where the set is: a folder or a file, local or gs://; `tfds:NAME`,
        perhaps `@FOLDER`; or the file of each split.
      vocabulary: the tokenizer of the corpus they are asked of.
      kind: "json_lines" for `read_questions`, or a published set: "nq_open",
        "web_questions", "curated_trec", "trivia_qa", "entity_questions", "squad_open".
      query_length: wordpieces of a question, special pieces included.
      max_answers: answers kept of each question.
      max_answer_length: wordpieces of the longest answer the reader can find.
      max_pattern_length: characters of the longest answer that is a regular
        expression. By default as `pattern_length` says; sets that are to be mixed
        need the same.
      text_vocabulary: of the closed-book task; bytes by default.
      prompt: stands in front of every closed-book question.

    Returns:
      The name of the first task.

    Raises:
      BadInputError: the set is missing or wrong, a pattern is too long, or a name is
        taken.
    """
    questions = read_set(kind, path)
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
    register_closed_book(
        f"{name}_closed_book", questions, text_vocabulary, prompt=prompt
    )
    return name
