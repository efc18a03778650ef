"""Checks that a command can write where it is told to, before it imports anything.

A training stage imports for seconds and compiles for a minute before its first write,
and would find out only then.
"""

import ast
import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from realm_jax.errors import BadInputError

_MACRO = "--gin.MODEL_DIR="
_OPTION = "--output"


def require_writable(argv: Sequence[str]) -> None:
    """Checks the MODEL_DIR or --output that a command line names, if it does."""
    if "-h" in argv or "--help" in argv:
        return
    for name, folder in _named(argv):
        if name == _OPTION and not folder:
            raise BadInputError(
                f"expected a folder as {_OPTION}, got an empty text, which would be "
                "the working directory; name one"
            )
        require_writable_folder(name, folder)


def require_writable_folder(name: str, folder: str) -> None:
    """Checks that files can be made in a local folder, which need not exist yet.

    `name` is that of the setting, for the message.
    """
    if not folder or "://" in folder:
        return
    path = Path(folder).expanduser().absolute()
    existing = next(p for p in (path, *path.parents) if os.path.lexists(p))
    try:
        # What permissions say is not enough: a file system can be read-only or full.
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        reason = "it is a file" if existing.is_file() else error.strerror
        raise BadInputError(
            f"expected a folder that can be written as {name}, got {folder} "
            f"({existing}: {reason}); choose another one"
        ) from error


def _named(argv: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        if word.startswith(_MACRO):
            value = word.removeprefix(_MACRO).strip()
            # A text without quotes is told of, or accepted, when gin reads it.
            with contextlib.suppress(ValueError, SyntaxError):
                value = ast.literal_eval(value)
            if isinstance(value, str) and not value.startswith(("%", "@")):
                found.append(("MODEL_DIR", value))
        elif word.startswith(f"{_OPTION}="):
            found.append((_OPTION, word.partition("=")[2]))
        elif word == _OPTION:
            found.append((_OPTION, following))
    return found
