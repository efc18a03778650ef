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
        self._events = _make_events(first_step)

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Adds the values of a step."""
        if self._events is None:
            return
        new = self._events.add(step, values)
        url = self._store.url(self._name)
        if url.startswith("gs://"):
            # Objects cannot grow; TensorBoard continues in the new one at its offset.
            self._store.write(self._name, self._events.all())
            return
        path = pathlib.Path(url)
        path.parent.mkdir(parents=True, exist_ok=True)
        # TensorBoard keeps the file open, so it is appended to instead of replaced.
        with path.open("ab") as file:
            file.write(new)


class _Events:
    def __init__(self, first_step: int, protos: Any, record_writer: Any):
        self._protos = protos
        self._buffer = io.BytesIO()
        self._writer = record_writer(self._buffer)
        self._position = 0
        event = protos.event_pb2.Event
        start = protos.event_pb2.SessionLog.START
        self._add(event(file_version="brain.Event:2"))
        self._add(event(step=first_step + 1, session_log={"status": start}))

    def add(self, step: int, values: Mapping[str, float | int]) -> bytes:
        """Adds a step; returns the bytes since the last call."""
        scalars = [{"tag": k, "simple_value": float(v)} for k, v in values.items()]
        summary = self._protos.summary_pb2.Summary(value=scalars)
        self._add(self._protos.event_pb2.Event(step=step, summary=summary))
        before, self._position = self._position, self._buffer.tell()
        return self._buffer.getvalue()[before:]

    def all(self) -> bytes:
        return self._buffer.getvalue()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())


def _make_events(first_step: int) -> _Events | None:
    try:
        from tensorboard.compat import proto
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: F401
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        logging.info("no files for TensorBoard: %s", error)
        return None
    return _Events(first_step, proto, RecordWriter)
