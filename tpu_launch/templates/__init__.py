"""Renders what engines read: a JobSet, or the startup script of a TPU VM."""

import functools
import json
import re
import shlex
from typing import Any

import jinja2


def render(template: str, **values: Any) -> str:
    """Returns a template of this folder, filled in."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__, ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "json": functools.partial(json.dumps, ensure_ascii=False),
        "literal": _literal,
        "quote": shlex.quote,
        "quoted": shlex.join,
    }
    return environment


def _literal(text: str) -> str:
    """Returns what Kubernetes, which expands $(NAME) and halves $$, reads as `text`."""
    return re.sub(r"\$(?=[$(])", "$$", text)
