"""The two exceptions that are not bugs."""


class BadInputError(ValueError):
    """Bad input: one line with what was expected, what arrived and what to do.

    The command line prints the message and exits with code 2. Everything else that
    escapes is a bug and keeps its traceback.
    """


class StoppedError(Exception):
    """The process was asked to stop in the middle of something that starts anew.

    Whatever was finished before is kept; running the same command again goes on.
    """
