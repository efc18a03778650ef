"""What a word is, by examples written out, and properties of arbitrary text."""

import re
import string

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.data.words import begins_word, piece_edges, word_edges

# A text, and all its words.
WORDS = {
    "It was O’Neill, not O'Hara.": "It was O’Neill not O'Hara",
    "1,234 ships and 3.14 of 9/11 at 12:30": "1,234 ships and 3.14 of 9/11 at 12:30",
    "the U.S. and, e.g., a Ph.D. at 5 p.m.": "the U.S. and e.g. a Ph.D. at 5 p.m.",
    "the U.S.-led J.R.R. Tolkien": "the U.S.-led J.R.R. Tolkien",
    "vitamin C. He": "vitamin C He",
    "Dr.-led 5.-6 .-0": "Dr led 5 6 0",
    "the war.The end": "the war The end",
    "example.com; AT&T": "example.com AT&T",
    "Jean-Paul (1914-1918), a well-known X-ray of COVID-19": (
        "Jean-Paul 1914 1918 a well-known X-ray of COVID-19"
    ),
    "1939–1945 — Franco–Prussian": "1939 1945 Franco Prussian",
    "$5 or US$6.50, 50%, 20°": "$5 or US $6.50 50% 20°",
    "C++, C# and C": "C++ C# and C",
    "cosh(t) of Ca(OH)2, Town (in the north)": ("cosh(t) of Ca(OH)2 Town in the north"),
    "H2O in 1960s' km²": "H2O in 1960s km²",
    "e\u0301lan, na\u00efve": "e\u0301lan na\u00efve",
    "soft\u00adhyphen": "soft\u00adhyphen",
    '\'tis (quoted) "Yahoo!"': "tis quoted Yahoo",
    "東京は": "東 京 は",
    "ラテン・アメリカ": "ラテン アメリカ",
    "हिन्दी भाषा": "हिन्दी भाषा",
    "": "",
    " ,.;- ": "",
}


def test_words_are_those_a_person_would_name():
    for text, words in WORDS.items():
        edges = word_edges(text)
        begins, ends = np.flatnonzero(edges.begins), np.flatnonzero(edges.ends)
        found = [text[a:b] for a, b in zip(begins, ends, strict=True)]
        assert found == words.split(), text


def test_where_a_word_may_end_before_its_end():
    decomposed = "\u1109\u1165\u110b\u116e\u11af"
    for text, begins, ends in [
        ("Darwin's fish", ["Darwin's fish", "fish"], ["Darwin", "Darwin's", "fish"]),
        ("rock'n'roll", ["rock'n'roll"], ["rock'n'roll"]),
        # Particles follow a Korean name without a space.
        ("서울에서", ["서울에서"], ["서", "서울", "서울에", "서울에서"]),
        ("NATO는", ["NATO는"], ["NATO", "NATO는"]),
        (decomposed, [decomposed], [decomposed[:2], decomposed]),
    ]:
        edges = word_edges(text)
        assert [text[p:] for p in np.flatnonzero(edges.begins)] == begins
        assert [text[:p].split()[-1] for p in np.flatnonzero(edges.ends)] == ends


@given(st.text(alphabet=string.ascii_letters + string.digits + " ,;()", max_size=60))
def test_of_plain_text_words_are_the_runs_of_letters_and_digits(text):
    # Its argument belongs to a function's name, as in cosh(t).
    assume(not re.search(r"[^\W_]\(", text))
    edges = word_edges(text)
    for position in range(len(text) + 1):
        before = text[:position][-1:].isalnum()
        after = text[position:][:1].isalnum()
        between = text[position - 1 : position + 2] if position else ""
        if "," in between and before | after:
            continue  # It may separate thousands.
        assert edges.begins[position] == (after and not before)
        assert edges.ends[position] == (before and not after)


@given(st.text(max_size=60))
def test_in_any_text_every_word_that_begins_ends(text):
    edges = word_edges(text)
    assert len(edges.begins) == len(edges.ends) == len(text) + 1
    ends = np.flatnonzero(edges.ends)
    for begin in np.flatnonzero(edges.begins):
        assert (ends > begin).any()
    assert all(edges.begins[:end].any() for end in ends)
    assert (edges.resumes >= np.arange(len(text) + 1)).all()


MESSY = st.text("aB1. ,'-(&)+$%\u0301\u2009가은京 \n", max_size=20)


@given(st.text(max_size=20) | MESSY)
def test_what_stands_between_spaces_decides_where_a_word_begins(text):
    begins = [begins_word(text, position) for position in range(len(text) + 1)]
    assert begins == word_edges(text).begins.tolist()


def pieces_of(text, pieces, **rules):
    vocabulary = WordPiece([*SPECIAL_PIECES, *pieces], **rules)
    encoding = vocabulary.encode(text)
    edges = piece_edges(text, encoding.offsets)
    names = [vocabulary.pieces[i] for i in encoding.ids]
    assert len(edges.begins) == len(edges.ends) == len(names)
    begins = [name for name, is_one in zip(names, edges.begins, strict=True) if is_one]
    ends = [name for name, is_one in zip(names, edges.ends, strict=True) if is_one]
    return begins, ends, edges


def test_pieces_of_a_word_are_joined_by_the_text_not_by_their_marks():
    pieces = ["1", ",", "234", "u", ".", "s", "o", "'", "neill", "the", "a", "##ble"]
    begins, ends, _ = pieces_of("The 1,234 U.S. O'Neill, able", pieces)
    assert begins == ["the", "1", "u", "o", "a"]
    assert ends == ["the", "234", ".", "neill", "##ble"]


def test_an_accent_that_the_tokenizer_strips_is_part_of_the_word():
    text = "cafe\u0301 x"
    begins, ends, edges = pieces_of(text, ["cafe", "x"])
    assert (begins, ends) == (["cafe", "x"], ["cafe", "x"])
    assert text[slice(*edges.offsets[0])] == "cafe\u0301"


def test_a_syllable_of_several_pieces_is_not_divided():
    jamo = ["\u1109", "##\u1165", "##\u110b", "##\u116e", "##\u11af"]
    begins, ends, _ = pieces_of("서울", jamo)
    assert begins == ["\u1109"]
    assert ends == ["##\u1165", "##\u11af"]
    edges = piece_edges("", np.zeros((0, 2), np.int32))
    assert len(edges.begins) == len(edges.ends) == len(edges.offsets) == 0
