"""Finds dates in text, to mask them as salient spans.

The patterns find calendar dates and periods ("16 February 1981", "1980s", "5th century
BC", "1443년 12월", "昭和20年8月15日"), not durations ("30 years", "30년간") or relative
dates ("last week"), which no document could recover.

Months and eras are recognised in English, and in the units that Korean, Japanese and
Chinese write after numbers. Bare years and ISO dates are independent of the language.
"""

import re

VERSION = "dates-3"
"""Version of the patterns, bumped when they change; part of the names of taggers."""

_ERA = r"(?:BCE|CE|BC|AD|B\.C\.E\.|B\.C\.|C\.E\.|A\.D\.)(?!\w)"
_YEAR = r"(?:1\d{3}|20\d{2})"
_ANCIENT_YEAR = r"(?:\d{1,3}(?:,\d{3})?|\d{4})"
_DAY = r"(?:3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?"
_DAYS = rf"{_DAY}(?:\s?[-–]\s?{_DAY})?"
_MONTH = (
    r"(?:January|February|March|April|May|June|July|August|September|October|November"
    r"|December|(?:Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\b\.?)"
)
_COMMA = r"(?:\s?,)?\s"  # Some corpora have a space before every comma.
_ORDINAL = (
    r"(?:\d{1,2}(?:st|nd|rd|th)|(?i:first|second|third|fourth|fifth|sixth|seventh"
    r"|eighth|ninth|tenth|eleventh|twelfth|thirteenth|fourteenth|fifteenth|sixteenth"
    r"|seventeenth|eighteenth|nineteenth|twentieth|twenty-first))"
)
_AGE = r"(?:century|centuries|millennium|millennia)\b"
# A bare number before one of these is a count, not a year.
_COUNTED = (
    r"\s(?:years?|months?|days?|hours?|people|men|women|persons|inhabitants|members"
    r"|soldiers|troops|species|islands|languages|copies|votes|students|employees"
    r"|millions?|billions?|percent|per|km|kilomet\w+|m|met(?:re|er)s?|cm|mm|miles?|mi"
    r"|feet|foot|ft|acres?|hectares?|ha|square|cubic|tons?|tonnes?|kg|kilograms?"
    r"|pounds|degrees?|watts?|volts?|K)\b"
)
# The same in Korean.
_COUNTED_KOREAN = (
    r"\s(?:명|개(?![관교국봉정최통편항혁])|권|대|마리|채|척|점|원|톤|미터|킬로미터)"
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
            rf"{_START}{_YEAR}{_END}(?!{_COUNTED}|{_COUNTED_KOREAN})",
        ]
    )
)

# Korean, Japanese and Chinese put a unit after each number, with or without a space,
# and particles after the unit: a date need not end at a word boundary.
_EAST_ASIAN = re.compile("[\u4e00-\u9fff\uac00-\ud7a3]")
_FULL_WIDTH = str.maketrans("０１２３４５６７８９", "0123456789")
_HAN_DIGIT = "[〇零○一二三四五六七八九十]"
_Y, _M, _D = r"\s?[년年]", r"\s?[월月]", r"\s?[일日号號]"
_TO = r"\s?[-–~～〜]\s?"
_MONTH_NUMBER = rf"(?:1[0-2]|0?[1-9]|{_HAN_DIGIT}{{1,2}})"
_DAY_NUMBER = rf"(?:3[01]|[12][0-9]|0?[1-9]|{_HAN_DIGIT}{{1,3}})"
_BEFORE_CHRIST = r"(?:(?:기원전|紀元前|纪元前|公元前|西元前)\s?)"
_ANY_ERA = rf"(?:{_BEFORE_CHRIST}|(?:서기|기원후|西暦|公元|西元)\s?)"
_JAPANESE_YEAR = (
    r"(?:明治|大正|昭和|平成|令和|메이지|다이쇼|쇼와|헤이세이|레이와)"
    r"\s?(?:[0-9]{1,2}|元|원)"
)
# Suffixes that make "1000년" a duration in years, and "15일" one in days.
_LASTS = (
    r"(?!간(?!행)|[間间前]|여\s|以[上来]|\s?동안|\s?이상|\s?만에|\s?넘|\s전[에의,. ])"
)
# "300년" and "350년" usually are durations; "668년" may be one before these words.
_ROUND = "[0-9](?:00|50)"
_LASTS_LONG = rf"{_LASTS}(?!\s?(?:후|뒤|역사|전통|정도|이[ 가]|[된째짜])|[后後])"
_NOT_IN_NUMBER = "(?<![0-9.,$£€¥#〇零○一二三四五六七八九十])"

_EAST_ASIAN_DATE = re.compile(
    "|".join(
        rf"{_NOT_IN_NUMBER}{pattern}"
        for pattern in [
            # With a month, any number is taken as a year.
            rf"{_ANY_ERA}?(?:[0-9]{{1,4}}|{_HAN_DIGIT}{{4}}|{_JAPANESE_YEAR}){_Y}\s?"
            rf"{_MONTH_NUMBER}{_M}(?:\s?{_DAY_NUMBER}{_D}{_LASTS})?",
            rf"{_MONTH_NUMBER}{_M}\s?{_DAY_NUMBER}{_D}{_LASTS}",
            rf"{_BEFORE_CHRIST}?(?:[0-9]{{1,2}}{_TO})?"
            rf"(?:[0-9]{{1,2}}|{_HAN_DIGIT}{{1,3}})\s?(?:세기|世[紀纪])",
            r"[0-9]{2,4}(?:년대|年代)",
            rf"{_ANY_ERA}(?:[0-9]{{1,4}}{_TO})?[0-9]{{1,4}}{_Y}",
            rf"(?:{_JAPANESE_YEAR}|{_HAN_DIGIT}{{4}}){_Y}",
            rf"{_YEAR}(?:{_Y})?{_TO}(?:{_YEAR}|[0-9]{{2}}){_Y}{_LASTS}",
            rf"{_YEAR}{_Y}{_LASTS}",
            rf"(?!{_ROUND})[1-9][0-9]{{2}}{_Y}{_LASTS_LONG}",
            # Dotted numeric dates, as in Korean, and ISO dates before a particle.
            rf"{_YEAR}\.\s?{_MONTH_NUMBER}\.\s?{_DAY_NUMBER}(?![0-9])",
            r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9])",
        ]
    )
)


def find_dates(text: str) -> list[tuple[int, int]]:
    """Returns the dates in `text` as character ranges [start, end), in order."""
    plain = [match.span() for match in _DATE.finditer(text)]
    if text.isascii() or not _EAST_ASIAN.search(text):
        return plain
    # The translation is one character for one, so positions do not change.
    found = [m.span() for m in _EAST_ASIAN_DATE.finditer(text.translate(_FULL_WIDTH))]
    # The East Asian patterns take precedence: "2021. 3. 5." has no bare year.
    others = [
        (start, end)
        for start, end in plain
        if not any(start < there_end and there < end for there, there_end in found)
    ]
    return sorted([*others, *found])
