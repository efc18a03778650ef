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
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data import wordpiece as wordpiece_module
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.errors import BadInputError

BERT_VOCABULARY = (
    Path(__file__).parents[2] / ".cache" / "data" / "minilm-l6" / "vocab.txt"
)
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
    text: str,
    *,
    lowercase: bool,
    strip_accents: bool,
    tokenize_chinese_chars: bool = True,
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


@given(
    text=MESSY_TEXT,
    lowercase=st.booleans(),
    strip_accents=st.sampled_from([None, True, False]),
)
def test_ids_equal_bert(text, lowercase, strip_accents):
    wordpiece = WordPiece(PIECES, lowercase=lowercase, strip_accents=strip_accents)
    follows_case = strip_accents is None
    assert wordpiece.strip_accents == (lowercase if follows_case else strip_accents)
    assert wordpiece.encode(text).ids.tolist() == twin_ids(text, wordpiece)


@pytest.mark.parametrize("length", [100, 200, 201])
def test_only_words_above_200_characters_are_given_up(length):
    wordpiece = WordPiece([*SPECIAL_PIECES, "n", "##n"])
    assert wordpiece.encode("n" * length).ids.tolist() == twin_ids(
        "n" * length, wordpiece
    )


@given(text=st.text(max_size=60) | MESSY_TEXT)
def test_offsets_are_ordered_ranges_of_the_text(text):
    encoding = WordPiece(PIECES).encode(text)
    starts, ends = encoding.offsets.T
    assert encoding.offsets.shape == (len(encoding), 2)
    assert (starts < ends).all()
    assert (ends <= len(text)).all()
    assert (np.diff(starts) >= 0).all()


@given(text=MESSY_TEXT)
def test_offsets_quote_the_characters_a_piece_stands_for(text):
    wordpiece = WordPiece(PIECES)
    encoding = wordpiece.encode(text)
    for piece_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if piece_id != wordpiece.unk:
            quoted = "".join(
                bert_words(text[start:end], lowercase=True, strip_accents=True)
            )
            assert quoted == wordpiece.pieces[piece_id].removeprefix("##")


def test_offsets_count_characters_not_bytes():
    encoding = WordPiece(PIECES).encode("𝒳 Hellö, héllo 中!")
    quoted = ["𝒳 Hellö, héllo 中!"[start:end] for start, end in encoding.offsets]
    assert quoted == ["𝒳", "Hellö", ",", "héllo", "中", "!"]


def test_batch_equals_one_by_one():
    wordpiece = WordPiece(PIECES)
    for single, batched in zip(
        map(wordpiece.encode, TEXTS), wordpiece.encode_batch(TEXTS), strict=True
    ):
        np.testing.assert_array_equal(single.ids, batched.ids)
        np.testing.assert_array_equal(single.offsets, batched.offsets)


@given(
    texts=st.lists(MESSY_TEXT, max_size=5),
    lowercase=st.booleans(),
    strip_accents=st.booleans(),
    chinese=st.booleans(),
)
def test_ids_word_by_word_equal_bert(texts, lowercase, strip_accents, chinese):
    wordpiece = WordPiece(
        PIECES,
        lowercase=lowercase,
        strip_accents=strip_accents,
        tokenize_chinese_chars=chinese,
    )
    for _ in range(2):  # The second time all words are known.
        ids = wordpiece.ids_batch(texts)
        assert [of_text.dtype for of_text in ids] == [np.int32] * len(texts)
        expected = [twin_ids(text, wordpiece) for text in texts]
        assert [of_text.tolist() for of_text in ids] == expected


@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_ids_word_by_word_equal_those_of_whole_texts(texts):
    for wordpiece in (WordPiece(PIECES), WordPiece(PIECES, strip_accents=False)):
        expected = [wordpiece.encode(text).ids.tolist() for text in texts]
        assert [ids.tolist() for ids in wordpiece.ids_batch(texts)] == expected


