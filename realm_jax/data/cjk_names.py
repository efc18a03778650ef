"""Finds names and numbers in Korean, Japanese and Chinese, which have no capitals.

Most names look like any other word in these scripts, and the rules miss them. They find
little beyond what the writing itself marks:

- titles in title brackets, 《훈민정음》, 『源氏物語』, without the brackets;
- words followed by their form in another script, 세종(世宗), 뉴턴(Isaac Newton);
- foreign names in katakana with parts joined by a dot, アイザック・ニュートン;
- numbers with their counters, 제4대, 28자, 988만 명, 1400万人.

`names.py` finds names in Latin letters. Finding the rest requires a tagger trained for
the language.
"""

import re

_MAX_TITLE = 40

_TITLE = re.compile(
    "|".join(
        rf"(?<={left})[^《》〈〉『』「」≪≫\n。]{{1,{_MAX_TITLE}}}(?={right})"
        for left, right in ("《》", "〈〉", "『』", "「」", "≪≫")
    )
)
_HAN, _HANGUL, _KATAKANA = (
    "\u3400-\u9fff\uf900-\ufaff",
    "\uac00-\ud7a3",
    "\u30a1-\u30fa",
)
_GLOSSED = re.compile(
    rf"(?<![{_HANGUL}{_KATAKANA}ー])"
    rf"(?:[{_HANGUL}]{{2,12}}|[{_KATAKANA}][{_KATAKANA}ー]+)"
    # The name of the language may come first, as on Wikipedia.
    rf"(?=\s?[(（](?:[{_HANGUL}{_HAN}]{{1,5}}[:：]\s?)?[{_HAN}A-Z])"
)
_KATAKANA_NAME = re.compile(
    rf"[{_KATAKANA}][{_KATAKANA}ー]*(?:[・＝=][{_KATAKANA}][{_KATAKANA}ー]*)+"
)
_DIGITS = r"(?<![0-9０-９.,])[0-9０-９]+(?:[.,][0-9０-９]+)*"
_POWER = r"(?:\s?[천백만억조千百万萬億亿兆])*"
_KOREAN_COUNTER = (
    r"(?:제곱킬로미터|킬로미터|제곱미터|미터|킬로그램|퍼센트|헥타르|유로|달러|마리|그루"
    r"|가구|개국|자루|번째|명|권|척|채|층|편|점|곳|톤|원|회|차|위|호|자|개(?!월|년)|인(?!치)|살"
    r"|대(?!학|한|통|표)|세(?![기계])|장(?!군)|번)"
)
_HAN_COUNTER = (
    r"(?:平方公里|平方キロメートル|キロメートル|メートル|公里|人|名|個|个|冊|册|本|枚|巻|卷"
    r"|隻|艘|頭|匹|台|回|次|位|歳|岁|階|层|円|元|米|篇|章|種|种|部|座)"
)
_COUNTED = re.compile(
    rf"(?:[제第]\s?)?{_DIGITS}{_POWER}(?:\s?여)?\s?(?:{_KOREAN_COUNTER}|{_HAN_COUNTER})"
    rf"|[제第]\s?{_DIGITS}(?=[{_HANGUL}{_HAN}])"
)


def find_marked_names(text: str) -> list[tuple[int, int]]:
    """Returns titles, glossed words and dotted katakana as [start, end), in order.

    They may overlap: a title may hold a glossed word.
    """
    patterns = (_TITLE, _GLOSSED, _KATAKANA_NAME)
    found = {m.span() for pattern in patterns for m in pattern.finditer(text)}
    stripped = (_strip(text, start, end) for start, end in found)
    return sorted((start, end) for start, end in stripped if start < end)


def find_counted(text: str) -> list[tuple[int, int]]:
    """Returns numbers with their counters as [start, end), in order."""
    return [match.span() for match in _COUNTED.finditer(text)]


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    start += len(text[start:end]) - len(text[start:end].lstrip())
    return start, start + len(text[start:end].strip())
