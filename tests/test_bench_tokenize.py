"""What `bench.tokenize` says of TF-Text's tokenizer, and why it is not used."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import tokenize
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
PIECES = [
    *SPECIAL_PIECES,
    *(_LETTERS + "0123456789" + "!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~ßςσ½"),
    *(f"##{character}" for character in _LETTERS + "0123456789ßςσ½"),
]
VOCABULARY = WordPiece(PIECES)
FAST = tokenize.fast_bert(VOCABULARY.pieces)


def exact(texts):
    return [encoding.ids for encoding in VOCABULARY.encode_batch(texts)]


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("½", "compatibility"),
        ("straße", "case folding"),
        ("σς", "case folding"),
        ("a\x07b", "control"),
        ("a\ue000b", "private"),
        ("n" * 150, "words of 101"),
    ],
)
def test_the_cause_of_other_ids_is_found(word, cause):
    differences = tokenize.Differences(exact, FAST)
    differences.add([f"it is {word} here", "nothing here", "an ordinary é"])
    assert (differences.passages, differences.different) == (3, 1)
    [found] = differences.causes
    assert found.startswith(cause)


def test_a_passage_counts_once_for_each_cause():
    differences = tokenize.Differences(exact, FAST)
    differences.add(["straße ½ ½ ß", "½"])
    counted = {cause.split()[0]: n for cause, n in differences.causes.items()}
    assert counted == {"compatibility": 2, "case": 1}
    [compatibility] = [c for c in differences.examples if c.startswith("compat")]
    # By word: those that occur twice in a passage count once.
    assert differences.examples[compatibility] == {"½": 2}


ASCII = st.text(st.characters(max_codepoint=127), max_size=80)
LONG = st.integers(95, 105).map(lambda length: "ab " + "n" * length)


@given(texts=st.lists(ASCII | LONG, max_size=5))
def test_both_agree_where_they_must(texts):
    texts = [text for text in texts if tokenize.must_agree(text)]
    for mine, theirs in zip(exact(texts), FAST(texts), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@given(texts=st.lists(st.text(max_size=40) | ASCII | LONG, max_size=6))
def test_the_combined_path_is_exact(texts):
    made = tokenize.combined(FAST, exact)(texts)
    for mine, expected in zip(made, exact(texts), strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize(
    ("text", "sure"),
    [
        ("Plain, 1984.\tAnd\nso on", True),
        ("é", False),
        ("a\x0bb", False),
        ("n" * 100, True),
        ("n" * 101, False),
    ],
)
def test_what_is_sure_to_agree(text, sure):
    assert tokenize.must_agree(text) == sure


def test_all_take_part_and_give_the_same_ids_of_plain_text():
    texts = ["plain text", "more of it"]
    entered = tokenize.contestants(VOCABULARY)
    for contestant in entered.values():
        ids = contestant.start()(texts)
        assert [list(of_text) for of_text in ids] == [list(i) for i in exact(texts)]
    seconds = tokenize.time_texts(entered, [texts, texts])
    assert seconds.keys() == entered.keys()
    assert all(value > 0 for value in seconds.values())


def test_a_source_without_passages_is_refused(tmp_path, monkeypatch, capsys):
    corpus, vocabulary = tmp_path / "empty.jsonl", tmp_path / "vocab.txt"
    corpus.write_text('{"title": "no text"}\n')
    VOCABULARY.save(vocabulary)
    command = ["bench.tokenize", str(corpus), f"--vocabulary={vocabulary}", "--quick"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as stopped:
        tokenize.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: expected passages")
