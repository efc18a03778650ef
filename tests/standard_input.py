"""Standard input of this process, for commands that read questions from it."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def standard_input(descriptor: int) -> Iterator[None]:
    """Lets the process read from another file descriptor, which stays open."""
    kept = os.dup(0)
    os.dup2(descriptor, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)
