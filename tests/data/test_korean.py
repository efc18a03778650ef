"""Real Korean text through every step: none may assume ASCII, English or capitals."""

import re
import unicodedata

import pytest

from realm_jax.data.dates import find_dates
from realm_jax.data.documents import Document
from realm_jax.data.salient_spans import RuleTagger
from realm_jax.data.wordpiece import WordPiece
from tests.corpus_builder import build_corpus


def read_marked(line):
    """Returns a sentence, its dates, and the other spans that the rules can see."""
    dates, names = re.findall(r"{(.*?)}", line), re.findall(r"\[(.*?)\]", line)
    return re.sub(r"[][{}]", "", line), dates, names


# Titles and sentences; {dates}, and [other spans].
MARKED = """
훈민정음
[훈민정음](訓民正音)은 조선의 [제4대] 왕 세종이 {1443년 12월}에 만든 글자이다.
세종은 {1446년 9월}에 《[훈민정음]》이라는 책을 펴내어 새 글자를 알렸다.
처음에는 자음 [17자]와 모음 [11자]를 합하여 [28자]였다.
《[훈민정음 해례본]》은 {1997년} 유네스코 세계기록유산에 올랐다.
오늘날 한국에서는 {10월 9일}을 한글날로 기념한다.

이순신
[이순신](李舜臣)은 {1545년 4월 28일}에 한양에서 태어났다.
그는 {1592년}에 일어난 임진왜란에서 조선 수군을 이끌었다.
{1597년} 명량 해전에서는 배 [13척]으로 일본 수군을 막아 냈다.
이순신은 {1598년 12월 16일} 노량 해전에서 전사하였다.
그가 전쟁 중에 쓴 《[난중일기]》는 국보로 지정되어 있다.

서울
서울은 대한민국의 수도이다.
{1394년}에 조선이 한양을 수도로 정한 뒤로 600년 넘게 나라의 중심이었다.
한강이 도시 한가운데를 동서로 흐른다.
{1988년 9월 17일}에 서울 올림픽이 열렸다.
서울의 넓이는 약 [605제곱킬로미터]이다.

광복절
광복절은 {1945년 8월 15일}에 나라를 되찾은 것을 기념하는 날이다.
대한민국 정부는 {1948년 8월 15일}에 세워졌다.
{1919년 3월 1일}에는 전국에서 독립을 외치는 만세 운동이 일어났다.
같은 해 4월에 상하이에서 대한민국 임시 정부가 세워졌다.

아이작 뉴턴
아이작 [뉴턴]([Isaac Newton])은 {1642년 12월 25일}에 태어난 영국의 과학자이다.
그는 {1687년}에 《[자연철학의 수학적 원리]》를 펴냈다.
뉴턴은 케임브리지 대학교의 [Trinity College]에서 공부하였다.
그는 {1727년 3월 31일} 런던에서 세상을 떠났다.

신라
신라는 {기원전 57년}에 박혁거세가 세웠다고 전한다.
{660년}에 백제가, {668년}에 고구려가 멸망하였다.
{676년}에 신라는 당나라 군대를 몰아내고 삼국을 통일하였다.
불국사와 석굴암은 {8세기}에 지어졌다.
신라는 {935년}에 고려에 항복하였다.

달 탐사
[NASA]는 {1958년 7월 29일}에 세워진 미국의 우주 기관이다.
{1969년 7월 20일} [Apollo 11]이 달에 내렸다.
달에 처음 발을 디딘 사람은 닐 암스트롱이다！
그다음은 누구인가？
버즈 올드린이다。
"""
ARTICLES = {
    title: list(map(read_marked, lines))
    for article in MARKED.strip().split("\n\n")
    for title, *lines in [article.splitlines()]
}
SENTENCES = [sentence for article in ARTICLES.values() for sentence in article]
DOCUMENTS = [
    Document(title, " ".join(text for text, *_ in sentences), f"ko-{title}")
    for title, sentences in ARTICLES.items()
]
TEXTS = [document.text for document in DOCUMENTS]


@pytest.fixture(scope="module", params=[False, True], ids=["cased", "uncased"])
def store(request, tmp_path_factory):
    """The articles in blocks of a few sentences, in a vocabulary trained on them."""
    directory = tmp_path_factory.mktemp("korean")
    path = directory / "vocab.txt"
    vocabulary = WordPiece.train(TEXTS, 700, path, lowercase=request.param)
    return build_corpus(DOCUMENTS, directory / "corpus", vocabulary, chunk_length=64)


def plain(text):
    """Without what BERT's rules for case, accents and spaces change in this text."""
    return unicodedata.normalize("NFC", text.lower()).replace(" ", "")


def test_dates_and_marked_names_are_those_a_reader_marks():
    for text, dates, marked in SENTENCES:
        assert [text[start:end] for start, end in find_dates(text)] == dates
        [spans] = RuleTagger().tag([text])
        found = {"DATE": [], "NAME": [], "NUMBER": []}
        for start, end, label in spans:
            found[label].append(text[start:end])
        assert found["DATE"] == dates
        assert sorted(found["NAME"] + found["NUMBER"]) == sorted(marked)


def test_nothing_is_unknown_and_no_character_is_lost(store):
    assert store.num_blocks > len(ARTICLES)
    bodies, sentences = dict.fromkeys(ARTICLES, ""), []
    for text in store.texts(range(store.num_blocks)):
        bodies[text.title] += text.body
        sentences += [text.body[start:end] for start, end in text.sentences]
        ids = store.vocabulary.encode(text.body).ids
        assert store.vocabulary.unk not in ids
        assert plain(store.vocabulary.decode(ids)) == plain(text.body)
    for document in DOCUMENTS:
        assert plain(bodies[document.title]) == plain(document.text)
    assert sentences == [text for text, *_ in SENTENCES]


def test_bert_parts_syllables_and_decoding_joins_them(tmp_path):
    uncased = WordPiece.train(TEXTS, 700, tmp_path / "vocab.txt")
    encoding = uncased.encode("세종")
    pieces = "".join(uncased.pieces[i].removeprefix("##") for i in encoding.ids)
    assert pieces == unicodedata.normalize("NFD", "세종") != "세종"
    # Every letter stands for the syllable it came from; a span masks all of them.
    assert set(map(tuple, encoding.offsets.tolist())) <= {(0, 1), (1, 2), (0, 2)}
    assert uncased.decode(encoding.ids) == "세종"


def test_accents_kept_keep_syllables_whole(tmp_path):
    kept = WordPiece.train(TEXTS, 700, tmp_path / "vocab.txt", strip_accents=False)
    assert kept.lowercase
    assert not any("\u1100" <= c <= "\u11ff" for piece in kept.pieces for c in piece)
    assert kept.decode(kept.encode("NASA는 세종").ids) == "nasa는 세종"
    loaded = WordPiece.load(tmp_path / "vocab.txt", strip_accents=False)
    assert loaded.fingerprint == kept.fingerprint
    # The same pieces under BERT's own rule would never be met by Korean text.
    assert kept.fingerprint != WordPiece.load(tmp_path / "vocab.txt").fingerprint
    wrong = WordPiece.load(tmp_path / "vocab.txt")
    assert set(wrong.encode("세종은").ids) == {wrong.unk}
    uncased = WordPiece.train(TEXTS, 700, tmp_path / "uncased.txt")
    shorter, longer = (
        sum(len(encoding) for encoding in vocabulary.encode_batch(TEXTS))
        for vocabulary in (kept, uncased)
    )
    assert shorter < longer
