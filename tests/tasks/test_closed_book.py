import re

import pytest
import seqio
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.questions import Question
from tasks.closed_book import register_closed_book, text_of_pattern
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("registry")

QUESTIONS = [
    Question("a", 0, "Wo liegt Čudo?", ("am Hult", "Hult"), "train"),
    Question("b", 1, "Who drew Ansk?", ("Maria Brel", "Brel"), "dev"),
    # The same words, asked twice: other answers count.
    Question("c", 2, "Who drew Ansk?", ("Karel",), "dev"),
    Question("d", 3, "When?", ("Sept?(ember)?", "fall"), "dev", None, None, True),
    Question("e", 4, "When?", ("17[5-9]\\d",), "train", None, None, True),
]


def load(name, split):
    task = seqio.get_mixture_or_task(name)
    dataset = task.get_dataset(split=split, shuffle=False)
    return list(dataset.as_numpy_iterator())


def test_examples_are_text_to_text_in_bytes():
    assert register_closed_book("asked", QUESTIONS) == "asked"
    first, second = load("asked", "train")
    # ByT5: bytes behind three special ids, the end of the text is 1.
    inputs = [byte + 3 for byte in "Wo liegt Čudo?".encode()]
    assert first["inputs"].tolist() == [*inputs, 1]
    assert first["targets"].tolist() == [byte + 3 for byte in b"am Hult"] + [1]
    assert first["answers"].tolist() == [b"am Hult", b"Hult"]
    assert second["targets_pretokenized"] == b"1750"


def test_a_prompt_stands_in_front_of_every_question_in_any_vocabulary():
    vocabulary = seqio.ByteVocabulary(extra_ids=7)
    register_closed_book("asked", QUESTIONS, vocabulary, prompt="trivia question: ")
    asked = [
        example["inputs_pretokenized"].decode() for example in load("asked", "dev")
    ]
    assert asked == [f"trivia question: {q.question}" for q in QUESTIONS[1:4]]
    task = seqio.get_mixture_or_task("asked")
    assert task.output_features["inputs"].vocabulary is vocabulary
    assert task.output_features["targets"].vocabulary is vocabulary
    with refused("got 'asked'"):
        register_closed_book("asked", QUESTIONS)


def test_exact_match_is_that_of_the_reader():
    register_closed_book("asked", QUESTIONS)
    evaluator = seqio.Evaluator(
        "asked",
        seqio.EncDecFeatureConverter(pack=False),
        eval_split="dev",
        sequence_length={"inputs": 64, "targets": 32},
    )
    vocabulary = seqio.ByteVocabulary()

    def score(*predictions):
        def predict(dataset):
            ids = [vocabulary.encode(prediction) for prediction in predictions]
            assert len(list(dataset)) == len(ids)
            longest = max(map(len, ids))
            return [(i, row + [0] * (longest - len(row))) for i, row in enumerate(ids)]

        metrics, _ = evaluator.evaluate(compute_metrics=True, predict_fn=predict)
        return metrics.result()["asked"]["exact_match"]

    # Any answer counts, in any spelling that normalises to it.
    assert score("The Brel.", "karel", "Sep. or so") == 100
    # Those of the other question with the same words do not.
    assert score("Karel", "Brel", "fall") == pytest.approx(100 / 3)
    assert score("Maria", "Karel of Ansk", "in September") == 0


def test_patterns_without_words_are_left_out_of_training(caplog):
    odd = ("[^a-z]{3}", "(", "(a)\\1")
    questions = [
        Question("x", 0, "Who?", odd, "train", None, None, True),
        Question("y", 1, "Who?", odd, "dev", None, None, True),
        Question("z", 2, "Who?", (*odd, "Brel"), "train", None, None, True),
    ]
    register_closed_book("asked", questions)
    assert [example["id"] for example in load("asked", "train")] == [b"z"]
    assert [example["id"] for example in load("asked", "dev")] == [b"y"]
    assert "asked: left out 1 questions" in caplog.text


TEXTS = {
    "Saudi Arabia": "Saudi Arabia",
    "Sept?(ember)?|Feb(ruary)?": "September",
    r"New\s?York": "New York",
    r"(5,?778|6,?[05]00)\s*K": "5,778 K",
    r"\b134\b|56\.7": "134",
    ".*Eureka.*": "Eureka",
    "Samuel.*Clemens": "Samuel Clemens",
    "9[^0-9]*Aug(ust)?": "9 August",
    r"U\.?S\.?A?": "U.S.A",
    "D.C.": "D.C.",
    "(?:Dr )?Watson(?! Inc)": "Dr Watson",
    "L[oø]n": "Lon",
    r"1\d{3}": "1000",
    "(?i:brel)": "brel",
    "서울|부산": "서울",
    "red( stripe| color)?$": "red stripe",
    "Maria (?=Dorm)": None,  # Nothing that ends so can match.
    "a{0}b": "b",
    "(": None,
    "": None,
    r"(a)\1": None,
    r"\w+": None,
    "[^a]": None,
}


def test_the_text_of_a_pattern():
    assert {pattern: text_of_pattern(pattern) for pattern in TEXTS} == TEXTS


atoms = st.sampled_from(
    ["Ansk", "a", " ", ".", r"\s", r"\d", "[0-9]", "[xyz]", r"\.", "é", r"\b", "^", "$"]
)
expressions = st.recursive(
    atoms,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=3).map("".join),
        st.lists(parts, min_size=2, max_size=3).map("|".join),
        parts.map("({})".format),
        st.tuples(parts, st.sampled_from("?*+")).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=6,
)


@given(expressions)
def test_a_text_of_a_pattern_is_always_a_right_answer(pattern):
    text = text_of_pattern(pattern)
    if text is not None:
        flags = re.IGNORECASE | re.MULTILINE
        assert re.compile(pattern, flags).match(text)
        assert text == " ".join(text.split())


@given(st.text(min_size=1).map(lambda text: " ".join(text.split())).filter(len))
def test_plain_words_are_their_own_text(words):
    assert text_of_pattern(re.escape(words)) == words
