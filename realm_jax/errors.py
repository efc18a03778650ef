"""The exceptions that are not bugs, and a full disk, which is one of them."""

import contextlib
import errno
import os
from collections.abc import Iterator

# A file-size limit or a quota stops a write half-way just as a full disk does.
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BadInputError(ValueError):
    """Bad input: one line with what was expected, what arrived and what to do.

    The command line prints the message and exits with code 2. Everything else that
    escapes is a bug and keeps its traceback.
    """


class StoppedError(Exception):
    """The process was asked to stop in the middle of something that starts anew.

    Whatever was finished before is kept; running the same command again goes on.
    """


def is_out_of_space(error: BaseException) -> bool:
    """Returns whether an error, of the system or of a library, is a full disk."""
    # TensorStore, Orbax and ArrayRecord have errors of their own, with these words.
    return getattr(error, "errno", None) in _OUT_OF_SPACE or any(
        os.strerror(number) in str(error) for number in _OUT_OF_SPACE
    )


def out_of_space_error(what: str) -> BadInputError:
    """Returns the error for something that was to be written and found no room."""
    return BadInputError(
        f"expected room for {what}, but the disk is full, or its quota or a file-size "
        "limit is reached; free some space and run the same command again."
    )


@contextlib.contextmanager
def full_disk_is_bad_input(what: str) -> Iterator[None]:
    """Raises `out_of_space_error(what)` in place of an error that is a full disk."""
    try:
        yield
    except Exception as error:
        if is_out_of_space(error):
            raise out_of_space_error(what) from error
        raise
