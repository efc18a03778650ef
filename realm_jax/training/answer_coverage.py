"""Says how many questions can be learned from, before fine-tuning begins.

A question teaches nothing without an answer in the blocks that are retrieved for it
(ORQA, section 5).
"""

import logging
from typing import Any

import numpy as np

from realm_jax import multihost
from realm_jax.answering.search import search_questions
from realm_jax.data.examples import Batched
from realm_jax.errors import BadInputError
from realm_jax.index.answer_labels import AnswerLabels
from realm_jax.index.searchers import Searcher
from realm_jax.training.stage import StageParts
from realm_jax.types import QuestionBatch

_MOST_QUESTIONS = 256

_log = logging.getLogger(__name__)


def require_answers(
    stage: StageParts[Any],
    searcher: Searcher,
    examples: Batched,
    labels: AnswerLabels,
    num_retrieved: int,
    batch_size: int,
) -> None:
    """Logs the share of questions with an answer in their retrieved blocks.

    Up to 256 questions are looked at, evenly spread; a collective call. If none has an
    answer, it is a `BadInputError`.
    """
    count = min(len(examples), _MOST_QUESTIONS)
    rows = np.linspace(0, len(examples) - 1, count).astype(int)
    questions = QuestionBatch(**examples.batch(rows))
    found = search_questions(
        stage.retriever_config,
        stage.state.params["retriever"],
        searcher,
        np.asarray(questions.question_ids),
        num_retrieved,
        batch_size=batch_size,
    )
    answered = multihost.run_on_primary(
        lambda: int(labels.blocks(questions, found.ids).any(axis=-1).sum())
    )
    if not answered:
        raise BadInputError(
            f"expected an answer in the {num_retrieved:,} blocks that are retrieved "
            f"for a question, got none for {count:,} of {len(examples):,} questions; "
            "nothing can be learned; check that the answers are spelled as in "
            "the text, that their articles are in CORPUS, and that they have at most "
            "ten wordpieces"
        )
    if multihost.is_first():
        _log.info(
            "%.1f%% of %s questions%s have an answer in the %s blocks retrieved for "
            "them; the others teach nothing",
            100 * answered / count,
            f"{count:,}",
            f", of {len(examples):,}," if count < len(examples) else "",
            f"{num_retrieved:,}",
        )
