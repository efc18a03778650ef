"""Waits for the notice that the machine is about to be preempted.

A spot VM has 30 s from then on. The guest's agent does not pass the notice on: its unit
has KillMode=process, so that a startup script and its children get no signal.
"""

import threading
import time
from collections.abc import Mapping

from tpu_launch.worker.worker_identity import open_metadata

_PATH = "preempted?wait_for_change=true&timeout_sec=60"
_TIMEOUT_SECONDS = 90.0
_RETRY_SECONDS = 5.0


def watch(environment: Mapping[str, str], stop: threading.Event) -> None:
    """Sets an event once the metadata server says that the machine is preempted.

    Starts a thread, which waits as long as the process lives.

    Args:
      environment: environment of this process.
      stop: the event that asks the supervisor to have the command save and end.
    """

    def work() -> None:
        while not stop.is_set():
            try:
                with open_metadata(_PATH, environment, _TIMEOUT_SECONDS) as answer:
                    if answer.read().strip() == b"TRUE":
                        stop.set()
            except OSError:
                time.sleep(_RETRY_SECONDS)

    threading.Thread(target=work, daemon=True).start()
