"""WordPiece against a plain rendering of the algorithm that BERT published."""

import hashlib
import itertools
import pickle
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realm_jax.data import wordpiece as wordpiece_module
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from tests.refused import refused

ROOT = Path(__file__).parents[2]
SPACED_PIECES = """
    a b c é e n k s u the hello world fa ##ble un ##aff ##able ##n ##k ##s
    ! . , - [ ] mask ' 中 文 中文 ##文 ##字 1984 ##0 1 я ö
"""
PIECES = [*SPECIAL_PIECES, *SPACED_PIECES.split()]
TEXTS = [
    "The three Fermat primes were found by Pierre de Fermat in France.",
    "Pierre de Fermat was a French mathematician, born in 1607.",
    "A prime is found when the theorem of Fermat was found in France, in 1640.",
] * 3
SYLLABLES = [f"{chr(0xAC00 + 7 * i)}{chr(0xAC00 + 7 * i + 7)}" for i in range(1500)]

# Letters, accents, scripts, marks, spaces, controls and planes beyond the first; only
# code points on which all versions of Unicode agree.
CHARACTERS = st.sampled_from(
    "abcehlnoru AEIÉÖüñç 0123456789 .,!?'’\"()[]-–—$%&@# 中文字 яЖйё αβγΩ"
    "שלום ا한글 😀𝒳𠀀\t\n\r\u00a0\u3000\u2003\u0301\u0308\u200b\ufeff"
    "\u00ad\x00\x07\x7f\ufffd"
)
MESSY_TEXT = st.text(CHARACTERS, max_size=60) | st.lists(
    st.sampled_from(["hello", "unaffable", "World", "[MASK]", "1984", " ", "é", "中"])
).map("".join)


def bert_words(
    text, *, lowercase, strip_accents, tokenize_chinese_chars=True
) -> list[str]:
    """BERT's BasicTokenizer, character by character."""
    cleaned = "".join(clean(character, tokenize_chinese_chars) for character in text)
    words = []
    for token in cleaned.split():
        if lowercase:
            token = token.lower()
        if strip_accents:
            decomposed = unicodedata.normalize("NFD", token)
            token = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
        words += "".join(f" {c} " if is_punctuation(c) else c for c in token).split()
    return words


def clean(character: str, tokenize_chinese_chars: bool) -> str:
    category = unicodedata.category(character)
    if character in " \t\n\r" or category == "Zs":
        return " "
    if character in "\x00\ufffd" or category in ("Cc", "Cf"):
        return ""
    cjk = [(0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0xF900, 0xFAFF)]
    is_chinese = any(first <= ord(character) <= last for first, last in cjk)
    if is_chinese and tokenize_chinese_chars:
        return f" {character} "
    return character


def is_punctuation(character: str) -> bool:
    if character.isascii():
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character).startswith("P")


def wordpieces(word: str, vocabulary: set[str]) -> list[str]:
    """BERT's WordpieceTokenizer: greedy, longest match first."""
    pieces, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        ends = range(len(word), start, -1)
        end = next((e for e in ends if prefix + word[start:e] in vocabulary), None)
        if end is None or len(word) > 200:
            return ["[UNK]"]
        pieces.append(prefix + word[start:end])
        start = end
    return pieces


def twin_ids(text: str, wordpiece: WordPiece) -> list[int]:
    index = {piece: number for number, piece in enumerate(wordpiece.pieces)}
    return [
        index[piece]
        for word in bert_words(text, **wordpiece.settings)
        for piece in wordpieces(word, set(index))
    ]


def test_only_words_above_200_characters_are_given_up():
    wordpiece = WordPiece([*SPECIAL_PIECES, "n", "##n"])
    for text in ("n" * 200, "n" * 201):
        assert wordpiece.encode(text).ids.tolist() == twin_ids(text, wordpiece)


@given(text=st.text(max_size=60) | MESSY_TEXT)
@example(text="𝒳 Hellö, héllo 中!")
def test_offsets_are_ordered_and_quote_what_a_piece_stands_for(text):
    wordpiece = WordPiece(PIECES)
    encoding = wordpiece.encode(text)
    starts, ends = encoding.offsets.T
    assert encoding.offsets.shape == (len(encoding), 2)
    assert (starts < ends).all()
    assert (ends <= len(text)).all()
    assert (np.diff(starts) >= 0).all()
    for piece, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if piece != wordpiece.unk:
            quoted = bert_words(text[start:end], lowercase=True, strip_accents=True)
            assert "".join(quoted) == wordpiece.pieces[piece].removeprefix("##")


