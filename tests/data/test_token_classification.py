"""Labels of wordpieces to spans, against the plain reading of BIO."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.token_classification import check_labels, windows, word_spans
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.errors import BadInputError

LETTERS = "bcdefgh"
VOCABULARY = WordPiece(
    [*SPECIAL_PIECES, *LETTERS, *(f"##{c}" for c in LETTERS), "the", "'", "s", "."]
)
LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-DATE", "I-DATE"]


def spans_of(text, labels):
    encoding = VOCABULARY.encode(text)
    return word_spans(text, encoding, VOCABULARY.is_inner[encoding.ids], labels)


@given(
    words=st.lists(
        st.tuples(st.text(LETTERS, min_size=2, max_size=4), st.sampled_from(LABELS)),
        max_size=12,
    ),
    noise=st.lists(st.sampled_from(LABELS), min_size=60, max_size=60),
)
def test_runs_of_one_type_are_names(words, noise):
    """One character a word: O, P for PER, L for LOC; capitals begin."""
    text = " ".join(word for word, _ in words)
    # Labels of inner pieces are noise that must not matter.
    labels = [
        label if place == 0 else noise.pop()
        for word, label in words
        for place in range(len(word))
    ]
    code = {"O": "o", "B-PER": "P", "I-PER": "p", "B-LOC": "L", "I-LOC": "l"}
    coded = "".join(
        code.get(label, "D" if label[0] == "B" else "d") for _, label in words
    )
    starts = np.cumsum([0, *(len(word) + 1 for word, _ in words)]).tolist()
    expected = [
        (
            starts[m.start()],
            starts[m.end()] - 1,
            {"p": "PER", "l": "LOC"}[m[0][-1].lower()],
        )
        for m in re.finditer("[Pp]p*|[Ll]l*|[Dd]d*", coded)
        if m[0][0] not in "Dd"
    ]
    assert [tuple(span) for span in spans_of(text, labels)] == expected


def test_articles_and_possessives_are_no_part_of_a_name():
    text = "the bc de's fg. 's"
    labels = ["B-PER", "I-PER", "O", "I-PER", "O", "I-PER", "I-PER"]
    labels += ["O", "O", "O", "B-LOC", "I-LOC"]
    encoding = VOCABULARY.encode(text)
    assert len(encoding) == len(labels)
    assert [text[a:b] for a, b, _ in spans_of(text, labels)] == ["bc de"]


@given(
    is_inner=st.lists(st.booleans(), max_size=60).map(lambda x: np.array(x, bool)),
    room=st.integers(1, 9),
)
def test_windows_cover_everything_and_part_words_only_where_they_must(is_inner, room):
    found = windows(is_inner, room)
    places = [place for part in found for place in range(part.start, part.stop)]
    assert places == list(range(len(is_inner)))
    assert all(0 < part.stop - part.start <= room for part in found)
    for part in found[:-1]:
        following = is_inner[part.start + 1 : part.start + room + 1]
        # As long as it can be without parting a word; one is parted only if too long.
        later = [part.start + 1 + i for i in np.flatnonzero(~following)]
        assert part.stop == (later[-1] if later else part.start + room)


def test_labels_of_another_kind_are_refused():
    check_labels(["O", "B-PER", "I-PER"], "here")
    check_labels(["I-PER", "O"], "here")
    for labels in (["LABEL_0", "LABEL_1"], ["O"], [], ["O", "PER"], ["O", "S-PER"]):
        with pytest.raises(BadInputError, match=r"expected labels .* in here, got "):
            check_labels(labels, "here")
