import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.data.documents import Document
from realm_jax.data.questions import (
    MAX_PATTERN_LENGTH,
    Question,
    cut_questions,
    decode_patterns,
    describe_unknown_titles,
    pattern_length,
    question_examples,
    question_specs,
    read_questions,
    require_patterns_fit,
    unknown_titles,
    write_questions,
)
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from tests.corpus_builder import build_corpus
from tests.refused import refused

FIRST = {
    "id": "a",
    "question": "On which river is Ansk?",
    "answers": ["Hult", "the Hult"],
    "title": "Ansk",
    "topic": "Towns",
    "split": "train",
}
SECOND = {"id": "b", "question": "Who drew?", "answers": ["Čudo"], "split": "dev"}
VOCABULARY = WordPiece([*SPECIAL_PIECES, "it", "burnt", "down", "."])


def write(tmp_path, *lines):
    path = tmp_path / "questions.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_reads_questions_with_their_rows(tmp_path):
    path = write(tmp_path, "", FIRST, "", SECOND)
    asked, answers = "On which river is Ansk?", ("Hult", "the Hult")
    first = Question("a", 0, asked, answers, "train", title="Ansk", topic="Towns")
    second = Question("b", 1, "Who drew?", ("Čudo",), "dev")
    assert read_questions(path) == [first, second]
    # The row counts in the file, not in the split.
    assert read_questions(path, "dev") == [second]


def test_a_wrong_line_is_named(tmp_path):
    for line, message in [
        ("{not json", ":2: expected a JSON object"),
        (SECOND | {"answers": []}, ":2: expected 'answers' to be a list of at least"),
        (SECOND | {"answers": "Čudo"}, ":2: expected 'answers'"),
        (SECOND | {"answers": [" "]}, ":2: expected 'answers'"),
        (SECOND | {"question": None}, ":2: expected 'question' to be a text, got None"),
        (SECOND | {"id": 7}, ":2: expected 'id' to be a text, got 7"),
        (SECOND | {"split": ""}, ":2: expected 'split'"),
        ({"question": "?", "answers": ["a"]}, ":2: expected a 'split', train, dev or"),
        (SECOND | {"answers_are_patterns": 1}, ":2: expected 'answers_are_patterns'"),
        (SECOND | {"id": "a"}, ":2: expected an id of its own, got 'a' as on line 1"),
    ]:
        with refused(f"/questions.jsonl{message}"):
            read_questions(write(tmp_path, FIRST, line))
    with refused("cannot be read"):
        read_questions(tmp_path / "nowhere.jsonl")
    path = write(tmp_path, FIRST, SECOND)
    with refused(r"split 'test' .* \['dev', 'train'\]"):
        read_questions(path, "test")
    with refused("got none"):
        read_questions(write(tmp_path, ""))


def test_a_file_without_ids_and_splits_is_of_the_split_that_is_asked_for(tmp_path):
    asked = [{"question": f"Who drew {n}?", "answers": ["Karel"]} for n in "abc"]
    questions = read_questions(write(tmp_path, *asked), "test")
    assert [q.split for q in questions] == ["test"] * 3
    assert [q.id for q in questions] == ["question-1", "question-2", "question-3"]
    # A single split says that the others were forgotten.
    with refused(":1: expected a 'split'"):
        read_questions(write(tmp_path, asked[0], FIRST), "test")


def test_arrays_hold_question_and_answers(small_store):
    vocabulary = small_store.vocabulary
    questions = [
        Question("a", 3, "Where is Ansk?", ("Hult", "Maria Čudo"), "dev"),
        Question("b", 5, "Who drew the bells of Ansk?", ("Karel",), "dev"),
    ]
    examples = question_examples(
        questions, vocabulary, query_length=12, max_answers=3, max_answer_length=16
    )
    assert examples["question_index"].tolist() == [3, 5]
    for row, question in enumerate(questions):
        pieces = vocabulary.encode(question.question).ids.tolist()[:10]
        expected = [vocabulary.cls, *pieces, vocabulary.sep]
        padding = [0] * (12 - len(expected))
        assert examples["question_ids"][row].tolist() == expected + padding
        answers = [vocabulary.encode(a).ids.tolist() for a in question.answers]
        answers += [[]] * (3 - len(answers))
        assert examples["answer_ids"][row].tolist() == [
            ids + [0] * (16 - len(ids)) for ids in answers
        ]


def test_answers_no_span_could_match_leave_their_place(small_store):
    vocabulary = small_store.vocabulary

    def kept(*answers, **room):
        question = Question("a", 0, "?", answers, "dev")
        [rows] = question_examples([question], vocabulary, **room)["answer_ids"]
        return rows.shape, [ids[ids > 0].tolist() for ids in rows if ids.any()]

    def ids(*answers):
        return [vocabulary.encode(answer).ids.tolist() for answer in answers]

    long = "Karel Čudo, Maria Brel and Maria Dorm of Ansk"
    assert len(vocabulary.encode(long)) > 10
    found = kept(long, "Hult", "HULT", "\u200b", "Brel", "Dorm")
    assert found == ((8, 10), ids("Hult", "Brel", "Dorm"))
    # An answer may fill its row.
    length = len(vocabulary.encode("Maria Dorm"))
    assert kept("Maria Dorm", max_answer_length=length)[1] == ids("Maria Dorm")
    assert kept("Maria Dorm", max_answer_length=length - 1)[1] == []
    # Of many the first are kept.
    years = [str(1500 + i) for i in range(12)]
    assert kept(*years, max_answers=4)[1] == ids(*years[:4])


