"""Bad input is refused in one line."""

import contextlib
import re
from collections.abc import Iterator

import pytest

from realm_jax.errors import BadInputError


@contextlib.contextmanager
def refused(message: str) -> Iterator[None]:
    """Expects a `BadInputError` of one line that matches; names what it misses."""
    try:
        yield
    except BadInputError as error:
        said = str(error)
        assert re.search(message, said), f"expected {message!r}, got {said!r}"
        assert "\n" not in said, said
    else:
        pytest.fail(f"expected a BadInputError that says {message!r}, got none")
