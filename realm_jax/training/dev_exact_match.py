"""Measures exact match on held-out questions while fine-tuning, to choose a checkpoint.

The authors' code also exports the checkpoint that is best on dev, but compares spans of
wordpieces. Here it is the exact match of the text, as `realm evaluate` reports it.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from realm_jax import multihost
from realm_jax.answering.answers import Answer
from realm_jax.answering.reader import Answerer
from realm_jax.data.questions import (
    Question,
    questions_fingerprint,
    read_questions,
)
from realm_jax.errors import BadInputError
from realm_jax.metrics.answers import is_right
from realm_jax.training.checkpoint_manifests import (
    DEV_EXACT_MATCH,
    ENDED_EARLY,
    add_detail,
    all_details,
)
from realm_jax.training.checkpoints import KeptCheckpoints
from realm_jax.training.stage import CheckpointDetails, Stage
from realm_jax.training.step_timing import Part

_TRAINED_ON = "train"
"""The split that `realm finetune` trains on."""

_MEASURED_ON = "dev_questions"
"""In a checkpoint's details: fingerprint of the questions that it was measured on."""

_HIGHEST = "highest_dev_exact_match"
"""In a checkpoint's details: the highest exact match so far."""

_WITHOUT_BETTER = "evaluations_without_better"
"""In a checkpoint's details: measurements since that one."""

_log = logging.getLogger(__name__)


def is_correct(answer: Answer, question: Question) -> bool:
    """Returns whether an answer is right by the rule of its question; "" never is."""
    return bool(answer.text) and is_right(
        answer.text, question.answers, question.answers_are_patterns
    )


def read_dev_questions(
    path: str, split: str, max_questions: int | None
) -> list[Question]:
    """Reads questions to choose a checkpoint by, evenly spread over the file."""
    if not path:
        return []
    if split == _TRAINED_ON:
        raise BadInputError(
            f"expected a split of {path} that fine-tuning does not train on, got "
            f"{split!r}; a checkpoint chosen by it is the one that knows it by heart"
        )
    questions = read_questions(path, split)
    count = min(len(questions), max_questions or len(questions))
    rows = np.linspace(0, len(questions) - 1, count).astype(int)
    return [questions[row] for row in rows]


class DevExactMatch:
    """Answers the same questions every `period` updates, and after the last.

    `measure` belongs before the line of metrics, `save_if_best` after it. None of the
    questions is trained on; without any nothing is measured, and no checkpoint is the
    best. After `patience` measurements without a higher exact match than before the run
    has ended; None for no such end. `kept` are the checkpoints that remain.
    """

    def __init__(
        self,
        stage: Stage[Any],
        questions: list[Question],
        period: int,
        patience: int | None = None,
    ):
        self._stage = stage
        self._questions = questions
        self._period = period
        self._fingerprint = questions_fingerprint(questions)
        self._require_same_questions()
        self.kept = KeptCheckpoints(stage.model_store)
        self._measured: dict[str, float] = {}
        self._is_best = False
        self._patience = patience
        found = stage.details or {}
        self._highest: float | None = found.get(_HIGHEST)
        self._without_better: int = found.get(_WITHOUT_BETTER, 0)
        self._is_missing = bool(found) and DEV_EXACT_MATCH not in found

    @property
    def is_due(self) -> bool:
        """True if a measurement has no line of metrics yet."""
        return bool(self._measured)

    @property
    def is_time(self) -> bool:
        """True if the state of the stage is to be measured."""
        is_time = self._stage.step % self._period == 0 or self._stage.is_done
        return bool(self._questions) and is_time

    @property
    def is_missing(self) -> bool:
        """True if the restored state was to be measured, and was not."""
        return self._is_missing and self.is_time

    @property
    def has_ended(self) -> bool:
        """True if training is to end early: exact match has long not been higher."""
        return self._patience is not None and self._without_better >= self._patience

    def measure(self, answerer: Answerer) -> None:
        """Measures the state of the stage, whose model the answerer has."""
        self._is_missing = False
        stage, began = self._stage, time.perf_counter()
        stage.require_finite(stage.state.params)
        with stage.stopwatch.part(Part.SWAP):
            value = float(self.exact_match(answerer).mean())
        self._is_best = self.kept.note_score(stage.step, DEV_EXACT_MATCH, value)
        is_higher = self._highest is None or value > self._highest
        self._highest = value if is_higher else self._highest
        self._without_better = 0 if is_higher else self._without_better + 1
        self._measured = {
            DEV_EXACT_MATCH: value,
            "dev_seconds": time.perf_counter() - began,
        }
        if multihost.is_first():
            _log.info(
                "step %d: exact match %.1f%% on %d held-out questions%s",
                stage.step,
                100 * value,
                len(self._questions),
                ", the best" if self._is_best else "",
            )
            if self.has_ended:
                _log.info(
                    "step %d: the last of %d measurements without a better one; "
                    "training ends here",
                    stage.step,
                    self._without_better,
                )

    def exact_match(self, answerer: Answerer) -> Float[np.ndarray, " question"]:
        """Returns 1.0 for each question that is answered correctly, else 0.0."""
        answers = answerer.answer([question.question for question in self._questions])
        pairs = zip(answers, self._questions, strict=True)
        return np.array([is_correct(*pair) for pair in pairs], np.float64)

    def take(self) -> Mapping[str, float]:
        """Returns what was measured since the last line of metrics."""
        measured, self._measured = self._measured, {}
        return measured

    def save_if_best(self, more_details: CheckpointDetails) -> None:
        """Saves a checkpoint of a state that was just found to be the best."""
        if self._is_best:
            self._is_best = False
            self._stage.save(more_details)

    def details(self, details: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the details of a checkpoint, with its score if it was measured."""
        if self._questions:
            details = {**details, _MEASURED_ON: self._fingerprint}
        if self._highest is not None:
            details = {
                **details,
                _HIGHEST: self._highest,
                _WITHOUT_BETTER: self._without_better,
                ENDED_EARLY: self.has_ended,
            }
        return self.kept.add(self._stage.step, details)

    def note(self) -> None:
        """Adds what is known of the restored state to the details of its checkpoint."""
        stage, found = self._stage, self.details({})
        self._is_best = False  # As a checkpoint it exists already.

        def add() -> None:
            for name, value in found.items():
                add_detail(stage.model_store, stage.step, name, value)

        multihost.run_on_primary(add)

    def _require_same_questions(self) -> None:
        store = self._stage.model_store
        details = multihost.run_on_primary(lambda: all_details(store)).values()
        others = {
            found.get(_MEASURED_ON) for found in details if DEV_EXACT_MATCH in found
        } - {self._fingerprint}
        if self._questions and others:
            raise BadInputError(
                f"expected the held-out questions by which {store.url()} chose its "
                f"checkpoint so far, got {len(self._questions)} others, whose scores "
                "do not compare; give those, or use another MODEL_DIR"
            )
