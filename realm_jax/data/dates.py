"""A pattern for dates in English text, for masking them as salient spans.

It finds points and stretches of the calendar ("16 February 1981", "1980s", "5th century
BC"), not durations ("30 years") or relative dates ("last week"): no document could
tell what stands there.
"""

import re

_ERA = r"(?:BCE|CE|BC|AD|B\.C\.E\.|B\.C\.|C\.E\.|A\.D\.)(?!\w)"
_YEAR = r"(?:1\d{3}|20\d{2})"
_ANCIENT_YEAR = r"(?:\d{1,3}(?:,\d{3})?|\d{4})"
_DAY = r"(?:3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?"
_DAYS = rf"{_DAY}(?:\s?[-–]\s?{_DAY})?"
_MONTH = (
    r"(?:January|February|March|April|May|June|July|August|September|October|November"
    r"|December|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\b\.?)"
)
_COMMA = r"(?:\s?,)?\s"  # Some corpora come with a space before every comma.
_ORDINAL = (
    r"(?:\d{1,2}(?:st|nd|rd|th)|(?i:first|second|third|fourth|fifth|sixth|seventh"
    r"|eighth|ninth|tenth|eleventh|twelfth|thirteenth|fourteenth|fifteenth|sixteenth"
    r"|seventeenth|eighteenth|nineteenth|twentieth|twenty-first))"
)
_AGE = r"(?:century|centuries|millennium|millennia)\b"
# A bare number before one of these counts things; it is no year.
_COUNTED = (
    r"\s(?:years?|months?|days?|hours?|people|men|women|persons|inhabitants|members"
    r"|soldiers|troops|species|islands|languages|copies|votes|students|employees"
    r"|millions?|billions?|percent|per|km|kilomet\w+|m|met(?:re|er)s?|cm|mm|miles?|mi"
    r"|feet|foot|ft|acres?|hectares?|ha|square|cubic|tons?|tonnes?|kg|kilograms?"
    r"|pounds|degrees?|watts?|volts?|K)\b"
)
# Not inside a word, a longer number, a price or a code.
_START = r"(?<![\w.,$£€¥#/])(?<!\d[-–])"
_END = r"(?![\w%°/]|[.,]\d|[-–]\d)"

_DATE = re.compile(
    "|".join(
        [
            rf"{_START}{_DAYS}\s(?:of\s)?{_MONTH}{_COMMA}{_YEAR}{_END}",
            rf"\b{_MONTH}\s{_DAYS}{_COMMA}{_YEAR}{_END}",
            rf"\b{_MONTH}{_COMMA}(?:of\s)?{_YEAR}{_END}",
            rf"{_START}{_DAYS}\s(?:of\s)?{_MONTH}(?!\w)",
            rf"\b{_MONTH}\s{_DAYS}{_END}",
            rf"{_START}\d{{4}}-\d{{2}}-\d{{2}}{_END}",
            rf"\b(?:{_ORDINAL}\s?(?:-|–|to|and|or)\s?)?{_ORDINAL}[\s-]{_AGE}(?:\s{_ERA})?",
            rf"{_START}(?:1\d\d|20\d)0s\b",
            rf"\bAD\s{_ANCIENT_YEAR}{_END}",
            rf"{_START}(?:{_ANCIENT_YEAR}\s?(?:-|–|to)\s?)?{_ANCIENT_YEAR}\s?{_ERA}",
            rf"{_START}{_YEAR}[-–/](?:{_YEAR}|\d{{2}}){_END}",
            rf"{_START}{_YEAR}{_END}(?!{_COUNTED})",
        ]
    )
)


def find_dates(text: str) -> list[tuple[int, int]]:
    """Returns the dates in `text` as character ranges [start, end), in order."""
    return [match.span() for match in _DATE.finditer(text)]