@given(
    texts=st.lists(MESSY_TEXT, max_size=5),
    lowercase=st.booleans(),
    strip_accents=st.sampled_from([None, True, False]),
    chinese=st.booleans(),
)
def test_ids_equal_bert(texts, lowercase, strip_accents, chinese):
    rules = {"strip_accents": strip_accents, "tokenize_chinese_chars": chinese}
    wordpiece = WordPiece(PIECES, lowercase=lowercase, **rules)
    follows_case = strip_accents is None
    assert wordpiece.strip_accents == (lowercase if follows_case else strip_accents)
    expected = [twin_ids(text, wordpiece) for text in texts]
    assert [wordpiece.encode(text).ids.tolist() for text in texts] == expected
    for _ in range(2):  # The second time all words are known.
        ids = wordpiece.ids_batch(texts)
        assert [of_text.dtype for of_text in ids] == [np.int32] * len(texts)
        assert [of_text.tolist() for of_text in ids] == expected


@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_ids_word_by_word_equal_those_of_whole_texts(texts):
    for wordpiece in (WordPiece(PIECES), WordPiece(PIECES, strip_accents=False)):
        expected = [wordpiece.encode(text).ids.tolist() for text in texts]
        assert [ids.tolist() for ids in wordpiece.ids_batch(texts)] == expected


def test_a_space_ends_a_word_beside_every_character():
    assigned = [
        character
        for character in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(character) not in ("Cn", "Co", "Cs")
        # Of ideographs and syllables a part will do.
        and (ord(character) < 0x3400 or ord(character) % 16 in (0, 15))
    ]
    # Its own piece, so that a character that goes to another word changes the ids.
    pieces = [*SPECIAL_PIECES, *dict.fromkeys("".join(assigned).lower()), "a", "##a"]
    wordpiece = WordPiece(list(dict.fromkeys(pieces)), strip_accents=False)
    texts = [
        " ".join(f"{c}a a{c}" for c in assigned[first : first + 100])
        for first in range(0, len(assigned), 100)
    ]
    whole = wordpiece.encode_batch(texts)
    for encoding, ids in zip(whole, wordpiece.ids_batch(texts), strict=True):
        np.testing.assert_array_equal(ids, encoding.ids)


def test_few_words_are_kept_and_none_are_sent_to_workers(monkeypatch):
    monkeypatch.setattr(wordpiece_module, "_MAX_KEPT_WORDS", 3)
    wordpiece = WordPiece(PIECES)
    for text in ("hello world", "the unaffable", "hello hello the", "中 !") * 3:
        [ids] = wordpiece.ids_batch([text])
        assert ids.tolist() == twin_ids(text, wordpiece)
        assert len(wordpiece._kept) <= 3 + 3
    sent = pickle.dumps(wordpiece)
    assert len(sent) == len(pickle.dumps(WordPiece(PIECES)))
    [ids] = pickle.loads(sent).ids_batch(["hello"])
    assert ids.tolist() == twin_ids("hello", wordpiece)


def test_text_never_makes_a_special_piece():
    wordpiece = WordPiece(PIECES)
    ids = wordpiece.encode("hello [MASK] [SEP][CLS]").ids
    assert not {wordpiece.mask, wordpiece.sep, wordpiece.cls} & set(ids.tolist())
    assert wordpiece.decode(ids[:4]) == "hello [ mask ]"
    # Decoding drops padding and shows masks.
    ids = [*wordpiece.encode("unaffable world").ids, wordpiece.mask, 0, 0]
    assert wordpiece.decode(ids) == "unaffable world [MASK]"


def test_published_vocabulary_gives_the_published_example():
    path = ROOT / ".cache/data/minilm-l6/vocab.txt"
    if not path.exists():
        pytest.skip("`make data` fetches BERT's vocabulary")
    wordpiece = WordPiece.load(path)
    text = "John Johanson's house, unaffable."
    pieces = [wordpiece.pieces[i] for i in wordpiece.encode(text).ids]
    expected = "john johan ##son ' s house , una ##ffa ##ble ."
    assert pieces == expected.split()
    assert (wordpiece.cls, wordpiece.sep, wordpiece.mask) == (101, 102, 103)
    assert wordpiece.size == 30522


def test_characters_that_are_asked_for_are_known_in_every_place(tmp_path):
    asked = "qzŽ?…中"
    plain = WordPiece.train(TEXTS, 120, tmp_path / "plain")
    trained = WordPiece.train(TEXTS, 120, tmp_path / "more", characters=asked)
    for text in ("qzq", "zqŽ", "q?", "…z", "中z中"):
        assert trained.unk not in trained.encode(text).ids
        assert plain.unk in plain.encode(text).ids


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    st.lists(st.integers(0, 12), max_size=4).map(sorted),
)
def test_parts_of_a_text_make_the_whole(ids, cuts):
    wordpiece = WordPiece(PIECES)
    bounds = [0, *cuts, max(12, len(ids))]
    parts = [ids[a:b] for a, b in itertools.pairwise(bounds)]
    texts = wordpiece.decode_parts(parts)
    assert "".join(texts) == wordpiece.decode(ids)
    assert len(texts) == len(parts)


