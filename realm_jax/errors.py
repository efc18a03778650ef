"""The package's exceptions and exit codes, and detection of full disks."""

import contextlib
import errno
import os
from collections.abc import Iterator

BUG, BAD_INPUT, NOT_READY = 1, 2, os.EX_TEMPFAIL
"""Exit codes: after 1 and 75 the same command may be started again, after 2 not."""

# A file-size limit or a quota interrupts a write as a full disk does.
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BadInputError(ValueError):
    """Raised for bad input; one line: what was expected, what arrived, what to do.

    The command line prints the message and exits with code 2. Any exception but those
    of this module is a bug and keeps its traceback.
    """


class NotReadyError(Exception):
    """Raised when what another job makes has not come in time; one line.

    Nothing is wrong with the input, and the same command may succeed later, so the
    command line exits with a code of its own, after which a supervisor starts it again.
    """


class StoppedError(Exception):
    """Raised when the process is asked to stop during work that would be repeated.

    Work that was finished before is kept; running the same command again resumes.
    """


def is_out_of_space(error: BaseException) -> bool:
    """Returns whether an error, of the system or of a library, means a full disk."""
    # TensorStore, Orbax and ArrayRecord have their own exceptions, with these texts.
    return getattr(error, "errno", None) in _OUT_OF_SPACE or any(
        os.strerror(number) in str(error) for number in _OUT_OF_SPACE
    )


def out_of_space_error(what: str) -> BadInputError:
    """Returns the error for a write that found no space."""
    return BadInputError(
        f"expected room for {what}, but the disk is full, or its quota or a file-size "
        "limit is reached; free some space and run the same command again."
    )


@contextlib.contextmanager
def full_disk_is_bad_input(what: str) -> Iterator[None]:
    """Raises `out_of_space_error(what)` in place of an error that means a full disk."""
    try:
        yield
    except Exception as error:
        if is_out_of_space(error):
            raise out_of_space_error(what) from error
        raise
