"""Reads the files in which Open-QA sets are published.

Each reader takes the text of a file and its name in messages (`natural_questions` takes
its path alone), and yields its records in order. A malformed record raises an error
with its place; a question that its set declares unanswerable is a record without
answers.

Of raw Natural Questions, NQ-open is made as ORQA made it (Lee et al. 2019): a question
keeps the short answers of all its annotations that have at most five tokens, and the
page is dropped. One without is a record without answers: those with a long answer, with
yes or no, or with nothing. A page has megabytes of HTML, so lines are read one at a
time.
"""

import ast
import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from realm_jax.data.records import answers_field, json_object, text_field
from realm_jax.errors import BadInputError
from realm_jax.prepare.documents.files import (
    find_files,
    is_compressed,
    read_range,
    unpack,
    whole_file,
)
from realm_jax.prepare.documents.lines import split_lines

MAX_ANSWER_TOKENS = 5
_MAX_LINE_BYTES = 1 << 28
_TAG = re.compile(r"<[^>]*>")


class Record(NamedTuple):
    """A question of a set.

    Attributes:
      question: the text exactly as published, because splits hash it.
      answers: the first is preferred where only one can be used in training; empty if
        the set declares the question unanswerable.
    """

    question: str
    answers: tuple[str, ...]
    id: str | None = None
    topic: str | None = None


Reader: TypeAlias = Callable[[str, str], Iterator[Record]]

_DESCRIPTION = re.compile(
    r'\(description (?:"((?:[^"\\]|\\.)*)"|(.+?))\)(?= \(description |\)$)'
)


def question_answer_lines(text: str, place: str) -> Iterator[Record]:
    """Reads JSON lines with `question`, and `answer` or `answers` (a text or a list).

    This is the format of NQ-open, of DrQA's and of ORQA's files.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{place}:{number}"
            yield _question_answer(json_object(line, where), where)


def question_answer_list(text: str, place: str) -> Iterator[Record]:
    """Reads a JSON list of objects with `question` and `answers`.

    This is the format of EntityQuestions and of DPR's training files.
    """
    for record, where in _elements(_json(text, place), place):
        yield _question_answer(record, where)


def web_questions(text: str, place: str) -> Iterator[Record]:
    """Reads WebQuestions as Stanford published it, or as `question_answer_lines`.

    Stanford's is a JSON list of objects with `utterance` and `targetValue`, which is
    `(list (description "Jazmyn Bieber") (description Vermont))`.
    """
    if not text.lstrip().startswith("["):
        yield from question_answer_lines(text, place)
        return
    for record, where in _elements(_json(text, place), place):
        target = text_field(record, "targetValue", where)
        answers = [
            re.sub(r"\\(.)", r"\1", quoted) or bare
            for quoted, bare in _DESCRIPTION.findall(target)
        ]
        fields = {"targetValue": [answer for answer in answers if answer.strip()]}
        yield Record(
            text_field(record, "utterance", where),
            answers_field(fields, "targetValue", where),
        )


def curated_trec(text: str, place: str) -> Iterator[Record]:
    r"""Reads CuratedTREC, whose answers are regular expressions.

    Accepts lines of tab-separated values, which are number, kind, question and pattern
    (brmson's release), or question and a Python list of patterns (DPR's); or JSON in
    the formats of `question_answer_lines` and `question_answer_list`.
    """
    start = text.lstrip()[:1]
    if start in ("{", "["):
        reader = question_answer_lines if start == "{" else question_answer_list
        yield from reader(text, place)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _tab_separated(line.rstrip("\r"), f"{place}:{number}")


def trivia_qa(text: str, place: str) -> Iterator[Record]:
    """Reads TriviaQA: `Data`, a list of objects with `Question` and `Answer`.

    The answers are the value that annotators gave, then its aliases. The normalised
    aliases are used where there are no others.
    """
    for record, where in _objects(_json(text, place), "Data", place):
        answer = _field(record, "Answer", where)
        yield Record(
            text_field(record, "Question", where),
            trivia_answers(
                _field(answer, "Value", where),
                _field(answer, "Aliases", where),
                answer.get("NormalizedAliases", []),
                where,
            ),
            id=text_field(record, "QuestionId", where),
        )


def squad(text: str, place: str) -> Iterator[Record]:
    """Reads SQuAD without its paragraphs, as the corpus takes their place."""
    for article, in_article in _objects(_json(text, place), "data", place):
        for paragraph, in_paragraph in _objects(article, "paragraphs", in_article):
            for record, where in _objects(paragraph, "qas", in_paragraph):
                found = _objects(record, "answers", where)
                texts = [text_field(answer, "text", there) for answer, there in found]
                if not texts and not record.get("is_impossible"):
                    raise _wrong("an answer, or is_impossible", where, record)
                yield Record(
                    text_field(record, "question", where),
                    tuple(dict.fromkeys(texts)),
                    id=text_field(record, "id", where),
                )


def trivia_answers(
    value: str, aliases: Sequence[str], normalized: Sequence[str], place: str
) -> tuple[str, ...]:
    """Returns the answers to a question of TriviaQA, the value first."""
    texts = (value, *(aliases or normalized))
    kept = [text for text in texts if isinstance(text, str) and text.strip()]
    return answers_field({"Answer": list(dict.fromkeys(kept))}, "Answer", place)


def _question_answer(record: dict[str, Any], where: str) -> Record:
    name = "answer" if "answer" in record else "answers"
    answers = record.get(name)
    fields = {name: [answers] if isinstance(answers, str) else answers}
    return Record(
        text_field(record, "question", where), answers_field(fields, name, where)
    )


def _tab_separated(line: str, where: str) -> Record:
    columns = line.split("\t")
    if len(columns) == 4:
        _, _, question, pattern = columns
        return _question_answer({"question": question, "answer": pattern}, where)
    try:
        question, answers = next(csv.reader([line], delimiter="\t"))
        patterns = ast.literal_eval(answers)
    except (ValueError, SyntaxError, csv.Error) as error:
        raise BadInputError(
            f"{where}: expected number, kind, question and pattern between tabs, or "
            f"question and ['pattern', ...], got {line!r:.60} ({error}); correct the "
            "line."
        ) from error
    return _question_answer({"question": question, "answers": patterns}, where)


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            f"expected JSON in {place}, got {text!r:.60} ({error}); is it another file "
            "of the set?"
        ) from error


def _field(record: Any, field: str, place: str) -> Any:
    if not isinstance(record, dict) or field not in record:
        raise _wrong(f"an object with {field!r}", place, record)
    return record[field]


def _objects(
    record: Any, field: str, place: str
) -> Iterator[tuple[dict[str, Any], str]]:
    return _elements(_field(record, field, place), f"{place} {field}")


def _elements(values: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the objects of a list, each with its name in messages."""
    if not isinstance(values, list):
        raise _wrong("a list", place, values)
    for number, value in enumerate(values):
        where = f"{place}[{number}]"
        if not isinstance(value, dict):
            raise _wrong("an object", where, value)
        yield value, where


