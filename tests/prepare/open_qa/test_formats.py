"""Readers of published files, on small ones in exactly their format."""

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from realm_jax.prepare.open_qa import formats
from realm_jax.prepare.open_qa.formats import Record
from tests.refused import refused

LINES = (
    '{"question": "who drew ansk", "answer": ["Maria Brel", "Brel"]}\n\n'
    '{"question": "wo liegt Čudo", "answers": ["am Hult"], "id": "ignored"}\r\n'
    '{"question": "서울은 어디에", "answer": "대한민국"}\n'
)
_WEB = {
    "who drew ansk?": '(list (description "Maria Brel") (description Ansk))',
    "what river is near ansk?": '(list (description "Hult (river)") '
    '(description "the \\"Old\\" Hult"))',
}
WEB = json.dumps([{"targetValue": v, "utterance": q} for q, v in _WEB.items()])
TREC = (
    "1756\tfactoid\tWhen is Market week in Ansk?\tSept?(ember)?|Feb(ruary)?\n"
    '1535\tfactoid\tWho painted "The Mills"?\t"?Brel"?\n'
)
TREC_OF_DPR = (
    "When is Market week in Ansk?\t['Sept?(ember)?|Feb(ruary)?']\n"
    'Who painted the mills?\t"[\'\\\\s?""Brel""\', ""O\'Brel""]"\n'
)


def trivia(name, question, value, aliases, normalized):
    answer = {"Aliases": aliases, "NormalizedAliases": normalized, "Value": value}
    answer["NormalizedValue"] = value.lower()
    asked = {"Question": question, "QuestionId": name, "SearchResults": []}
    return {"Answer": answer, **asked}


HULTS = ["The Hult", "Hult", "Hult (river)"], ["hult river", "hult"]
MILLS = [], ["seven mills", "7 mills"]
ASKED = [
    trivia("tc_1", "On which river is Ansk?", "Hult", *HULTS),
    trivia("tc_9", "What burnt down at Ansk?", "Seven mills", *MILLS),
]
TRIVIA = json.dumps({"Data": ASKED, "Version": 1.0})
HULT = {"text": "Hult", "answer_start": 28}
ANSWERABLE = {
    "id": "56be4db0acb8001400a502ec",
    "question": "Where is Ansk?",
    "answers": [{"text": "on the river Hult", "answer_start": 15}, HULT, HULT],
}
IMPOSSIBLE = {
    "id": "5ad39d53604f3c001a3fe8d1",
    "question": "Who sank Ansk?",
    "is_impossible": True,
    "plausible_answers": [HULT],
    "answers": [],
}
PARAGRAPH = {"context": "Ansk is on the Hult.", "qas": [ANSWERABLE, IMPOSSIBLE]}
SQUAD = json.dumps({"data": [{"title": "Ansk", "paragraphs": [PARAGRAPH]}]})
PATTERN = "Sept?(ember)?|Feb(ruary)?"


def read(reader, text):
    return list(reader(text, "FILE"))


def test_each_format_is_read():
    lines = [
        Record("who drew ansk", ("Maria Brel", "Brel")),
        Record("wo liegt Čudo", ("am Hult",)),
        Record("서울은 어디에", ("대한민국",)),
    ]
    assert read(formats.question_answer_lines, LINES) == lines
    assert read(formats.web_questions, LINES) == lines
    assert read(formats.web_questions, WEB) == [
        Record("who drew ansk?", ("Maria Brel", "Ansk")),
        Record("what river is near ansk?", ("Hult (river)", 'the "Old" Hult')),
    ]
    # The value is the first of the answers.
    trivia = ("Hult", "The Hult", "Hult (river)"), ("Seven mills", "seven mills")
    assert read(formats.trivia_qa, TRIVIA) == [
        Record("On which river is Ansk?", trivia[0], id="tc_1"),
        Record("What burnt down at Ansk?", (*trivia[1], "7 mills"), id="tc_9"),
    ]
    assert read(formats.squad, SQUAD) == [
        Record("Where is Ansk?", ("on the river Hult", "Hult"), id=ANSWERABLE["id"]),
        Record("Who sank Ansk?", (), id=IMPOSSIBLE["id"]),
    ]
    entities = json.dumps([{"question": "Where?", "answers": ["Hult", "Fosk"]}])
    expected = [Record("Where?", ("Hult", "Fosk"))]
    assert read(formats.question_answer_list, entities) == expected


