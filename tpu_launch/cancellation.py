"""Runs calls that cannot be interrupted, in a command that Ctrl-C ends at once."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from realm_jax.errors import StoppedError

_POLL_SECONDS = 0.2

Answer = TypeVar("Answer")


def unless_stopped(
    call: Callable[[], Answer], stop: threading.Event, message: str
) -> Answer:
    """Returns the result of a call, unless asked to stop before.

    The call, of a compiler or of a store that does not respond, goes on in its own
    thread after a stop. The error then has the message.
    """
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not wait([future], _POLL_SECONDS).done:
        if stop.is_set():
            raise StoppedError(message)
    return future.result()
