"""Makes the configuration of an evaluation from what a chain of stages has recorded."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from realm_jax.errors import BadInputError
from realm_jax.evaluation.loading import differences, recorded_config
from realm_jax.evaluation.recorded import (
    Overrides,
    find_corpus,
    find_model,
    find_pretrained,
    parent,
    within,
)
from realm_jax.evaluation.run import EvaluateConfig
from realm_jax.stages import EVALUATE, FINETUNE, PRETRAIN, WARM_START
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import QUESTIONS, read_details
from realm_jax.training.initialization import described_models
from realm_jax.types import Lengths

# What stages must have in common to be measured together.
_SHARED = ("model", "lengths", "corpus_fingerprint", "vocabulary_fingerprint")


def evaluate_config(
    run: str,
    given: Overrides,
    *,
    questions: str = "",
    output: str = "",
    split: str = "test",
    note: Callable[[str], None] = lambda text: None,
) -> EvaluateConfig:
    """Returns the configuration of `realm evaluate` for a run; reads no arrays.

    Of the folder of a chain every finished stage is measured; of the model directory of
    fine-tuning that model alone.

    Args:
      run: as in `recorded.find_model`.
      given: what is not to be found.
      questions: JSON lines of questions; "" for those that the run recorded.
      output: folder of the report; "" for RUN/evaluate.
      split: split of the questions.
      note: called with a sentence on each stage that is left out.

    Raises:
      BadInputError: as `recorded.ask_config`, or no questions are recorded.
    """
    model_dir = find_model(run)
    corpus, differs = find_corpus(
        model_dir, given.corpus, allow_mismatch=given.allow_corpus_mismatch
    )
    finetuned = recorded_config(
        model_dir, corpus=corpus, num_read=given.num_read, searcher=given.searcher
    )
    began, which = find_pretrained(model_dir, given.pretrained)
    is_chain = os.path.normpath(run) != os.path.normpath(model_dir)
    of_chain = _details(began, PRETRAIN.name) if is_chain and began else None
    details = of_chain or _details(model_dir, FINETUNE.name) or {}
    warm_started = within(run, WARM_START.name) if is_chain else ""
    if warm_started and not _is_alike(warm_started, details, note):
        warm_started = ""
    return EvaluateConfig(
        model_dir=output or within(run, EVALUATE.name),
        corpus=corpus,
        questions=questions or _recorded_questions(model_dir, began),
        finetuned=finetuned,
        models=described_models(details["model"], Lengths(**details["lengths"])),
        warm_started=warm_started,
        pretrained=began if of_chain or details["model"]["shared"] else "",
        pretrained_checkpoint=which,
        split=split,
        # Masked sentences are of the corpus that was trained on.
        masked_task=details["task"] if of_chain and not differs else "",
        searcher=finetuned.searcher,
        allow_corpus_mismatch=differs,
        title=Path(parent(model_dir)).name if is_chain else Path(model_dir).name,
    )


def _details(model_dir: str, stage: str) -> Mapping[str, Any] | None:
    """Returns the details of a finished run of a stage; None if there is none."""
    found = read_details(open_store(model_dir))
    if found is None or found[1].get("stage") != stage:
        return None
    return found[1] if found[0] >= found[1].get("train_steps", 0) else None


def _is_alike(
    model_dir: str, details: Mapping[str, Any], note: Callable[[str], None]
) -> bool:
    """Returns whether a warm start can be measured with the stages after it."""
    found = _details(model_dir, WARM_START.name)
    if found is None:
        return False
    for name in _SHARED:
        for setting, wanted, has in differences(name, details[name], found.get(name)):
            note(
                f"{model_dir} is left out: its {setting} is {has!r}, and {wanted!r} "
                "in the stages after it"
            )
            return False
    return True


def _recorded_questions(model_dir: str, pretrained: str) -> str:
    """Returns where the questions are that fine-tuning or pre-training held out.

    Raises:
      BadInputError: none were recorded, or they are not there any more.
    """
    recorded = [
        _details(model_dir, FINETUNE.name) or {},
        (pretrained and _details(pretrained, PRETRAIN.name)) or {},
    ]
    questions = next((d[QUESTIONS] for d in recorded if d.get(QUESTIONS)), "")
    if not questions:
        raise BadInputError(
            f"expected questions to evaluate {model_dir} with, but the runs it was "
            "made from record none; give --questions FILE, JSON lines of questions"
        )
    if "://" not in questions and not Path(questions).exists():
        raise BadInputError(
            f"expected the questions of {model_dir} in {questions}, found nothing "
            "there; give --questions FILE, JSON lines of questions"
        )
    return questions