def pattern_question(*patterns):
    return Question("p", 1, "When?", patterns, "train", answers_are_patterns=True)


def test_what_is_written_is_read_back(tmp_path):
    questions = [
        Question("a", 0, "Wo liegt Čudo?", ("am Hult", "Hult"), "train", topic="Towns"),
        # What str.splitlines takes for the end of a line is none here.
        Question("b", 1, 'Who said "\u2028"?', ("ten\n",), "dev", title="Čudo"),
        Question("p", 2, "When?", ("Sept?|\\d+",), "test", answers_are_patterns=True),
    ]
    path = tmp_path / "new/questions.jsonl"
    write_questions(path, questions)
    assert read_questions(path) == questions
    # Only what there is to say is said.
    first, *_ = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(first).keys() == {"id", "question", "answers", "split", "topic"}


def test_patterns_have_a_feature_of_their_own(small_store):
    texts = Question("a", 0, "Who?", ("Hult", "Brel"), "train")
    patterns = pattern_question("Sept?(ember)?", "Čudo|서울", "Sept?(ember)?")
    room = {"max_answers": 3, "max_pattern_length": 20}
    examples = question_examples([texts, patterns], small_store.vocabulary, **room)
    assert {name: array.shape[1:] for name, array in examples.items()} == {
        name: spec.shape for name, spec in question_specs(**room).items()
    }
    none, both = map(decode_patterns, examples["answer_patterns"])
    assert (none, both) == ((), ("Sept?(ember)?", "Čudo|서울"))
    assert examples["answer_ids"][0].any()
    assert not examples["answer_ids"][1].any()


def test_sets_without_patterns_have_no_room_for_them(small_store):
    texts = Question("a", 0, "Who?", ("Hult",), "train")
    assert pattern_length([texts]) == 0
    assert pattern_length([texts, pattern_question("Hult")]) == MAX_PATTERN_LENGTH
    assert "answer_patterns" not in question_specs()
    # Enough to ask them.
    asked = question_examples([pattern_question("Hult")], small_store.vocabulary)
    assert asked.keys() == question_specs().keys()
    none = question_examples([], small_store.vocabulary)
    assert {name: (array.shape, array.dtype) for name, array in none.items()} == {
        name: ((0, *spec.shape), spec.dtype) for name, spec in question_specs().items()
    }
    with refused("query length of 2"):
        question_examples([texts], small_store.vocabulary, query_length=2)


def test_a_pattern_that_does_not_fit_is_refused(small_store):
    for pattern in ("Feb(ruary)?", "a\0b"):
        asked = [pattern_question("ok", pattern)]
        with refused(r"at most 10 char.* question 'p'; raise"):
            question_examples(asked, small_store.vocabulary, max_pattern_length=10)
    require_patterns_fit([pattern_question("Feb(ruary)")], 10)


def asked(*titles):
    return [Question(str(i), i, "?", ("x",), "test", t) for i, t in enumerate(titles)]


def test_unknown_articles_are_counted_and_a_few_are_named():
    questions = asked("graz", "Wien_", None, "A", "A", "B", "C", "D", "E")
    line = describe_unknown_titles(questions, {"Graz", "Wien"}) or ""
    assert line.startswith("6 of 8 questions with a title name an article")
    assert ": 'A', 'B', 'C' and 2 more;" in line
    assert describe_unknown_titles(questions[:3], {"Graz", "Wien"}) is None


def test_a_corpus_says_which_articles_it_has(tmp_path):
    documents = [
        Document(title, "It burnt down. " * 5, title) for title in ("Čerkov", "R & B")
    ]
    corpus = build_corpus(documents, tmp_path / "corpus", VOCABULARY, chunk_length=9)
    assert corpus.num_blocks > len(documents)
    known = asked("C\u030cerkov", "R_&amp;_B", " r  & B")
    assert unknown_titles(corpus, known) is None
    assert "1 of 4" in (unknown_titles(corpus, [*known, *asked("Q")]) or "")
    assert unknown_titles(None, asked(None)) is None  # pyright: ignore


@given(st.lists(st.integers(0, 5), min_size=1), st.integers(3, 12))
def test_cut_questions_are_those_of_shorter_examples(counts, length):
    questions = [
        Question("a", 0, "it burnt down " * count, ("it",), "train") for count in counts
    ]
    whole, shorter = (
        question_examples(questions, VOCABULARY, query_length=size)["question_ids"]
        for size in (12, length)
    )
    np.testing.assert_array_equal(cut_questions(whole, length), shorter)
