"""Runs calls that cannot be interrupted, in a command that Ctrl-C ends at once."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from realm_jax.errors import StoppedError

_POLL_SECONDS = 0.2

Answer = TypeVar("Answer")


def unless_stopped(
    call: Callable[[], Answer], stop: threading.Event, message: str
) -> Answer:
    """Returns the result of a call, unless asked to stop before.

    Args:
      call: runs in its own thread, and continues there after a stop: a compiler, or a
        store that does not respond.
      stop: set when asked to stop.
      message: message of the error in that case.

    Raises:
      StoppedError: asked to stop.
    """
    future: Future[Answer] = Future()
    woken = threading.Event()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        woken.set()

    threading.Thread(target=run, daemon=True).start()
    while not woken.wait(_POLL_SECONDS):
        if stop.is_set():
            raise StoppedError(message)
    return future.result()
