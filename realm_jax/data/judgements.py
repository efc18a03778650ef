"""Reads queries with relevance judgements: BEIR's files, or queries with `gold_ids`.

queries.jsonl   {"_id": ..., "text": ...}, as BEIR has it, with the judgements in
qrels.tsv       query, document and grade, tab-separated, with or without a header;
                also trec_eval's four columns: query, 0, document, grade
or both in one  {"id": ..., "question": ..., "gold_ids": [...]}
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from realm_jax.data.documents import id_field
from realm_jax.data.questions import records_of
from realm_jax.data.records import RecordError, read_text, text_field
from realm_jax.errors import BadInputError

_GOLD = "gold_ids"


@dataclasses.dataclass(frozen=True)
class JudgedQuery:
    """A query and the documents that were judged for it.

    Attributes:
      grades: id of a document -> grade; above 0 it is relevant, and one is.
    """

    id: str
    text: str
    grades: Mapping[str, int]


def read_judgements(
    queries: str, qrels: str, documents: Collection[str]
) -> list[JudgedQuery]:
    """Returns the queries that have a relevant document.

    Args:
      qrels: judgements, or "" if they stand beside the queries.
      documents: ids of the documents of the text.
    """
    texts, gold = _read_queries(queries)
    if qrels:
        grades: dict[str, dict[str, int]] = {}
        for query, document, grade in _qrels_lines(qrels):
            grades.setdefault(query, {})[document] = grade
        _require_known("queries", queries, qrels, grades, texts)
    elif any(gold.values()):
        grades = {query: dict.fromkeys(ids, 1) for query, ids in gold.items()}
    else:
        raise BadInputError(
            f"expected judgements beside the queries of {queries}, got none; give "
            f"--qrels=FILE, or the ids of relevant documents as {_GOLD!r} in each line"
        )
    relevant = {
        query: of for query, of in grades.items() if max(of.values(), default=0) > 0
    }
    found = (document for of in relevant.values() for document in of)
    _require_known("documents", "the text", qrels or queries, found, documents)
    if not relevant:
        raise BadInputError(
            f"expected a relevant document of some query in {qrels or queries}, got "
            f"none for {len(texts)} queries; give the judgements of these queries"
        )
    return [JudgedQuery(query, texts[query], of) for query, of in relevant.items()]


def _read_queries(path: str) -> tuple[dict[str, str], dict[str, Sequence[str]]]:
    """Returns text and relevant documents of each query, by its id."""
    texts: dict[str, str] = {}
    gold: dict[str, Sequence[str]] = {}
    for number, record in records_of(path):
        where = f"{path}:{number}"
        query = id_field(record, where)
        if not query or query in texts:
            raise BadInputError(
                f"{where}: expected an 'id' or '_id' that no other query has, got "
                f"{query!r}; number the queries."
            )
        texts[query] = text_field(
            record, "text" if "text" in record else "question", where
        )
        gold[query] = _gold_ids(record, where)
    if not texts:
        raise BadInputError(
            f"expected queries in {path}, got none; give a JSON object a line with "
            "_id and text"
        )
    return texts, gold


def _gold_ids(record: Mapping[str, Any], where: str) -> Sequence[str]:
    ids = record.get(_GOLD, [])
    if not isinstance(ids, list) or not all(isinstance(i, str | int) for i in ids):
        raise RecordError(
            where, f"expected {_GOLD!r} to be a list of ids, got {ids!r:.60}."
        )
    return [str(i) for i in ids]


def _qrels_lines(path: str) -> Iterator[tuple[str, str, int]]:
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        fields = line.split("\t") if "\t" in line else line.split()
        if not fields:
            continue
        try:
            if len(fields) not in (3, 4):
                raise ValueError(f"{len(fields)} fields")
            grade = int(fields[-1])
        except ValueError as error:
            if number == 1 and len(fields) in (3, 4):
                continue  # The header.
            raise BadInputError(
                f"{path}:{number}: expected query, document and a whole number, "
                f"tab-separated, got {line!r:.60} ({error}); correct the line."
            ) from error
        yield fields[0].strip(), fields[-2].strip(), grade


def _require_known(
    kind: str, source: str, judgements: str, judged: Any, known: Collection[str]
) -> None:
    judged = list(judged)
    unknown = [one for one in judged if one not in known]
    if unknown:
        raise BadInputError(
            f"expected judgements of {kind} of {source} in {judgements}, got "
            f"{len(unknown):,} of {len(judged):,} for unknown ones, such as "
            f"{unknown[0]!r}; give the files that belong together"
        )
