"""Queries with judgements, as BEIR and others have them."""

import pytest

from realm_jax.data.judgements import JudgedQuery, read_judgements
from tests.json_lines import write_lines
from tests.refused import refused

BEIR = [{"_id": "q1", "text": "wings", "metadata": {}}, {"_id": "q2", "text": "heat"}]
QRELS = "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td3\t0\n"


@pytest.fixture
def read(tmp_path):
    """Reads queries and judgements from files of their own."""

    def read(queries, qrels="", name="queries.jsonl"):
        path = tmp_path / "qrels.tsv"
        path.write_text(qrels)
        documents = {"d1", "d2", "d3"}
        queries = write_lines(tmp_path / name, queries)
        return read_judgements(queries, str(path) if qrels else "", documents)

    return read


@pytest.mark.parametrize("name", ["queries.jsonl", "queries.jsonl.gz"])
def test_beirs_files(read, name):
    # Of the second no document is relevant.
    expected = [JudgedQuery("q1", "wings", {"d1": 2, "d2": 0})]
    assert read(BEIR, QRELS, name) == expected


@pytest.mark.parametrize(
    "qrels", ["q1 0 d1 2\nq1 0 d2 0\n", "q1\t0\td1\t2\nq1\t0\td2\t0\n\n"]
)
def test_the_columns_of_trec_eval(read, qrels):
    [query] = read(BEIR, qrels)
    assert query.grades == {"d1": 2, "d2": 0}


def test_relevant_documents_beside_the_queries(read):
    [query] = read([{"id": 7, "question": "Wings?", "gold_ids": ["d1", "d3"]}])
    assert query == JudgedQuery("7", "Wings?", {"d1": 1, "d3": 1})


@pytest.mark.parametrize(
    ("queries", "qrels", "message"),
    [
        (BEIR, "q1\td9\t1\nq1\td1\t1\n", "documents of the text .* 1 of 2 .*'d9'"),
        (BEIR, "q9\td1\t1\n", "queries of .* 1 of 1 .*'q9'"),
        (BEIR, "q1\td1\t0\n", "a relevant document.*for 2 queries"),
        (BEIR, "q1\td1\t-2\n", "a relevant document.*for 2 queries"),
        (BEIR, "q1\td1\t1\nq1\td2\tyes\n", "qrels.tsv:2.*a whole number"),
        (BEIR, "q1\td1\t1\nq1 d2\n", "qrels.tsv:2.*2 fields"),
        (BEIR, "", "--qrels=FILE.*'gold_ids'"),
        ([BEIR[0], BEIR[0]], QRELS, "queries.jsonl:2.*'q1'"),
        ([{"_id": "q1", "title": "wings"}], QRELS, "queries.jsonl:1.*'question'"),
        ([{"id": "q1", "question": "w", "gold_ids": "d1"}], "", "a list of ids"),
        ([], QRELS, "expected queries.*got none"),
    ],
)
def test_what_does_not_belong_together_is_refused(read, queries, qrels, message):
    with refused(message):
        read(queries, qrels)
