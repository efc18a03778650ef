"""Readers of published files, on small ones in exactly their format."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.errors import BadInputError
from realm_jax.prepare.open_qa import formats
from realm_jax.prepare.open_qa.formats import Record

LINES = (
    '{"question": "who drew ansk", "answer": ["Maria Brel", "Brel"]}\n\n'
    '{"question": "wo liegt Čudo", "answers": ["am Hult"], "id": "ignored"}\r\n'
    '{"question": "서울은 어디에", "answer": "대한민국"}\n'
)
WEB = json.dumps(
    [
        {
            "url": "http://www.freebase.com/view/en/ansk",
            "targetValue": '(list (description "Maria Brel") (description Ansk))',
            "utterance": "who drew ansk?",
        },
        {
            "url": "http://www.freebase.com/view/en/hult",
            "targetValue": (
                '(list (description "Hult (river)") (description "the \\"Old\\" Hult"))'
            ),
            "utterance": "what river is near ansk?",
        },
    ]
)
TREC = (
    "1756\tfactoid\tWhen is Market week in Ansk?\tSept?(ember)?|Feb(ruary)?\n"
    '1535\tfactoid\tWho painted "The Mills"?\t"?Brel"?\n'
)
TREC_OF_DPR = (
    "When is Market week in Ansk?\t['Sept?(ember)?|Feb(ruary)?']\n"
    'Who painted the mills?\t"[\'\\\\s?""Brel""\', ""O\'Brel""]"\n'
)
TRIVIA = json.dumps(
    {
        "Data": [
            {
                "Answer": {
                    "Aliases": ["The Hult", "Hult", "Hult (river)"],
                    "MatchedWikiEntityName": "Hult",
                    "NormalizedAliases": ["hult river", "hult"],
                    "NormalizedMatchedWikiEntityName": "hult",
                    "NormalizedValue": "hult",
                    "Type": "WikipediaEntity",
                    "Value": "Hult",
                },
                "Question": "On which river is Ansk?",
                "QuestionId": "tc_1",
                "QuestionSource": "http://quiz.example/",
                "SearchResults": [],
            },
            {
                "Answer": {
                    "Aliases": [],
                    "NormalizedAliases": ["seven mills", "7 mills"],
                    "NormalizedValue": "seven mills",
                    "Type": "FreeForm",
                    "Value": "Seven mills",
                },
                "Question": "What burnt down at Ansk?",
                "QuestionId": "tc_9",
                "QuestionSource": "http://quiz.example/",
            },
        ],
        "Domain": "Web",
        "VerifiedEval": False,
        "Version": 1.0,
    }
)
SQUAD = json.dumps(
    {
        "data": [
            {
                "title": "Ansk",
                "paragraphs": [
                    {
                        "context": "Ansk is a town on the river Hult.",
                        "qas": [
                            {
                                "id": "56be4db0acb8001400a502ec",
                                "question": "Where is Ansk?",
                                "answers": [
                                    {"text": "on the river Hult", "answer_start": 15},
                                    {"text": "Hult", "answer_start": 28},
                                    {"text": "Hult", "answer_start": 28},
                                ],
                            },
                            {
                                "id": "5ad39d53604f3c001a3fe8d1",
                                "question": "Who sank Ansk?",
                                "is_impossible": True,
                                "plausible_answers": [
                                    {"text": "Hult", "answer_start": 28}
                                ],
                                "answers": [],
                            },
                        ],
                    }
                ],
            }
        ],
        "version": "v2.0",
    }
)
PATTERN = "Sept?(ember)?|Feb(ruary)?"


def read(reader, text):
    return list(reader(text, "FILE"))


def test_question_answer_lines():
    assert read(formats.question_answer_lines, LINES) == [
        Record("who drew ansk", ("Maria Brel", "Brel")),
        Record("wo liegt Čudo", ("am Hult",)),
        Record("서울은 어디에", ("대한민국",)),
    ]


def test_web_questions_of_stanford():
    assert read(formats.web_questions, WEB) == [
        Record("who drew ansk?", ("Maria Brel", "Ansk")),
        Record("what river is near ansk?", ("Hult (river)", 'the "Old" Hult')),
    ]


def test_web_questions_as_lines():
    expected = read(formats.question_answer_lines, LINES)
    assert read(formats.web_questions, LINES) == expected


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


@pytest.mark.parametrize(
    "text",
    [
        TREC.splitlines()[0],
        TREC_OF_DPR.splitlines()[0],
        json.dumps({"question": "When is Market week in Ansk?", "answer": [PATTERN]}),
        json.dumps(
            [
                {
                    "question": "When is Market week in Ansk?",
                    "answers": [PATTERN],
                    "positive_ctxs": [],
                }
            ]
        ),
    ],
)
def test_curated_trec_in_each_of_its_forms(text):
    expected = [Record("When is Market week in Ansk?", (PATTERN,))]
    assert read(formats.curated_trec, text) == expected


def test_quotes_in_tab_separated_values():
    _, painted = read(formats.curated_trec, TREC)
    assert painted == Record('Who painted "The Mills"?', ('"?Brel"?',))
    _, painted = read(formats.curated_trec, TREC_OF_DPR)
    assert painted == Record("Who painted the mills?", (r'\s?"Brel"', "O'Brel"))


def test_trivia_qa_answers_begin_with_the_value():
    assert read(formats.trivia_qa, TRIVIA) == [
        Record(
            "On which river is Ansk?", ("Hult", "The Hult", "Hult (river)"), id="tc_1"
        ),
        Record(
            "What burnt down at Ansk?",
            ("Seven mills", "seven mills", "7 mills"),
            id="tc_9",
        ),
    ]


def test_entity_questions():
    text = json.dumps([{"question": "Where is Ansk?", "answers": ["Hult", "Fosk"]}])
    expected = [Record("Where is Ansk?", ("Hult", "Fosk"))]
    assert read(formats.question_answer_list, text) == expected


def test_squad_without_its_paragraphs():
    assert read(formats.squad, SQUAD) == [
        Record(
            "Where is Ansk?",
            ("on the river Hult", "Hult"),
            id="56be4db0acb8001400a502ec",
        ),
        Record("Who sank Ansk?", (), id="5ad39d53604f3c001a3fe8d1"),
    ]


@pytest.mark.parametrize(
    ("reader", "text", "message"),
    [
        (formats.question_answer_lines, '{"question": "q"}', "FILE:1: .*'answers'"),
        (formats.question_answer_lines, '\n{"answer": ["a"]}', "FILE:2: .*'question'"),
        (formats.question_answer_lines, "{", "FILE:1: expected a JSON object"),
        (formats.web_questions, "[1]", r"FILE\[0\]: expected an object, got 1"),
        (formats.web_questions, "[", "expected JSON in FILE"),
        (
            formats.web_questions,
            '[{"utterance": "q", "targetValue": "Ansk"}]',
            r"FILE\[0\]: expected 'targetValue' to be a list of at least one",
        ),
        (formats.curated_trec, "q", "FILE:1: expected number, kind, question"),
        (formats.curated_trec, "q\t['a'", "FILE:1: expected number, kind, question"),
        (formats.curated_trec, "q\t[1]", "FILE:1: expected 'answers'"),
        (formats.curated_trec, "1\tfactoid\tq\t ", "FILE:1: expected 'answer'"),
        (formats.trivia_qa, "{}", "FILE: expected an object with 'Data'"),
        (
            formats.trivia_qa,
            '{"Data": [{"Question": "q", "QuestionId": "a"}]}',
            r"FILE Data\[0\]: expected an object with 'Answer'",
        ),
        (
            formats.trivia_qa,
            TRIVIA.replace('"Seven mills"', '""').replace(
                '["seven mills", "7 mills"]', "[]"
            ),
            r"FILE Data\[1\]: expected 'Answer' to be a list of at least one",
        ),
        (formats.squad, '{"data": 1}', "FILE data: expected a list, got 1"),
        (
            formats.squad,
            SQUAD.replace('"is_impossible": true', '"is_impossible": false'),
            r"FILE data\[0\] paragraphs\[0\] qas\[1\]: expected an answer",
        ),
        (formats.question_answer_list, '{"a": 1}', "FILE: expected a list"),
    ],
)
def test_a_wrong_record_is_named(reader, text, message):
    with pytest.raises(BadInputError, match=message) as caught:
        read(reader, text)
    assert "\n" not in str(caught.value)
