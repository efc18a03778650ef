"""Registers a set of questions with SeqIO: one call, two tasks.

    tasks.questions.register_questions("mine", "questions.jsonl", vocabulary)
    tasks.questions.register_questions("nq", "gs://mine/nq", vocabulary, "nq_open")

Importing this module imports TensorFlow.
"""

import seqio

from realm_jax.data.wordpiece import WordPiece
from realm_jax.prepare.open_qa.sets import JSON_LINES, Source, read_set
from realm_jax.prepare.seqio_tasks import register_question_task
from tasks.closed_book import register_closed_book


def register_questions(
    name: str,
    path: Source,
    vocabulary: WordPiece,
    kind: str = JSON_LINES,
    *,
    text_vocabulary: seqio.Vocabulary | None = None,
    prompt: str = "",
    **lengths: int,
) -> str:
    """Registers the tasks `name` and `<name>_closed_book`; returns the first name.

    The first is for the retrieving reader (`types.QuestionBatch`), the second for a
    T5 (`closed_book.register_closed_book`). They have the splits of the set.

    Args:
      name: letters, digits and underscores.
      path: location of the set: a folder or a file, local or gs://; `tfds:NAME`,
        optionally with `@FOLDER`; or the file of each split.
      vocabulary: the tokenizer of the corpus that is searched.
      kind: "json_lines" for `read_questions`, or a published set: "nq_open",
        "web_questions", "curated_trec", "trivia_qa", "entity_questions", "squad_open".
      text_vocabulary: vocabulary of the closed-book task; bytes by default.
      prompt: prefix of every closed-book question.
      **lengths: lengths of the first task, see
        `realm_jax.prepare.corpus_tasks.question_task`.
    """
    questions = read_set(kind, path)
    register_question_task(name, questions, vocabulary, **lengths)
    register_closed_book(
        f"{name}_closed_book", questions, text_vocabulary, prompt=prompt
    )
    return name
