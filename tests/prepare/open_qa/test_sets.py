"""Sets in the places and under the names in which they are published."""

import collections
import json
import shutil

import pytest

from realm_jax.data.questions import Question, read_questions
from realm_jax.prepare.open_qa import __main__ as command
from realm_jax.prepare.open_qa.sets import SETS, is_dev, read_set
from tests.json_lines import write_lines
from tests.prepare.tfds_datasets import features_of, generate
from tests.refused import refused

# Published with other implementations of FarmHash's fingerprint64 (those of Guava and
# of Airship's SDKs), as signed or unsigned 64 bits.
FINGERPRINTS = {
    "": 11160318154034397263,
    "test": 8581389452482819506,
    "test" * 8: -4196240717365766262,
    "test" * 64: 3500507768004279527,
    "Q": 13816109650407654260,
    "WW5": 6316074107149058620,
    "wi=%v]GoIPI6zm[Rrgmq]7J?.|": 8222623341199956836,
    "F7479877-4690-4A44-AFC9-8FE987EA512F:some_other_id": 6862335115798125349,
}


def test_dev_is_where_published_fingerprints_end_in_0():
    expected = [h % 2**64 % 100_000 % 10 == 0 for h in FINGERPRINTS.values()]
    assert any(expected)
    assert is_dev(list(FINGERPRINTS)).tolist() == expected


def ask(count, what="drew", field="answer"):
    return [{"question": f"who {what} {i}", field: [f"Brel {i}"]} for i in range(count)]


@pytest.fixture
def nq(tmp_path):
    write_lines(tmp_path / "nq/NQ-open.train.jsonl", ask(300))
    write_lines(tmp_path / "nq/NQ-open.dev.jsonl", ask(7, "sank"))
    return tmp_path / "nq"


def test_nq_open_is_split_as_orqa_did(nq, tmp_path):
    questions = read_set("nq_open", nq)
    texts = collections.defaultdict(set)
    for question in questions:
        texts[question.split].add(question.question)
    train = {record["question"] for record in ask(300)}
    # Disjoint, and together they are the published train split.
    assert texts["train"] & texts["dev"] == set()
    assert texts["train"] | texts["dev"] == train
    assert is_dev(sorted(texts["dev"])).all()
    assert not is_dev(sorted(texts["train"])).any()
    assert 10 < len(texts["dev"]) < 60
    # The official dev questions are the test.
    assert texts["test"] == {record["question"] for record in ask(7, "sank")}
    assert [question.index for question in questions] == list(range(307))
    assert [q.id for q in questions[:3]] == [f"nq_open-train-{i}" for i in range(3)]
    assert (questions[-1].id, questions[-1].answers) == ("nq_open-test-6", ("Brel 6",))
    # Packed files in a folder below are found.
    write_lines(tmp_path / "top/v1/nq_open/NQ-open.train.jsonl.gz", ask(300))
    shutil.copy(nq / "NQ-open.dev.jsonl", tmp_path / "top/v1/nq_open")
    assert read_set("nq_open", tmp_path / "top") == questions


def test_the_same_question_twice_is_two_questions(nq):
    twice = {"question": "who drew 1", "answer": ["Dorm"]}
    write_lines(nq / "NQ-open.train.jsonl", [*ask(2), twice])
    _, first, second = (q for q in read_set("nq_open", nq) if "drew" in q.question)
    assert first.question == second.question
    assert first.id != second.id
    assert (first.answers, second.answers) == (("Brel 1",), ("Dorm",))


def test_a_file_is_known_by_its_name(nq, tmp_path):
    train = read_set("nq_open", nq / "NQ-open.train.jsonl")
    assert {question.split for question in train} == {"train", "dev"}
    test = read_set("nq_open", nq / "NQ-open.dev.jsonl")
    assert {question.split for question in test} == {"test"}
    mine = write_lines(tmp_path / "mine.jsonl.gz", ask(300))
    files = {"test": nq / "NQ-open.dev.jsonl", "train": mine}
    assert read_set("nq_open", files) == read_set("nq_open", nq)


def test_a_set_with_a_dev_split_keeps_its_own(tmp_path):
    for split, count in {"train": 200, "dev": 4, "test": 3}.items():
        write_lines(tmp_path / f"WebQuestions.resplit.{split}.jsonl", ask(count, split))
    questions = read_set("web_questions", tmp_path)
    counts = collections.Counter(question.split for question in questions)
    assert counts == {"train": 200, "dev": 4, "test": 3}
    assert all(question.split in question.question for question in questions)


def test_entity_questions_are_about_their_relation(tmp_path):
    for split in ("train", "dev", "test"):
        for relation in ("P17", "P106"):
            path = tmp_path / f"dataset/{split}/{relation}.{split}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(ask(2, f"{split} {relation}", "answers")))
    questions = read_set("entity_questions", tmp_path)
    assert len(questions) == 12
    for question in questions:
        _, split, relation, row = question.question.split()
        assert (question.split, question.topic) == (split, relation)
        assert question.id == f"entity_questions-{split}-{relation}-{row}"


def test_curated_trec_has_patterns(tmp_path):
    (tmp_path / "large2180-train.tsv").write_text("1\tfactoid\tWhen?\tSept?|Feb\n")
    (question,) = read_set("curated_trec", tmp_path)
    assert question.answers_are_patterns
    assert question.answers == ("Sept?|Feb",)
    kinds = [kind for kind, known in SETS.items() if known.answers_are_patterns]
    assert kinds == ["curated_trec"]


