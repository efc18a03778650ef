"""Reads and writes `metrics.jsonl`, the metrics of a run, one JSON object per line.

The file is in the model directory. Its fields:

of every stage
  `step`, `stage`, `loss`, and other metrics of its loss (`pretrain_loss.py`)
  `gradient_norm`            of the gradient of all parameters, before clipping
  `gradient_norm_retriever`, `gradient_norm_reader`
                             the same of each model; the sum of their squares is the
                             square of `gradient_norm`
  `update_norm`, `update_norm_retriever`, `update_norm_reader`
                             of what is added to the parameters
  `learning_rate`            of the last update; the retriever's is this times
                             RETRIEVER_RATE
  `skipped_updates`          share of updates without effect because they were not
                             finite, where that is allowed (`finite.py`); the other
                             means are over the rest
  `retrieval_utility`        nats, of pre-training
  `share_of_batch`           share of the candidates of x in p(z|x) over the batch,
                             where p(z|x) is normalised over the batch
                             (`objectives/retrieval.py`)
  `reader_loss_own`, `reader_loss_null`, `reader_loss_retrieved`
                             nats per wordpiece, of a warm start: by the kind of
                             document that a sentence is read with
                             (`reader_documents.py`)
  `answer_retrieved`         of a warm start: of the sentences read with retrieved
                             documents, the share whose document contains the answer
  `padding_share`            share of padding among the positions that the models
                             compute: queries, documents and joined inputs
  `packed`                   with PACK_DOCUMENTS, the share of updates whose documents
                             fit packed rows (`packed_updates.py`)

speed, since the line before
  `steps_per_second`, `examples_per_second` (of a warm start: pairs,
                             or sentences where the reader alone is trained)
  `model_tflops_per_second`  of the whole job: operations that the updates need
                             (`flops.py`)
  `model_flops_utilization`  the same as a share of the peak of all devices in
                             bfloat16, where that is known (`hardware.py`)
  `search_seconds`, `device_seconds`, `host_seconds`, `checkpoint_seconds`,
  `swap_seconds`             wall time per update, by what the training thread did or
                             waited for (`step_timing.py`); their sum is 1 /
                             `steps_per_second`

of fine-tuning, only on lines after a measurement
  `dev_exact_match`          of the held-out questions (`dev_exact_match.py`)
  `dev_seconds`              time for which training was suspended

of the index
  `index_step`               the encoder step of the index in use
  `index_age_steps`, `index_age_seconds`
  `builder_step`, `builder_share`
                             while the index builder embeds

of the index, only on lines after a new index
  `recall_at_5`              of the held-out questions
  `held_out_utility` (nats), `held_out_likelihood` p(y|x), `held_out_null_likelihood`
  p(y|null,x), `held_out_accuracy`, `held_out_null_accuracy`, `held_out_null_retrieval`
  p(null|x), `held_out_retrieval_entropy` (nats)
                             means over masked sentences of the validation split
                             (`masked_spans.py`); also on the last line of a run
  `index_drift`, `retrieval_kl` (nats), `same_neighbours`, `kept_neighbours`
                             of the index that was replaced (`index_metrics.py`)
  `index_search_seconds`     time of one search for the probe's queries
  `index_swap_seconds`, `index_measuring_seconds`, `held_out_seconds`
                             time for which training was suspended
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from realm_jax.manifests import parse_json, require_fields
from realm_jax.storage import MissingObjectError, open_store

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Adds lines to `metrics.jsonl`, and drops those of steps that are repeated.

    The file is rewritten with every line, because an object in a bucket cannot be
    appended to; it has one line every `log_period` steps, so it stays small.
    """

    def __init__(self, model_dir: str, stage: str, first_step: int):
        """Reads the existing lines.

        The run resumes from `first_step`. Lines of this stage after it are dropped,
        because those steps are repeated.
        """
        self._store = open_store(model_dir)
        self._stage = stage
        self._lines = [
            json.dumps(line)
            for line in read_metrics(model_dir)
            if line["stage"] != stage or line["step"] <= first_step
        ]

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Adds one line for `step` (the number of updates done)."""
        line = {"step": step, "stage": self._stage, **values}
        self._lines.append(json.dumps(line))
        self._store.write(FILE_NAME, ("\n".join(self._lines) + "\n").encode())


def read_metrics(model_dir: str) -> Iterator[dict[str, Any]]:
    """Yields the lines of a run's metrics; a damaged line is a gap.

    Every line has an integer `step` and a string `stage`. Any other value may be
    missing where the line was damaged.
    """
    try:
        data = open_store(model_dir).read(FILE_NAME)
    except MissingObjectError:
        return
    for text in data.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            line = parse_json(text)
            require_fields(line, {"step": int, "stage": str})
            if not any(isinstance(value, dict | list) for value in line.values()):
                yield line