@pytest.mark.parametrize("strip_accents", [True, False])
def test_a_space_ends_a_word_beside_every_character(strip_accents):
    assigned = [
        character
        for character in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(character) not in ("Cn", "Co", "Cs")
    ]
    # Its own piece, so that a character that goes to another word changes the ids.
    pieces = [*SPECIAL_PIECES, *dict.fromkeys("".join(assigned).lower()), "a", "##a"]
    wordpiece = WordPiece(list(dict.fromkeys(pieces)), strip_accents=strip_accents)
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
    for _ in range(3):
        for text in ("hello world", "the unaffable", "hello hello the", "中 !"):
            [ids] = wordpiece.ids_batch([text])
            assert ids.tolist() == twin_ids(text, wordpiece)
            assert len(wordpiece._kept) <= 3 + 3
    sent = pickle.dumps(wordpiece)
    assert len(sent) == len(pickle.dumps(WordPiece(PIECES)))
    assert pickle.loads(sent).ids_batch(["hello"])[0].tolist() == twin_ids(
        "hello", wordpiece
    )


def test_text_never_makes_a_special_piece():
    wordpiece = WordPiece(PIECES)
    ids = wordpiece.encode("hello [MASK] [SEP][CLS]").ids
    assert not {wordpiece.mask, wordpiece.sep, wordpiece.cls} & set(ids.tolist())
    assert wordpiece.decode(ids[:4]) == "hello [ mask ]"


def test_decode_drops_padding_and_shows_masks():
    wordpiece = WordPiece(PIECES)
    ids = [*wordpiece.encode("unaffable world").ids, wordpiece.mask, 0, 0]
    assert wordpiece.decode(ids) == "unaffable world [MASK]"


def test_empty_text_has_no_pieces():
    encoding = WordPiece(PIECES).encode(" \u200b\n")
    assert encoding.ids.shape == (0,)
    assert encoding.offsets.shape == (0, 2)


def test_published_vocabulary_gives_the_published_example():
    if not BERT_VOCABULARY.exists():
        pytest.skip("`make data` fetches BERT's vocabulary")
    wordpiece = WordPiece.load(BERT_VOCABULARY)
    text = "John Johanson's house, unaffable."
    pieces = [wordpiece.pieces[i] for i in wordpiece.encode(text).ids]
    expected = "john johan ##son ' s house , una ##ffa ##ble ."
    assert pieces == expected.split()
    assert (wordpiece.cls, wordpiece.sep, wordpiece.mask) == (101, 102, 103)
    assert wordpiece.size == 30522


@pytest.mark.full
def test_training_writes_the_same_file_in_every_process(tmp_path):
    """The trainer's hash tables differ from process to process; the file must not."""
    script = (
        "import sys; from realm_jax.data.wordpiece import WordPiece; "
        "from pathlib import Path; "
        "WordPiece.train(Path(sys.argv[1]).read_text().splitlines(), 80, sys.argv[2])"
    )
    (tmp_path / "texts").write_text("\n".join(TEXTS))
    for name in "ab":
        arguments = [str(tmp_path / "texts"), str(tmp_path / name)]
        subprocess.run([sys.executable, "-c", script, *arguments], check=True)
    trained = WordPiece.train(TEXTS, 80, tmp_path / "c")
    files = {(tmp_path / name).read_bytes() for name in "abc"}
    assert len(files) == 1
    assert trained.size == 80
    assert trained.pieces[:5] == SPECIAL_PIECES
    assert trained.unk not in np.concatenate([trained.encode(t).ids for t in TEXTS])


def test_characters_that_are_asked_for_are_known_in_every_place(tmp_path):
    asked = "qzŽ?…中"
    plain = WordPiece.train(TEXTS, 120, tmp_path / "plain")
    trained = WordPiece.train(TEXTS, 120, tmp_path / "more", characters=asked)
    for text in ("qzq", "zqŽ", "q?", "…z", "中z中"):
        assert trained.unk not in trained.encode(text).ids
        assert plain.unk in plain.encode(text).ids
    with pytest.raises(BadInputError, match="vocabulary_size of at least"):
        WordPiece.train(TEXTS, 60, tmp_path / "few", characters=map(chr, range(33, 99)))


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