def test_questions_without_an_answer_are_counted(tmp_path, caplog):
    unanswerable = {"id": "b", "question": "q", "answers": [], "is_impossible": True}
    answerable = {"id": "a", "question": "q", "answers": [{"text": "Hult"}]}
    data = [{"paragraphs": [{"qas": [unanswerable, answerable]}]}]
    (tmp_path / "dev-v2.0.json").write_text(json.dumps({"data": data}))
    (question,) = read_set("squad_open", tmp_path)
    assert (question.id, question.index, question.split) == ("a", 0, "test")
    assert "left out 1 of 2 questions" in caplog.text


def test_the_command_writes_what_stages_read(nq, tmp_path, capsys):
    output = tmp_path / "made/nq.jsonl"
    arguments = ["nq_open", "--source", str(nq), "--output", str(output)]
    assert command.main(arguments) == 0
    questions = read_set("nq_open", nq)
    assert read_questions(output) == questions
    dev = [question for question in questions if question.split == "dev"]
    assert read_questions(output, "dev") == dev
    assert f"dev: {len(dev)}, test: 7" in capsys.readouterr().out
    arguments[2] = str(tmp_path / "nowhere")
    assert command.main(arguments) == 2
    assert "expected NQ-open.train.jsonl and" in capsys.readouterr().err


def test_what_is_not_there_is_refused(nq):
    for kind, source, message in [
        ("nq", nq, r"expected a kind of questions \(nq_open.* got 'nq'"),
        ("json_lines", {"train": "a"}, "json_lines in one file"),
        ("nq_open", {"validation": "a"}, r"got \['validation'\]; name the splits"),
        ("nq_open", {}, "expected a file for any of train"),
        ("trivia_qa", nq, "expected unfiltered-web-train.json and .*nq, found"),
        ("nq_open", {"train": f"{nq}/none"}, "none, but it cannot be read"),
        ("curated_trec", "tfds:curated_trec", r"that TFDS has \(nq_open, web_q"),
        ("nq_open", f"tfds:natural@{nq}", "'natural' prepared in .*nq, found none"),
    ]:
        with refused(message):
            read_set(kind, source)
    shutil.copytree(nq, nq / "copy")
    with refused(r"once below .*, found NQ-open.train.jsonl"):
        read_set("nq_open", nq)
    shutil.rmtree(nq / "copy")
    for path in nq.iterdir():
        path.write_text("\n")
    with refused("expected questions of nq_open in"):
        read_set("nq_open", nq)


def test_natural_questions_of_tfds(nq, tmp_path):
    """Those of the published files, in the order of TFDS."""
    name = "natural_questions_open"
    splits = {"train": ask(300), "validation": ask(7, "sank")}
    generate(tmp_path / "whole", name, features_of(name), splits)
    source = f"tfds:{name}:1.0.0@{tmp_path}/whole"
    questions = read_set("nq_open", source)
    found, published = (
        {(q.question, q.answers, q.split) for q in asked}
        for asked in (questions, read_set("nq_open", nq))
    )
    assert found == published
    assert len({q.id for q in questions}) == len(questions) == 307
    assert questions == read_set("nq_open", source.replace(":1.0.0", ""))
    generate(tmp_path / "half", name, features_of(name), {"train": ask(3)})
    with refused(f"split 'validation' of {name} in .* train"):
        read_set("nq_open", f"tfds:{name}@{tmp_path}/half")


def trivia(name, value, aliases, normalized):
    unread = ("matched_wiki_entity_name", "normalized_matched_wiki_entity_name", "type")
    answer = dict.fromkeys(unread, "") | {"value": value, "aliases": aliases}
    answer |= {"normalized_value": value.lower(), "normalized_aliases": normalized}
    asked = {"question": f"Which river {name}?", "question_id": name, "answer": answer}
    return asked | {"question_source": "", "entity_pages": [], "search_results": []}


def test_trivia_qa_of_tfds(tmp_path):
    config = "unfiltered.nocontext"
    splits = {
        "train": [trivia("tc_7", "Hult", ["The Hult", "Hult"], ["hult"])],
        "validation": [trivia("tc_2", "Čudo", [], ["cudo"])],
        # Published without answers; never read.
        "test": [trivia("tc_3", "<unk>", [], [])],
    }
    features = features_of("trivia_qa", config=config)
    generate(tmp_path, "trivia_qa", features, splits, config)
    assert not is_dev(["Which river tc_7?"]).any()
    assert read_set("trivia_qa", f"tfds:trivia_qa/{config}@{tmp_path}") == [
        Question("tc_7", 0, "Which river tc_7?", ("Hult", "The Hult"), "train"),
        Question("tc_2", 1, "Which river tc_2?", ("Čudo", "cudo"), "test"),
    ]


def test_web_questions_and_squad_of_tfds(tmp_path, monkeypatch):
    url = {"url": "http://www.freebase.com/view/en/ansk"}
    asked = {
        split: [url | record for record in ask(2, split, "answers")]
        for split in ("train", "test")
    }
    generate(tmp_path, "web_questions", features_of("web_questions"), asked)
    answers = [{"text": "Hult", "answer_start": 3}, {"text": "Hult", "answer_start": 9}]
    where = {"title": "Ansk", "context": "On Hult, Hult!", "question": "Where?"}
    read = {
        split: [{"id": f"{split}-1", **where, "answers": answers}]
        for split in ("train", "validation")
    }
    features = features_of("squad", config="v1.1")
    generate(tmp_path, "squad", features, read, "v1.1")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    web = read_set("web_questions", "tfds:web_questions")
    test = sorted(q.question for q in web if q.split == "test")
    assert test == ["who test 0", "who test 1"]
    squad = read_set("squad_open", "tfds:squad/v1.1")
    assert [(q.id, q.answers, q.title) for q in squad] == [
        ("train-1", ("Hult",), None),
        ("validation-1", ("Hult",), None),
    ]
    with refused(r"of web_questions in squad/v1\.1, got the"):
        read_set("web_questions", "tfds:squad/v1.1")
