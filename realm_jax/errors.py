"""The one exception that means "the input is wrong, not the program"."""


class BadInputError(ValueError):
    """Bad input: one line with what was expected, what arrived and what to do.

    The command line prints the message and exits with code 2. Everything else that
    escapes is a bug and keeps its traceback.
    """
