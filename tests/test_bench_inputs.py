"""Benches of what goes into a model: tokenizers, stored examples, labels of answers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import examples, finetune_inputs, tokenize
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from tests.data.conftest import small_store

__all__ = ["small_store"]

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


def test_the_cause_of_other_ids_is_found():
    for word, cause in {
        "½": "compatibility",
        "straße": "case folding",
        "σς": "case folding",
        "a\x07b": "control",
        "a\ue000b": "private",
        "n" * 150: "words of 101",
    }.items():
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


@given(texts=st.lists(st.text(max_size=40) | ASCII | LONG, max_size=6))
def test_both_agree_where_they_must_and_the_combined_path_is_exact(texts):
    sure = [text for text in texts if tokenize.must_agree(text)]
    for mine, theirs in zip(exact(sure), FAST(sure), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    made = tokenize.combined(FAST, exact)(texts)
    for mine, expected in zip(made, exact(texts), strict=True):
        np.testing.assert_array_equal(mine, expected)


def test_what_is_sure_to_agree():
    for text, sure in {
        "Plain, 1984.\tAnd\nso on": True,
        "é": False,
        "a\x0bb": False,
        "n" * 100: True,
        "n" * 101: False,
    }.items():
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
    with pytest.raises(SystemExit, match=r"^2$"):
        tokenize.main()
    assert capsys.readouterr().err.startswith("error: expected passages")


def test_both_ways_hold_the_same_rows(small_store, tmp_path):
    found = examples.measure(small_store, 1, tmp_path)
    rows = {(one.name, one.stored): one for one in found}
    for name in ("masked sentences", "inverse cloze"):
        whole, references = rows[name, "whole"], rows[name, "references"]
        assert whole.rows == references.rows > 20
        # Headers of so few rows weigh most.
        assert whole.row_bytes > 4 * references.row_bytes
    # By hand: query, masks and block; block, two places and two more, or a flag.
    assert {key: one.wikipedia_bytes for key, one in rows.items()} == {
        ("masked sentences", "whole"): 4 * (96 + 3 * 10 + 1),
        ("inverse cloze", "whole"): 4 * (64 + 2 * 288 + 1),
        ("masked sentences", "references"): 4 + 2 + 2 + 1 + 1,
        ("inverse cloze", "references"): 4 + 2 + 2 + 1,
    }
    text = examples.as_text(found, "python -m bench.examples CORPUS")
    assert "| 508 | 41.7 GB |" in text
    assert "| 9 | 0.7 GB |" in text


@pytest.mark.full
@pytest.mark.parametrize("ahead", [False, True])
def test_an_update_and_its_labels_are_timed(tmp_path, ahead):
    sizes = finetune_inputs.Sizes(
        blocks=60, retrieved=20, questions=2, hidden=16, joined=64
    )
    corpus = tmp_path / "corpus"
    finetune_inputs.make_corpus(corpus, sizes)
    found = finetune_inputs.measure(tmp_path / "run", corpus, sizes, ahead, updates=4)
    assert found["update"] > found["labels"] > 0
    assert found["search"] <= found["update"]
