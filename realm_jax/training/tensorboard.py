"""Writes metrics for TensorBoard: `tensorboard --logdir MODEL_DIR`.

`metrics.jsonl` remains the record; these files show it during a run. They are written
without TensorFlow, which a trainer does not import.
"""

import io
import logging
import os
import pathlib
import socket
import time
from collections.abc import Mapping
from typing import Any

from realm_jax.storage import open_store

_FOLDER = "tensorboard"


class EventFile:
    """The scalars of one stage, from one process, in MODEL_DIR/tensorboard/STAGE.

    After `first_step` updates later steps of a lost run are run again; TensorBoard then
    drops the old ones.
    """

    def __init__(self, model_dir: str, stage: str, first_step: int):
        self._store = open_store(model_dir)
        began = f"{time.time():.6f}".replace(".", "")
        who = f"{socket.gethostname()}.{os.getpid()}"
        self._name = f"{_FOLDER}/{stage}/events.out.tfevents.{began}.{who}"
        self._events = io.BytesIO()
        self._appended = 0
        self._writer = None
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            logging.info("no files for TensorBoard: %s", error)
            return
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer = RecordWriter(self._events)
        start = event_pb2.SessionLog.START
        self._add(file_version="brain.Event:2")
        self._add(step=first_step + 1, session_log={"status": start})

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Adds the values of a step."""
        if self._writer is None:
            return
        scalars = [{"tag": k, "simple_value": float(v)} for k, v in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))
        url = self._store.url(self._name)
        if url.startswith("gs://"):
            # Objects cannot grow; TensorBoard continues in the new one at its offset.
            self._store.write(self._name, self._events.getvalue())
            return
        path = pathlib.Path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        new = self._events.getvalue()[self._appended :]
        self._appended += len(new)
        # TensorBoard keeps the file open, so it is appended to instead of replaced.
        with path.open("ab") as file:
            file.write(new)

    def _add(self, **event: Any) -> None:
        made = self._event(wall_time=time.time(), **event)
        self._writer.write(made.SerializeToString())