descriptions = st.text(
    st.characters(codec="utf-8", exclude_characters='\\"'), min_size=1
).filter(str.strip)


@given(st.lists(descriptions, min_size=1, max_size=4))
def test_any_quoted_description_is_read_back(answers):
    target = "(list " + " ".join(f'(description "{a}")' for a in answers) + ")"
    text = json.dumps([{"utterance": "q", "targetValue": target}])
    assert read(formats.web_questions, text) == [Record("q", tuple(answers))]


def drqa_answers(target):
    """What the script of DrQA makes of a targetValue; ORQA's files come from it."""
    found = re.findall(
        r"(?<=\(description )(.+?)(?=\) \(description|\)\)$)", target, re.DOTALL
    )
    return tuple(answer.replace('"', "") for answer in found)


names = st.sampled_from(["Ansk", "Hult (river)", "Brel, M.", "a) b", "St. Čudo", "("])


@given(st.lists(names, min_size=1, max_size=4))
def test_answers_are_those_of_the_published_conversion(answers):
    # Words with spaces or brackets are quoted, as Stanford's tool does it.
    shown = [f'"{a}"' if set(a) & set(" ()") else a for a in answers]
    target = "(list " + " ".join(f"(description {a})" for a in shown) + ")"
    text = json.dumps([{"utterance": "q", "targetValue": target}])
    (record,) = read(formats.web_questions, text)
    assert record.answers == drqa_answers(target) == tuple(answers)


def test_curated_trec_in_each_of_its_forms():
    asked = {"question": "When is Market week in Ansk?"}
    expected = [Record(asked["question"], (PATTERN,))]
    for text in (
        TREC.splitlines()[0],
        TREC_OF_DPR.splitlines()[0],
        json.dumps(asked | {"answer": [PATTERN]}),
        json.dumps([asked | {"answers": [PATTERN], "positive_ctxs": []}]),
    ):
        assert read(formats.curated_trec, text) == expected
    # Quotes in tab-separated values.
    _, painted = read(formats.curated_trec, TREC)
    assert painted == Record('Who painted "The Mills"?', ('"?Brel"?',))
    _, painted = read(formats.curated_trec, TREC_OF_DPR)
    assert painted == Record("Who painted the mills?", (r'\s?"Brel"', "O'Brel"))


def test_a_wrong_record_is_named():
    lines, web = formats.question_answer_lines, formats.web_questions
    trec = formats.curated_trec
    target = '[{"utterance": "q", "targetValue": "Ansk"}]'
    no_answer = '{"Data": [{"Question": "q", "QuestionId": "a"}]}'
    nothing = TRIVIA.replace('"Seven mills"', '""')
    nothing = nothing.replace('["seven mills", "7 mills"]', "[]")
    answerable = SQUAD.replace('"is_impossible": true', '"is_impossible": false')
    for reader, text, message in [
        (lines, '{"question": "q"}', "FILE:1: .*'answers'"),
        (lines, '\n{"answer": ["a"]}', "FILE:2: .*'question'"),
        (lines, "{", "FILE:1: expected a JSON object"),
        (web, "[1]", r"FILE\[0\]: expected an object, got 1"),
        (web, "[", "expected JSON in FILE"),
        (web, target, r"FILE\[0\]: expected 'targetValue' to be a list of at least"),
        (trec, "q", "FILE:1: expected number, kind, question"),
        (trec, "q\t['a'", "FILE:1: expected number, kind, question"),
        (trec, "q\t[1]", "FILE:1: expected 'answers'"),
        (trec, "1\tfactoid\tq\t ", "FILE:1: expected 'answer'"),
        (formats.trivia_qa, "{}", "FILE: expected an object with 'Data'"),
        (formats.trivia_qa, no_answer, r"FILE Data\[0\]: .* an object with 'Answer'"),
        (formats.trivia_qa, nothing, r"FILE Data\[1\]: expected 'Answer' to be a list"),
        (formats.squad, '{"data": 1}', "FILE data: expected a list, got 1"),
        (formats.squad, answerable, r"paragraphs\[0\] qas\[1\]: expected an answer"),
        (formats.question_answer_list, '{"a": 1}', "FILE: expected a list"),
    ]:
        with refused(message):
            read(reader, text)
