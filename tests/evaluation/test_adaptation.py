"""What a warm start and REALM have made of an encoder, and which one is used."""

import re
import threading

import numpy as np
import pytest

from realm_jax.answering.hybrid import BM25Index
from realm_jax.data.documents import Document
from realm_jax.data.judgements import JudgedQuery
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.evaluation import adapt_report, adaptation
from realm_jax.evaluation.comparisons import (
    AFTER_REALM,
    AFTER_WARM_START,
    BEFORE_TRAINING,
    BM25,
    compare_with_first,
    fused_name,
)
from realm_jax.metrics.retrieval import articles_of
from tests.corpus_builder import build_corpus
from tests.flipped import read_flipped


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A book, an article of three sentences, a copy of it, and one of one sentence."""
    book = [f"In {1500 + i} it rained in Dorm{i}." for i in range(14)]
    article = ["Fosk lies by the sea.", "Maria Brel drew it.", "It burnt in 1700."]
    texts = {"book": book, "article": article, "copy": article, "short": article[:1]}
    documents = [
        Document("" if name == "short" else "Towns", "\n\n".join(sentences), name)
        for name, sentences in texts.items()
    ]
    folder = tmp_path_factory.mktemp("blocks")
    words = re.findall(r"\w+|\.", " ".join(["Towns", *book, *article]).lower())
    pieces = dict.fromkeys([*SPECIAL_PIECES, *words, "when", "did", "burn"])
    (folder / "vocab.txt").write_text("\n".join(pieces))
    vocabulary = WordPiece.load(folder / "vocab.txt")
    corpus = build_corpus(documents, folder / "corpus", vocabulary, chunk_length=11)
    # A sentence a block.
    assert corpus.num_blocks == sum(map(len, texts.values()))
    return corpus


@pytest.mark.parametrize(
    ("own", "around"),
    [
        (0, [1, 2, 3, 4]),
        (7, [3, 4, 5, 6, 8, 9, 10, 11]),
        (13, [9, 10, 11, 12]),
        (14, [15, 16]),
        (18, [17, 19]),
        (20, []),
    ],
)
def test_the_blocks_around_a_sentence_are_those_of_its_article(blocks, own, around):
    assert adaptation._around(blocks, own) == around


def test_a_copy_of_a_block_is_known(blocks):
    assert adaptation._copies(blocks, 15) == [15, 18]
    assert adaptation._copies(blocks, 3) == [3]
    # With a title it is another one.
    assert adaptation._copies(blocks, 20) == [20]


def test_blocks_of_one_article_have_one_number(blocks):
    found = articles_of(blocks, np.array([0, 14, 13, -1, 20, -1]))
    assert found[0] == found[2]
    assert len(set(found)) == 5


def test_queries_are_judged_by_the_best_block_of_a_document(blocks):
    queries = [
        JudgedQuery("1", "When did Fosk burn?", {"article": 2, "copy": 1}),
        JudgedQuery("2", "Where did it rain?", {"book": 1, "without text": 1}),
    ]
    probe = adaptation.queries_probe(blocks, queries, query_length=16)
    scores = np.zeros((2, blocks.num_blocks))
    scores[0, [5, 19, 14]] = 3.0, 2.0, 1.0  # book, copy, article
    scores[1, 20] = 1.0
    judged = probe.judge(scores, range(2))
    best = 2 + 1 / np.log2(3)
    found = 1 / np.log2(3) + 2 / np.log2(4)
    np.testing.assert_allclose(judged["nDCG@10"][0], found / best)
    np.testing.assert_allclose(judged["MRR@10"], [1 / 2, 1 / 2])
    np.testing.assert_allclose(judged["recall@1"], [0.0, 0.0])
    np.testing.assert_allclose(judged["recall@5"], [1.0, 0.5])
    assert (probe.ids[:, 0] == blocks.vocabulary.cls).all()
    np.testing.assert_array_equal(
        probe.judge(scores[1:], range(1, 2))["recall@5"], judged["recall@5"][1:]
    )


def test_how_much_is_scored_is_shown(blocks):
    queries = [JudgedQuery(str(i), "It burnt", {"book": 1}) for i in range(70)]
    probe = adaptation.queries_probe(blocks, queries, query_length=16)
    shown = []
    adaptation.judged(
        probe,
        {"any": lambda probe, rows: np.zeros((len(rows), blocks.num_blocks))},
        BM25Index(blocks),
        threading.Event(),
        lambda *progress: shown.append(progress),
    )
    assert shown == [(done, 70, "queries scored") for done in (0, 64, 70)]


def results(probe, before, taught, after, groups=None, **others):
    """The measurement of a probe, as `measure` returns it."""
    labels = (BEFORE_TRAINING, AFTER_WARM_START, AFTER_REALM)
    of_first = dict(zip(labels, (before, taught, after), strict=True))
    values = dict.fromkeys(adapt_report._METRICS[probe], of_first) | others
    named = {
        label: {metric: np.array(of[label]) for metric, of in values.items()}
        for label in labels
    }
    fused = {fused_name(label): of for label, of in named.items()}
    baselines = {BM25: named[BEFORE_TRAINING], **fused}
    return {probe: compare_with_first(named, baselines, groups)}


LOW, MIDDLE, HIGH = [0.1, 0.2, 0.3] * 10, [0.3, 0.4, 0.5] * 10, [0.5, 0.6, 0.7] * 10
# Its mean is a little above the middle one's, and its differences are not known.
EITHER = [1.9, -1.5, 0.81] * 10


@pytest.mark.parametrize(
    ("values", "chosen"),
    [
        ((LOW, MIDDLE, HIGH), AFTER_REALM),
        ((LOW, HIGH, MIDDLE), AFTER_WARM_START),
        ((LOW, HIGH, HIGH), AFTER_REALM),
        ((MIDDLE, LOW, HIGH), AFTER_REALM),
        ((MIDDLE, LOW, EITHER), AFTER_REALM),
        ((HIGH, LOW, MIDDLE), BEFORE_TRAINING),
        ((HIGH, EITHER, LOW), BEFORE_TRAINING),
    ],
)
def test_the_best_one_is_exported(values, chosen):
    assert adapt_report.decide(results("queries", *values)) == chosen
    sentences = results("held-out sentences", *values)
    assert adapt_report.decide(sentences) == chosen
    # Where there are queries, they decide.
    both = sentences | results("queries", HIGH, LOW, LOW)
    assert adapt_report.decide(both) == BEFORE_TRAINING


def test_but_not_one_that_is_worse_by_another_metric_nor_an_unmeasured_one():
    labels = (BEFORE_TRAINING, AFTER_WARM_START, AFTER_REALM)
    worse = dict(zip(labels, (HIGH, HIGH, LOW), strict=True))
    measured = results("queries", LOW, MIDDLE, HIGH, **{"MRR@10": worse})
    assert adapt_report.decide(measured) == AFTER_WARM_START
    assert adapt_report.decide({}) == BEFORE_TRAINING


def summary_of(measured, tmp_path, **cost):
    made = adapt_report.make_report(measured, str(tmp_path), {}, **cost)
    return adapt_report.summary(made, "runs/my", "runs/my/export")


def test_three_lines_say_what_happened(tmp_path):
    spent = {"seconds": 90, "bytes": 2**31}
    better = results("queries", LOW, HIGH, MIDDLE)
    gained, cost, export = summary_of(better, tmp_path, **spent)
    assert gained == (
        "gained: nDCG@10 of 30 queries 20.0, 60.0 after the warm start "
        "(+40.0 [+40.0, +40.0]), 40.0 after REALM (+20.0 [+20.0, +20.0]); BM25 20.0, "
        "fused 60.0"
    )
    assert cost == "cost: measuring 1.5 min, 2.0 GiB in the largest process"
    assert export == (
        "export: runs/my/export is the retriever after the warm start; try realm "
        'search runs/my "your query"'
    )
    _, _, export = summary_of(results("queries", LOW, LOW, HIGH), tmp_path, **spent)
    assert "after REALM; try realm search runs/my " in export
    _, _, export = summary_of(results("queries", HIGH, LOW, LOW), tmp_path, **spent)
    lost = "-40.0 [-40.0, -40.0] after"
    assert f"for training made it worse: nDCG@10 {lost} the warm start, " in export
    assert f"MRR@10 {lost} REALM, of the queries; try realm search" in export
    unknown = results("queries", HIGH, EITHER, EITHER)
    _, _, export = summary_of(unknown, tmp_path, **spent)
    assert "for training did not improve it for the queries; try" in export
    # Of few articles little is known, however many sentences they have.
    articles = np.repeat(range(3), 10)
    of_few = results("held-out sentences", LOW, HIGH, EITHER, articles)
    gained, *_ = summary_of(of_few, tmp_path, **spent)
    assert "recall@5 of 30 held-out sentences of 3 articles 20.0, 60.0" in gained
    assert of_few["held-out sentences"].differences[1].interval.low < 0
    gained, _, export = summary_of({}, tmp_path, **spent)
    assert "no article that was held out has two blocks" in gained
    assert "the encoder as it was, for nothing was measured; try" in export


def test_a_damaged_report_is_none(tmp_path):
    assert adapt_report.read_report(str(tmp_path)) is None
    for content in ("", "[]", '{"of": {}}'):
        (tmp_path / adapt_report.NAME).write_text(content)
        assert adapt_report.read_report(str(tmp_path)) is None


def test_no_changed_bit_of_a_report_is_believed(tmp_path):
    made = adapt_report.make_report({}, str(tmp_path), {}, seconds=9, bytes=7)
    adapt_report.write_report(str(tmp_path), made)
    # As a model card lists what was measured.
    assert list(adapt_report.read_report(str(tmp_path)) or ()) == list(made)
    read = read_flipped(
        tmp_path / adapt_report.NAME, lambda: adapt_report.read_report(str(tmp_path))
    )
    assert None in read
    for report in filter(None, read):
        assert {name: report[name] for name in made} == made
