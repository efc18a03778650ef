"""Repeats an evaluation for every newer corpus version or checkpoint."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

from realm_jax import multihost
from realm_jax.data.blocks import read_info
from realm_jax.data.versions import newest_version
from realm_jax.errors import StoppedError
from realm_jax.evaluation.report_data import ReportData
from realm_jax.evaluation.run import EvaluateConfig, Report, run
from realm_jax.training.recorded import open_run

State = tuple[str, tuple[int, ...]]
"""Fingerprint of a corpus, and the last step of each stage."""


def follow(
    config: EvaluateConfig,
    report: Report,
    stop: threading.Event,
    poll_seconds: float = 2.0,
) -> Iterator[ReportData]:
    """Evaluates, and again for each newer version, until `stop` is set.

    Newer versions are a later version of the corpus (`data/versions.py`), for which
    indexes are made, and a later checkpoint of a finished stage. Masked sentences are
    those of the first version of the corpus; for later ones they are left out. Yields
    the results, after the report is written.
    """
    measured: State | None = None
    asked_to_stop = multihost.StopRequest(stop)
    while not asked_to_stop.is_set():
        newest, state = multihost.run_on_primary(lambda: _newest(config))
        if measured is None or state not in (measured, None):
            try:
                data = run(_of_version(config, newest), report, stop)
            except StoppedError:
                return
            measured = state
            yield data
        stop.wait(poll_seconds)


def _of_version(config: EvaluateConfig, newest: str) -> EvaluateConfig:
    if Path(newest).resolve() == Path(config.corpus).resolve():
        return config
    return dataclasses.replace(
        config, corpus=newest, allow_corpus_mismatch=True, masked_task=""
    )


def _newest(config: EvaluateConfig) -> tuple[str, State | None]:
    """Returns the newest corpus, and what would be evaluated (None in training)."""
    newest, steps = newest_version(config.corpus), []
    for model_dir in config.measured_dirs:
        found = open_run(model_dir)
        if found is None or not found.has_ended:
            return str(newest), None
        steps.append(found.step)
    return str(newest), (read_info(newest)["fingerprint"], tuple(steps))
