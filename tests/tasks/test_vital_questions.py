"""The committed questions against the text they are asked of."""

import collections
import itertools
import json
from pathlib import Path

import pytest

from realm_jax.data.questions import read_questions
from realm_jax.data.words import answer_tokens
from realm_jax.metrics.answers import has_answer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def questions():
    """Both files, as the quickstart puts them together."""
    folder = ROOT / "tasks" / "data"
    more = read_questions(folder / "vital_training_questions.jsonl")
    assert {question.split for question in more} == {"train"}
    return read_questions(folder / "vital_questions.jsonl") + more


@pytest.fixture(scope="module")
def articles():
    path = ROOT / ".cache" / "data" / "vital_articles.jsonl"
    with path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    return {record["title"]: record for record in records}


def test_each_answer_stands_in_its_article_in_letters_and_words(questions, articles):
    # "carillon" stands in "carillons", but no reader can point at it.
    missing = [
        (question.id, answer)
        for question in questions
        for text in [articles[question.title]["text"]]
        for answer in question.answers
        if answer not in text or not has_answer(text, [answer])
    ]
    assert missing == []
    for question in questions:
        assert question.topic == articles[question.title]["topic"], question.id


def test_no_question_gives_its_answer_away_or_is_asked_twice(questions):
    given = [
        question.id
        for question in questions
        if any(a.casefold() in question.question.casefold() for a in question.answers)
    ]
    assert given == []
    for texts in zip(*((q.question.casefold(), q.id) for q in questions), strict=True):
        assert len(set(texts)) == len(texts)


def test_there_are_enough_of_every_split_of_articles_of_its_own(questions):
    counts = collections.Counter(question.split for question in questions)
    assert set(counts) == {"train", "dev", "test"}
    assert sum(counts.values()) >= 300
    assert min(counts.values()) >= 50
    splits = collections.defaultdict(set)
    for question in questions:
        splits[question.title].add(question.split)
    assert [title for title, found in splits.items() if len(found) > 1] == []


def test_no_question_is_asked_in_other_words_in_another_split(questions):
    # The same answer, and a word in common that no other question has.
    words = {q.id: set(answer_tokens(q.question)) for q in questions}
    counts = collections.Counter(itertools.chain.from_iterable(words.values()))
    by_answer = collections.defaultdict(list)
    for question in questions:
        for answer in question.answers:
            by_answer[answer].append(question)
    alike = [
        (one.question, other.question)
        for asked in by_answer.values()
        for one, other in itertools.combinations(asked, 2)
        if one.split != other.split
        and any(counts[word] == 2 for word in words[one.id] & words[other.id])
    ]
    assert alike == []
