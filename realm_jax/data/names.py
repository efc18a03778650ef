"""Finds proper names by rules, for use without a trained tagger.

English capitalises names and the first words of sentences. The rules keep runs of
capitalised words and drop words capitalised only because they start a sentence. They
assign no entity types, and miss a one-word name at the start of a sentence unless the
text repeats it elsewhere. In a sentence of a script without capitals every capitalised
word is a foreign name.

In Korean, Japanese and Chinese, most names look like any other word, and the rules miss
them. They find little beyond what the writing itself marks:

- titles in title brackets, 《훈민정음》, 『源氏物語』, without the brackets;
- words followed by their form in another script, 세종(世宗), 뉴턴(Isaac Newton);
- foreign names in katakana with parts joined by a dot, アイザック・ニュートン;
- numbers with their counters, 제4대, 28자, 988만 명, 1400万人.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from realm_jax.data.chunking import strip_range


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Han, kana and Hangul: no capitals, and no space before or after a foreign name.
_CASELESS = "\u3041-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff"
_CASELESS_LETTER = re.compile(f"[{_CASELESS}]")
_LETTER = rf"[^\W_{_CASELESS}]"
_OTHER_WORD = re.compile(rf"{_LETTER}+")
# A word: letters and digits, inner apostrophes, dashes and the dots of initials.
_WORD = re.compile(
    rf"{_LETTER}+(?:(?:['’&–-]|\.(?=[^\W\d_{_CASELESS}]\b)){_LETTER}+)*"
    rf"|[{_CASELESS}]+"
)
_PARTS = re.compile("['’–-]")
_POSSESSIVE = re.compile(r"['’]s$")
# "French-speaking": only the first part is a name.
_LOWER_TAIL = re.compile(r"[–-](?=[a-z])")
_ABBREVIATED = _word_set("""
    Bros Capt Co Col Corp Dr Fr Gen Gov Inc Jr Lt Ltd Maj Mr Mrs Ms Mt Prof Rev Sen Sgt
    Sr St
""")
# Words that can occur inside a name without a capital.
_CONNECTORS = _word_set("""
    al bin da das de del della den der des di do dos du el for ibn la las le los of ten
    ter the van vom von zu
""")
_ARTICLES = _word_set("a an the")
# Words that never begin a name at the start of a sentence, whatever follows.
_FUNCTION_WORDS = _word_set("""
    a about according after all also although among an and another any apart are around
    as at based because before being below besides between both but by can compared
    contrary currently depending despite did do does due during each earlier either even
    eventually every examples except few finally following for former formerly forms
    found founded from further furthermore generally given had has have he hence her
    here his historically how however i if in including indeed initially instead into is
    it its just known large largely last later leading less like located long made
    mainly many may meanwhile members more moreover most much my near nearly neither
    never nevertheless no none nonetheless nor not notable now occasionally of often on
    once only or originally other others otherwise our outside over overall part partly
    parts perhaps popular prior probably rather recent recently regarded several she
    similarly since small so some sometimes soon still subsequently such than that the
    their them then there therefore these they this those though through throughout thus
    to today together traditionally types typically under unlike until up upon usually
    various very was we well were what when where whereas whether which while who whose
    why widely will with within without yet you your
    two three four five six seven eight nine ten
""")
_CALENDAR = _word_set("""
    january february march april may june july august september october november
    december monday tuesday wednesday thursday friday saturday sunday
""")
_MAX_NUMBER_LENGTH = 3  # "Apollo 11"; four digits are a year.

# What the writing marks in Korean, Japanese and Chinese.
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


class _Word(NamedTuple):
    text: str
    start: int
    end: int
    starts_sentence: bool
    is_capitalised: bool

    @property
    def is_abbreviated(self) -> bool:
        """True if a full stop after the word belongs to it: "J. S.", "U.S.", "St."."""
        return self.text in _ABBREVIATED or len(self.text.split(".")[-1]) == 1

    @property
    def has_inner_capital(self) -> bool:
        return any(character.isupper() for character in self.text[1:])


def find_names(
    text: str, sentences: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Returns the proper names in `text` as character ranges [start, end), in order."""
    words = [_words(text, start, end) for start, end in sentences]
    inner = [
        word for sentence in words for word in sentence if not word.starts_sentence
    ]
    capitalised = {word.text for word in inner if word.is_capitalised}
    lower = {word.text for word in inner if word.text.islower()}
    names = []
    for sentence, (_, sentence_end) in zip(words, sentences, strict=True):
        for run in _runs(text, sentence):
            name = _trim(run, capitalised, lower)
            if name:
                end = _name_end(text, name[-1], sentence_end)
                names.append((name[0].start, end))
    return names


