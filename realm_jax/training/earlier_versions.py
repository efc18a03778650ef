"""Reads what version 0.1 and the first commits of 0.2 recorded of a run.

They described it in the details of its checkpoints. To be deleted with version 0.3.
"""

from collections.abc import Mapping
from typing import Any

from realm_jax.data.batch_order import Spans
from realm_jax.run_record import RunRecord, Trained
from realm_jax.stages import FINETUNE

# The settings that a resumed run keeps: of every stage, and of training on sentences or
# on questions with the values that they had where they were not recorded.
_DATA_ORDER = (
    "task",
    "batch_size",
    "seed",
    "pairs_task",
    "reader_batch_size",
    "mixture",
    "marginalization",
    "max_span",
    "span_layer_norm_epsilon",
)
_OF_SENTENCES = {
    "spans": Spans.ALL.value,
    "span_scorer": False,
    "score_unmasked": False,
}
_OF_QUESTIONS = {"refreshes_index": None, "more_tasks": None}


def trained_by_earlier_version(
    details: Mapping[str, Any], record: RunRecord | None
) -> Trained | None:
    """Returns what a run has trained; None if its newest checkpoint does not say."""
    if "model" not in details:
        return None
    order = {name: details[name] for name in _DATA_ORDER if name in details}
    of_stage = _OF_QUESTIONS if details.get("stage") == FINETUNE.name else _OF_SENTENCES
    order |= {name: details.get(name, of) for name, of in of_stage.items()}
    answering = dict(details.get("answering", {}))
    started_with = "" if record is None else record.settings.get("corpus", "")
    return Trained(
        stage=details.get("stage", ""),
        model=details["model"],
        lengths=details.get("lengths", {}),
        corpus_fingerprint=details.get("corpus_fingerprint", ""),
        vocabulary_fingerprint=details.get("vocabulary_fingerprint", ""),
        data_order=order,
        # Fine-tuning alone recorded it in its checkpoints.
        corpus=answering.get("corpus", started_with),
        questions=details.get("questions", ""),
        source=answering.get("pretrained", ""),
        source_checkpoint=answering.get("pretrained_checkpoint", "last"),
        numerics={
            name: answering[name] for name in ("dtype", "products") if name in answering
        },
        searcher=answering.get("searcher", ""),
        num_read=answering.get("num_read"),
    )
