"""Measures again whenever there is something newer: a corpus version, a checkpoint."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

from realm_jax.data.blocks import read_info
from realm_jax.data.versions import newest_version
from realm_jax.errors import StoppedError
from realm_jax.evaluation.report_data import ReportData
from realm_jax.evaluation.run import EvaluateConfig, Report, run
from realm_jax.storage import open_store
from realm_jax.training.checkpoint_manifests import read_details

State = tuple[str, tuple[int, ...]]
"""Fingerprint of a corpus, and the step that each stage ended with."""


def follow(
    config: EvaluateConfig,
    report: Report,
    stop: threading.Event,
    poll_seconds: float = 2.0,
) -> Iterator[ReportData]:
    """Measures, and once more for each newer version, until `stop` is set.

    Newer is a later version of the corpus (`data/versions.py`), whose indexes are made,
    and a later checkpoint that a stage has ended with. Masked sentences are those of
    the first version of the corpus; for later ones they are left out.

    Args:
      config: what to measure; `corpus` is the oldest version.
      report: told of progress.
      stop: ends it; what was written last stays.
      poll_seconds: pause between two looks.

    Yields:
      What was measured; the report is written.

    Raises:
      BadInputError: as `run`.
    """
    measured: State | None = None
    while not stop.is_set():
        newest = newest_version(config.corpus)
        state = _state(config, newest)
        if measured is None or state not in (measured, None):
            try:
                data = run(_of_version(config, newest), report, stop)
            except StoppedError:
                return
            measured = state
            yield data
        stop.wait(poll_seconds)


def _of_version(config: EvaluateConfig, newest: Path) -> EvaluateConfig:
    if newest.resolve() == Path(config.corpus).resolve():
        return config
    return dataclasses.replace(
        config, corpus=str(newest), allow_corpus_mismatch=True, masked_task=""
    )


def _state(config: EvaluateConfig, newest: Path) -> State | None:
    """What would be measured now; None while a stage trains on."""
    steps = []
    for model_dir in config.measured_dirs:
        found = read_details(open_store(model_dir))
        if found is None or found[0] < found[1].get("train_steps", 0):
            return None
        steps.append(found[0])
    return read_info(newest)["fingerprint"], tuple(steps)