def test_a_mask_keeps_its_space_and_a_suffix_does_not():
    wordpiece = WordPiece([*SPECIAL_PIECES, "based", "in", "##s", "."])
    parts = [[5, 6], [4, 4], [8]]
    assert wordpiece.decode_parts(parts) == ["based in", " [MASK] [MASK]", "."]
    assert wordpiece.decode_parts([[5], [6], [7]]) == ["based", " in", "s"]


def test_fingerprint_depends_on_pieces_order_and_settings():
    fingerprints = {
        WordPiece(PIECES).fingerprint,
        WordPiece(PIECES, lowercase=False).fingerprint,
        WordPiece(PIECES, strip_accents=False).fingerprint,
        WordPiece(PIECES, lowercase=False, strip_accents=True).fingerprint,
        WordPiece(PIECES, tokenize_chinese_chars=False).fingerprint,
        WordPiece([*PIECES[:-2], PIECES[-1], PIECES[-2]]).fingerprint,
    }
    assert len(fingerprints) == 6
    # BERT's own rule, said or not, is one: corpora keep these fingerprints.
    assert WordPiece(PIECES, strip_accents=True).fingerprint in fingerprints
    assert WordPiece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]).fingerprint == (
        hashlib.sha256(b"lowercase\n[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]").hexdigest()
    )


def test_a_saved_vocabulary_is_read_back_and_only_a_newline_ends_a_piece(tmp_path):
    path = tmp_path / "vocab.txt"
    WordPiece(PIECES, lowercase=True).save(path)
    loaded = WordPiece.load(path)
    assert loaded.pieces == tuple(PIECES)
    assert loaded.fingerprint == WordPiece(PIECES, lowercase=True).fingerprint
    assert list(tmp_path.iterdir()) == [path]
    pieces = [*SPECIAL_PIECES, "a", "\u2028", "\x85", "b"]
    path.write_bytes("\n".join([*pieces, ""]).encode())
    assert WordPiece.load(path).pieces == tuple(pieces)
    path.write_bytes("\r\n".join(PIECES).encode())
    assert WordPiece.load(path).pieces == tuple(PIECES)


def test_inner_pieces_are_those_that_begin_no_word():
    wordpiece = WordPiece([*SPECIAL_PIECES, "un", "##able", "##", "#"])
    assert wordpiece.is_inner.tolist() == [*[False] * 6, True, False, False]


def test_ids_are_stored_as_narrow_as_the_vocabulary_allows():
    for size, dtype in [(65_536, "uint16"), (65_537, "uint32")]:
        last = size - 1 - len(SPECIAL_PIECES)
        wordpiece = WordPiece([*SPECIAL_PIECES, *map(str, range(last + 1))])
        assert wordpiece.id_dtype == dtype
        assert wordpiece.encode(str(last)).ids.tolist() == [size - 1]


@pytest.mark.full
def test_training_knows_every_common_character_the_same_in_every_process(tmp_path):
    """A thousand characters, which are plenty for English, would be too few."""
    script = (
        "from tests.data.test_wordpiece import SYLLABLES; import sys; "
        "from realm_jax.data.wordpiece import WordPiece; "
        "WordPiece.train(SYLLABLES, 8000, sys.argv[1], lowercase=False)"
    )
    for name in "ab":
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / name)], check=True, cwd=ROOT
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    trained = WordPiece.load(tmp_path / "a", lowercase=False)
    unknown = [trained.unk in trained.encode(text).ids for text in SYLLABLES]
    assert np.mean(unknown) < 0.01


def test_wrong_vocabularies_are_refused(tmp_path):
    path = tmp_path / "vocab.txt"
    for pieces, message in [
        (["[PAD]", "[UNK]", "a"], r"\[CLS\], \[SEP\], \[MASK\] is missing"),
        (["a", *SPECIAL_PIECES], r"\[PAD\] to be piece 0, but it is piece 1"),
        ([*SPECIAL_PIECES, "a", "a"], "'a' occurs more often"),
    ]:
        path.write_text("\n".join(pieces) + "\n")
        with refused(f"{path}.*{message}|{message}.*{path}"):
            WordPiece.load(path)
    path.write_bytes("é".encode("latin-1"))
    for unreadable in (path, tmp_path / "missing"):
        with refused("expected a WordPiece vocabulary"):
            WordPiece.load(unreadable)


def test_training_refuses_what_cannot_work(tmp_path):
    for texts, size, message in [
        (TEXTS, 5, "vocabulary size above 5"),
        (TEXTS, 20, "vocabulary_size of at least 4"),
        ([" ", ""], 100, "expected text to learn"),
    ]:
        with refused(message):
            WordPiece.train(texts, size, tmp_path / "vocab.txt")
    assert not (tmp_path / "vocab.txt").exists()
