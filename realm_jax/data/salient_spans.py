"""Salient spans: named entities and dates, the spans worth masking (paper, §3.4)."""

from typing import NamedTuple


class Span(NamedTuple):
    """Characters [start, end) of a text and what they name."""

    start: int
    end: int
    label: str
