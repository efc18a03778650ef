"""Declares the ranges of settings, checked where a configuration is made.

A configuration calls `require_ranges` in its `__post_init__`, with a range for each of
its numbers. So a value that cannot be meant is one line at the start of a command, and
not a traceback, or a wasted run, later on. Settings that are True or False are checked
there by their annotation.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

from realm_jax.errors import BadInputError


class Range(NamedTuple):
    """The values that a setting may have.

    Attributes:
      words: what it has to be, as it stands in the error message.
      contains: returns whether a value of any type is one of them.
      advice: what to do about another value, in place of the general advice.
    """

    words: str
    contains: Callable[[Any], bool]
    advice: str = ""

    def or_none(self) -> "Range":
        """Returns the same range with None, for a setting that may be left out."""
        return Range(
            f"{self.words}, or None",
            lambda value: value is None or self.contains(value),
            self.advice,
        )

    def each(self) -> "Range":
        """Returns the range of tuples, or lists, of such values."""
        return Range(
            f"a tuple, each of it {self.words}",
            lambda values: (
                isinstance(values, (tuple, list)) and all(map(self.contains, values))
            ),
            self.advice,
        )


def whole(least: int, most: int | None = None) -> Range:
    """Returns the range of the whole numbers from `least` to `most`, both included."""
    bounds = f"of at least {least}" if most is None else f"within {least}..{most}"

    def contains(value: Any) -> bool:
        is_whole = _is_number(value, numbers.Integral)
        return is_whole and least <= value and (most is None or value <= most)

    return Range(f"a whole number {bounds}", contains)


def _is_number(value: Any, kind: type) -> bool:
    # To Python, True is an int.
    return isinstance(value, kind) and not isinstance(value, bool)


def _finite(words: str, contains: Callable[[float], bool]) -> Range:
    def is_in(value: Any) -> bool:
        is_number = _is_number(value, numbers.Real)
        return is_number and math.isfinite(value) and contains(value)

    return Range(words, is_in)


POSITIVE = _finite("a finite number above 0", lambda value: value > 0)
NOT_NEGATIVE = _finite("a finite number of at least 0", lambda value: value >= 0)
SHARE = _finite("a share from 0 to 1", lambda value: 0 <= value <= 1)
SHARE_ABOVE_0 = _finite("a share above 0 and at most 1", lambda value: 0 < value <= 1)
SHARE_BELOW_1 = _finite(
    "a share of at least 0 and below 1", lambda value: 0 <= value < 1
)
SEED = whole(0, 2**63 - 1)
TEXT = Range(
    "a text that is not empty", lambda value: isinstance(value, str) and value != ""
)
PATH = TEXT._replace(words="a path that is not empty")
"""An empty path would be the working directory."""
LOCAL_FOLDER = Range(
    "a folder of this machine",
    lambda value: PATH.contains(value) and "://" not in value,
    "make it on a disk, and copy it to the bucket when it is complete",
)
"""A corpus is mapped into memory."""
TEXTS = Range(
    "a tuple of texts, none of them empty",
    lambda value: isinstance(value, (tuple, list)) and all(map(TEXT.contains, value)),
)
"""In gin, ("a") is a text, and ("a",) the tuple."""
BOOL = Range("True or False", lambda value: isinstance(value, bool))
"""To Python, the text "False" is true."""

_BY_ANNOTATION = ((bool, BOOL), (bool | None, BOOL.or_none()))


def require_ranges(config: Any, **ranges: Range) -> None:
    """Requires that a dataclass's settings are in range; a `bool` needs no range."""
    made_by = type(config)
    flags = {
        field.name: expected
        for field in dataclasses.fields(config)
        for annotation, expected in _BY_ANNOTATION
        if field.type == annotation
    }
    for field, expected in (flags | ranges).items():
        value = getattr(config, field)
        if not expected.contains(value):
            module = made_by.__module__.rpartition(".")[2]
            name = f"{made_by.__qualname__}.{field}"
            advice = expected.advice or (
                f"correct {module}.{name}, or the macro that it reads"
            )
            raise BadInputError(
                f"expected {name} to be {expected.words}, got {value!r}; {advice}"
            )