def test_saved_vocabulary_is_read_back_unchanged(tmp_path):
    wordpiece = WordPiece(PIECES, lowercase=True)
    wordpiece.save(tmp_path / "vocab.txt")
    loaded = WordPiece.load(tmp_path / "vocab.txt")
    assert loaded.pieces == wordpiece.pieces
    assert loaded.fingerprint == wordpiece.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["vocab.txt"]


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


def test_only_a_newline_ends_a_piece(tmp_path):
    pieces = [*SPECIAL_PIECES, "a", "\u2028", "\x85", "b"]
    (tmp_path / "vocab.txt").write_bytes("\n".join([*pieces, ""]).encode())
    assert WordPiece.load(tmp_path / "vocab.txt").pieces == tuple(pieces)
    (tmp_path / "vocab.txt").write_bytes("\r\n".join(PIECES).encode())
    assert WordPiece.load(tmp_path / "vocab.txt").pieces == tuple(PIECES)


def test_inner_pieces_are_those_that_begin_no_word():
    wordpiece = WordPiece([*SPECIAL_PIECES, "un", "##able", "##", "#"])
    assert wordpiece.is_inner.tolist() == [*[False] * 6, True, False, False]


@pytest.mark.parametrize(("size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_ids_are_stored_as_narrow_as_the_vocabulary_allows(size, dtype):
    last = size - 1 - len(SPECIAL_PIECES)
    wordpiece = WordPiece([*SPECIAL_PIECES, *map(str, range(last + 1))])
    assert wordpiece.id_dtype == dtype
    assert wordpiece.encode(str(last)).ids.tolist() == [size - 1]
    assert size - 1 == wordpiece.id_dtype.type(size - 1)


@pytest.mark.full
def test_training_knows_every_common_character_the_same_in_every_process(tmp_path):
    """A thousand characters, which are plenty for English, would be too few."""
    script = (
        "from tests.data.test_wordpiece import SYLLABLES; import sys; "
        "from realm_jax.data.wordpiece import WordPiece; "
        "WordPiece.train(SYLLABLES, 8000, sys.argv[1], lowercase=False)"
    )
    root = Path(__file__).parents[2]
    for name in "ab":
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / name)], check=True, cwd=root
        )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    trained = WordPiece.load(tmp_path / "a", lowercase=False)
    unknown = [trained.unk in trained.encode(text).ids for text in SYLLABLES]
    assert np.mean(unknown) < 0.01


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (["[PAD]", "[UNK]", "a"], r"\[CLS\], \[SEP\], \[MASK\] is missing"),
        (["a", *SPECIAL_PIECES], r"\[PAD\] to be piece 0, but it is piece 1"),
        ([*SPECIAL_PIECES, "a", "a"], "'a' occurs more often"),
    ],
)
def test_wrong_vocabularies_are_refused(pieces, message, tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(pieces) + "\n")
    with pytest.raises(BadInputError, match=message) as caught:
        WordPiece.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_vocabularies_are_refused(tmp_path):
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for name in ("missing", "latin"):
        with pytest.raises(BadInputError, match="expected a WordPiece vocabulary"):
            WordPiece.load(tmp_path / name)


@pytest.mark.parametrize(
    ("texts", "size", "message"),
    [
        (TEXTS, 5, "vocabulary size above 5"),
        (TEXTS, 20, "at least 4"),
        ([" ", ""], 100, "expected text to learn"),
    ],
)
def test_training_refuses_what_cannot_work(texts, size, message, tmp_path):
    with pytest.raises(BadInputError, match=message):
        WordPiece.train(texts, size, tmp_path / "vocab.txt")
    assert not (tmp_path / "vocab.txt").exists()
