"""`metrics.jsonl`: what a run measured of itself, one JSON object a line.

It lies in the model directory. Words used there:

of every stage
  `step`, `stage`, `loss`, and what else its loss measures (`losses.py`)
  `gradient_norm`            of the gradient of all parameters, before it is clipped
  `gradient_norm_retriever`, `gradient_norm_reader`
                             the same of each model; the sum of their squares is the
                             square of `gradient_norm`
  `retrieval_utility`        nats, of pre-training
  `share_of_batch`           of p(z|x) over the batch, what the candidates of x have,
                             where p(z|x) is normalised over the batch
                             (`objectives/retrieval.py`)
  `reader_loss_own`, `reader_loss_null`, `reader_loss_retrieved`
                             nats a wordpiece, of a warm start: by the kind of document
                             that a sentence is read with (`reader_documents.py`)
  `answer_retrieved`         of a warm start: the share of the sentences read with
                             retrieved documents whose document holds the answer
  `padding_share`            of the positions that the models compute: queries,
                             documents and joined inputs

speed, since the line before
  `steps_per_second`, `examples_per_second` (of a warm start: pairs,
                             or sentences where the reader alone is trained)
  `model_tflops_per_second`  of the whole job: what the updates need (`flops.py`)
  `model_flops_utilization`  the same as a share of what all devices can do in
                             bfloat16, where that is known (`chips.py`)
  `search_seconds`, `device_seconds`, `host_seconds`, `checkpoint_seconds`,
  `swap_seconds`             wall time per update, by what the thread that trains did or
                             waited for (`step_timing.py`); their sum is 1 /
                             `steps_per_second`

of the index
  `index_step`               the encoder step of the index in use
  `index_age_steps`, `index_age_seconds`
  `builder_step`, `builder_share`
                             while the index builder embeds

of the index, only on lines after a new one
  `recall_at_5`              of the held-out questions
  `held_out_utility` (nats), `held_out_likelihood` p(y|x), `held_out_null_likelihood`
  p(y|null,x), `held_out_accuracy`, `held_out_null_accuracy`, `held_out_null_retrieval`
  p(null|x), `held_out_retrieval_entropy` (nats)
                             means over masked sentences of the validation split
                             (`masked_spans.py`); also on the last line of a run
  `index_drift`, `retrieval_kl` (nats), `same_neighbours`, `kept_neighbours`
                             of the index that was replaced (`index_drift.py`)
  `index_search_seconds`     to search it for the probe's queries, once
  `index_swap_seconds`, `index_measuring_seconds`, `held_out_seconds`
                             for which training stood, once
"""

import json
from collections.abc import Iterator, Mapping

from realm_jax.storage import MissingObjectError, open_store

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Adds lines to `metrics.jsonl`, cutting off what a lost run had written.

    The file is written anew with every line, for an object of a bucket cannot be
    appended to; it holds one line every `log_period` steps, so it stays small.
    """

    def __init__(self, model_dir: str, stage: str, first_step: int):
        """Reads what is there.

        Args:
          model_dir: folder or gs:// of the run.
          stage: written into every line.
          first_step: lines of this stage after this step come from a run whose later
            steps are now taken again; they are dropped.
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


def read_metrics(model_dir: str) -> Iterator[dict]:
    """Yields the lines of a run's metrics, passing over what is no JSON."""
    try:
        data = open_store(model_dir).read(FILE_NAME)
    except MissingObjectError:
        return
    for line in data.decode(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue
