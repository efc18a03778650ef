"""Sentences and packing, as properties over arbitrary Unicode."""

import blingfire
from hypothesis import example, given
from hypothesis import strategies as st

from realm_jax.data import chunking
from realm_jax.data.chunking import pack, split_sentences
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from tests.refused import refused

SENTENCE_PARTS = ["Hello", "the end", "1990", "Dr. ", "U.S. ", *'("?', ". ", "! "]
SPACES = [" ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85"]
RARITIES = [*"é\u0301好。𝒳😀\u200b\ufeff\x00ﬃ", "e\u0301", "간다.", "왔어요?[2] "]
TEXT_PARTS = st.sampled_from([*SENTENCE_PARTS, *SPACES, *RARITIES, "2021. 3. 5. "])
TEXTS = st.text(max_size=80) | st.lists(TEXT_PARTS, max_size=40).map("".join)
WORDPIECE = WordPiece(
    [*SPECIAL_PIECES, *"helotnd.!?好你。", *(f"##{c}" for c in "helotnd")]
)
CASED = WordPiece(WORDPIECE.pieces, lowercase=False)


@given(text=TEXTS)
@example(text="")
@example(text="\ufeff")
@example(text="One.\x00 Two. Three.")
@example(text="One. 𝒳𝒴. Two.")
def test_sentences_partition_all_but_white_space(text):
    sentences = split_sentences(text)
    covered = set()
    end_of_last = 0
    for start, end in sentences:
        assert end_of_last <= start < end <= len(text)
        assert text[start:end] == text[start:end].strip()
        covered.update(range(start, end))
        end_of_last = end
    left_out = [c for i, c in enumerate(text) if i not in covered]
    assert "".join(left_out).strip() == ""


@given(text=TEXTS)
@example(text="One.\x00 Two. Three.")
@example(text="Él fue. Ése no. 𝒳𝒴. Two. 你好。 Three is here.")
def test_starts_are_those_of_blingfires_own_package(text):
    expected = []
    if text.strip():
        plain = text.translate(chunking._PLAIN)
        _, ranges = blingfire.text_to_sentences_and_offsets(plain)
        expected = [0, *(start for start, _ in ranges[1:])]
    assert chunking._blingfire_starts(text) == expected


@given(text=TEXTS)
@example(text="One.\u2420Two is here.")  # A letter for BERT, a space for blingfire.
def test_wordpieces_of_a_text_are_those_of_its_sentences(text):
    for wordpiece in (WORDPIECE, CASED):
        whole = wordpiece.encode(text)
        parts = [
            (piece, (start + begin, end + begin))
            for begin, stop in split_sentences(text)
            for piece, (start, end) in pairs(wordpiece.encode(text[begin:stop]))
        ]
        assert parts == pairs(whole)


def pairs(encoding):
    offsets = map(tuple, encoding.offsets.tolist())
    return list(zip(encoding.ids.tolist(), offsets, strict=True))


# Texts, parted where a sentence begins.
SENTENCES = (
    "गाँव नदी के किनारे है।| वहाँ मेला लगता है॥| सब आते हैं।",
    "یہ ایک گاؤں ہے۔| کیا آپ آئے؟| ہاں۔",
    "Dr. Smith went to the U.S. in 1990.| Prices rose 3.5 percent!| Why?| Nobody said.",
    "Ōsaka has 𝒳.| Élan has 😀.| Ça va.",
    "First line|\n\nSecond line",
    "수도이다.| 1394년에 정했다!| 2021. 3. 5. 발표했다.[1]| 3월이다.| 간다.|왔다.",
    "“간다.”라고 했다.| 제3조. 3.1 운동",
    "東京は首都である。|人口は1400万人！",
    "the flow (fig. 3) is laminar .| it was seen by j. doe et al. in 1960 .| é!",
    "i saw it.| he did not, e.g. then.",
    "  no stop at the end ",
    " \n ",
)


def test_sentences_of_plain_text():
    for parted in SENTENCES:
        text = parted.replace("|", "")
        expected = [part.strip() for part in parted.split("|") if part.strip()]
        assert [text[start:end] for start, end in split_sentences(text)] == expected


LENGTHS = st.lists(st.integers(0, 40), max_size=30)


def packing_loop(title_length, sentence_lengths, chunk_length):
    """Puts one sentence after the other into the last block where it fits."""
    packed = []
    for index, length in enumerate(sentence_lengths):
        block = packed[-1] if packed else None
        total = sum(sentence_lengths[i] for i in block) if block else 0
        if block and 3 + title_length + total + length <= chunk_length:
            block.append(index)
        else:
            packed.append([index])
    return packed


@given(st.integers(0, 20), LENGTHS, st.integers(4, 60))
def test_packing_equals_a_plain_loop(title_length, lengths, chunk_length):
    packed = pack(title_length, lengths, chunk_length)
    assert [list(block) for block in packed] == packing_loop(
        title_length, lengths, chunk_length
    )


def test_a_block_without_room_is_refused():
    with refused(r"chunk length above 3.*got 3"):
        pack(0, [1], 3)
