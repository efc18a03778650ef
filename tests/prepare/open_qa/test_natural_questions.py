import pathlib
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.prepare.open_qa.formats import natural_questions
from realm_jax.prepare.open_qa.sets import read_set
from tests.json_lines import write_lines
from tests.refused import refused

PAGE = "<P> Deadpool 2 came out on May 18 , 2018 in <B> the United States </B> . </P>"


def raw(name, *annotations, original=False, page=PAGE):
    """A record whose annotations have short answers at ranges of tokens."""
    tokens = page.split(" ")

    def place(start, end):
        return {"start_token": start, "end_token": end}

    whole = {"yes_no_answer": "NONE", "long_answer": place(0, len(tokens))}
    record = {"example_id": name, "question_text": f"when is {name}"}
    record["annotations"] = [
        whole | {"short_answers": [place(*span) for span in spans]}
        for spans in annotations
    ]
    if original:
        flagged = [{"token": t, "html_token": t.startswith("<")} for t in tokens]
        return record | {"document_tokens": flagged}
    return record | {"document_text": page}


def test_short_answers_of_all_annotations_are_kept(tmp_path):
    at = PAGE.split(" ").index("May")
    states = PAGE.split(" ").index("the")
    spans = [[(at, at + 4)], [(at, at + 4), (states - 1, states + 3)]]
    records = [raw(7, *spans), raw(8, [(1, 8)]), raw(9, [])]
    found = list(natural_questions(write_lines(tmp_path / "nq-dev-00.jsonl", records)))
    assert [record.id for record in found] == ["7", "8", "9"]
    assert found[0].question == "when is 7"
    # Tags inside an answer are no part of it, nor do they count.
    assert found[0].answers == ("May 18 , 2018", "the United States")
    assert found[1].answers == found[2].answers == ()


TOKENS = st.sampled_from(["a", "b", "<I>", "</I>", "c", ",", "1990"])


@given(st.lists(TOKENS, min_size=1, max_size=12), st.data())
def test_an_answer_is_kept_by_its_words(tokens, data):
    start = data.draw(st.integers(0, len(tokens) - 1))
    end = data.draw(st.integers(start + 1, len(tokens)))
    page = " ".join(tokens)
    with tempfile.TemporaryDirectory() as folder:
        forms = [
            raw(1, [(start, end)], original=form, page=page) for form in (False, True)
        ]
        path = write_lines(pathlib.Path(folder, "nq-dev-00.jsonl"), forms)
        simple, whole = natural_questions(path)
    assert simple == whole
    words = [t for t in tokens[start:end] if not t.startswith("<")]
    expected = (" ".join(words),) if 0 < len(words) <= 5 else ()
    assert simple.answers == expected


def test_a_folder_of_packed_files_is_split_as_nq_open(tmp_path, caplog):
    at = PAGE.split(" ").index("May")
    for shard in range(2):
        records = [raw(100 * shard + i, [(at, at + 4)]) for i in range(30)]
        write_lines(tmp_path / f"nq-train-0{shard}.jsonl.gz", records)
    write_lines(
        tmp_path / "nq-dev-00.jsonl.gz", [raw(900, [(at, at + 1)]), raw(901, [])]
    )
    questions = read_set("natural_questions", tmp_path)
    assert [q.id for q in questions if q.split == "test"] == ["900"]
    assert {q.split for q in questions} == {"train", "dev", "test"}
    assert len(questions) == 61
    assert "left out 1 of 62" in caplog.text


@pytest.mark.parametrize(
    "record",
    [
        {"question": "who", "answer": ["a"]},
        raw(1, [(3, 99)]),
        raw(1, [(-1, 2)]),
        raw(1, [("a", 2)]),
        raw(1, [(1, 2)]) | {"document_tokens": ["a"]},
        raw(1, [(1, 2)]) | {"annotations": None},
    ],
)
def test_another_format_is_refused(tmp_path, record):
    path = write_lines(tmp_path / "nq-dev-00.jsonl", [raw(0, []), record])
    with refused("nq-dev-00.jsonl:2: .*Natural Questions"):
        list(natural_questions(path))