def _words(text: str, start: int, end: int) -> list[_Word]:
    words = []
    is_caseless = not text.isascii() and _is_caseless(text[start:end])
    for match in _WORD.finditer(text, start, end):
        word = match.group()
        if tail := _LOWER_TAIL.search(word):
            word = word[: tail.start()]
        word_end = match.start() + len(word)
        starts_sentence = not words and not is_caseless
        words.append(
            _Word(word, match.start(), word_end, starts_sentence, _is_capitalised(word))
        )
    return words


def _is_caseless(sentence: str) -> bool:
    """Returns whether caseless letters outnumber the words of cased scripts."""
    caseless = len(_CASELESS_LETTER.findall(sentence))
    return caseless > 0 and caseless > len(_OTHER_WORD.findall(sentence))


def _is_capitalised(word: str) -> bool:
    first, *rest = _PARTS.split(word)
    if first in _CONNECTORS and rest:  # "al-Khwarizmi"
        return rest[0][:1].isupper()
    return word[0].isupper()


def _runs(text: str, words: Sequence[_Word]) -> list[list[_Word]]:
    """Groups neighbouring capitalised words, with the connectors between them."""
    runs: list[list[_Word]] = []
    run: list[_Word] = []
    connectors: list[_Word] = []
    for word in words:
        if run and not _are_neighbours(text, (connectors or run)[-1], word):
            runs.append(run)
            run, connectors = [], []
        if word.is_capitalised:
            run = [*run, *connectors, word]
            connectors = []
        elif run and word.text in _CONNECTORS:
            connectors.append(word)
        elif run and not connectors and _is_model_number(word):
            run = [*run, word]
        elif run:
            runs.append(run)
            run, connectors = [], []
    return [*runs, run] if run else runs


def _are_neighbours(text: str, left: _Word, right: _Word) -> bool:
    gap = text[left.end : right.start]
    if _POSSESSIVE.search(left.text):  # "Newton's Principia" is two names.
        return False
    return gap in (" ", " & ") or (gap in (". ", ".") and left.is_abbreviated)


def _is_model_number(word: _Word) -> bool:
    return word.text.isdigit() and len(word.text) <= _MAX_NUMBER_LENGTH


def _trim(run: list[_Word], capitalised: set[str], lower: set[str]) -> list[_Word]:
    """Returns a run without the leading words that are not part of a name.

    The result is empty if a single word is left that is not a name by itself.

    Args:
      capitalised: words of the text that are capitalised within a sentence.
      lower: words of the text without a capital.
    """
    while run and not _may_begin_name(run, capitalised, lower):
        run = run[1:]
    if len(run) == 1:
        word = run[0].text
        if len(word) == 1 or word in _ABBREVIATED or word.lower() in _CALENDAR:
            return []
    return run


def _may_begin_name(run: list[_Word], capitalised: set[str], lower: set[str]) -> bool:
    word = run[0]
    if not word.is_capitalised:
        return False
    if word.has_inner_capital:  # NASA, McCartney, US.
        return True
    if not word.starts_sentence:
        return word.text.lower() not in _ARTICLES
    if word.text.lower() in _FUNCTION_WORDS:
        return False
    if word.text in capitalised:
        return True
    has_company = any(other.is_capitalised for other in run[1:])
    return has_company and word.text.lower() not in lower


def _name_end(text: str, last: _Word, sentence_end: int) -> int:
    """Returns the end of a name, without "'s" and with the full stop of "U.S."."""
    if possessive := _POSSESSIVE.search(last.text):
        return last.start + possessive.start()
    if text[last.end : last.end + 1] != "." or not last.is_abbreviated:
        return last.end
    # At the end of a sentence the full stop belongs to it, except after "U.S".
    closes_sentence = last.end + 1 == sentence_end and "." not in last.text
    return last.end if closes_sentence else last.end + 1


def find_marked_names(text: str) -> list[tuple[int, int]]:
    """Returns titles, glossed words and dotted katakana as [start, end), in order.

    They may overlap: a title may hold a glossed word.
    """
    patterns = (_TITLE, _GLOSSED, _KATAKANA_NAME)
    found = {m.span() for pattern in patterns for m in pattern.finditer(text)}
    stripped = (strip_range(text, start, end) for start, end in found)
    return sorted((start, end) for start, end in stripped if start < end)


def find_counted(text: str) -> list[tuple[int, int]]:
    """Returns numbers with their counters as [start, end), in order."""
    return [match.span() for match in _COUNTED.finditer(text)]