def _wrong(expected: str, place: str, found: Any) -> BadInputError:
    return BadInputError(
        f"{place}: expected {expected}, got {found!r:.60}; is it another file of the "
        "set?"
    )


def natural_questions(path: str) -> Iterator[Record]:
    """Yields the questions of a file, in the original or in the simplified format.

    The original has `document_tokens`, the simplified one `document_text`, whose tokens
    are between spaces.
    """
    file, *_ = find_files(path, "questions of Natural Questions")
    chunks = unpack(file, path) if is_compressed(file) else read_range(whole_file(file))
    for number, line in enumerate(split_lines(chunks, _MAX_LINE_BYTES), start=1):
        where = f"{path}:{number}"
        if line.content is None:
            raise _wrong_page("a line", where, f"one of {line.length:,} bytes")
        if line.content.strip():
            yield _natural_question(json_object(line.content, where), where)


def _natural_question(record: dict[str, Any], where: str) -> Record:
    try:
        tokens = _page_tokens(record)
        spans = [
            (answer["start_token"], answer["end_token"])
            for annotation in record["annotations"]
            for answer in annotation["short_answers"]
        ]
        answers = [_page_words(tokens, *span) for span in spans]
        name = str(record["example_id"])
    except (KeyError, TypeError, IndexError) as error:
        raise _wrong_page(
            "document_tokens or document_text, annotations with short_answers, and an "
            "example_id",
            where,
            f"{type(error).__name__}: {error}",
        ) from error
    short = [words for words in answers if 0 < len(words) <= MAX_ANSWER_TOKENS]
    texts = tuple(dict.fromkeys(" ".join(words) for words in short))
    return Record(text_field(record, "question_text", where), texts, id=name)


def _page_tokens(record: dict[str, Any]) -> list[str]:
    """Returns the tokens of the page, "" for those of HTML."""
    if "document_tokens" in record:
        tokens = record["document_tokens"]
        return ["" if token["html_token"] else token["token"] for token in tokens]
    tokens = record["document_text"].split(" ")
    return ["" if _TAG.fullmatch(token) else token for token in tokens]


def _page_words(tokens: list[str], start: int, end: int) -> list[str]:
    if not 0 <= start < end <= len(tokens):
        raise IndexError(f"tokens {start} to {end} of {len(tokens)}")
    return [token for token in tokens[start:end] if token]


def _wrong_page(expected: str, where: str, found: str) -> BadInputError:
    return BadInputError(
        f"{where}: expected {expected}, got {found}; is it a file of Natural Questions?"
    )
