"""What REALM has made of an encoder, and which of the two is used."""

import re

import numpy as np
import pytest

from realm_jax.data.documents import Document
from realm_jax.data.judgements import JudgedQuery
from realm_jax.data.wordpiece import SPECIAL_PIECES, WordPiece
from realm_jax.evaluation import adapt_report, adaptation
from realm_jax.evaluation.comparisons import BM25, compare
from realm_jax.stages import PRETRAIN, WARM_START
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


def results(probe, before, after, **others):
    """The measurement of a probe, as `measure` returns it."""
    values = {
        metric: {adaptation.BEFORE: before, adaptation.AFTER: after}
        for metric in adapt_report._METRICS[probe]
    } | others
    named = {
        label: {metric: np.array(of[label]) for metric, of in values.items()}
        for label in (adaptation.BEFORE, adaptation.AFTER)
    }
    baselines = {
        BM25: named[adaptation.BEFORE],
        adaptation.FUSED: named[adaptation.AFTER],
    }
    return {probe: compare(named, baselines)}


BETTER = ([0.1, 0.2, 0.3], [0.5, 0.6, 0.5])
WORSE = BETTER[::-1]
EITHER = ([0.1, 0.9, 0.5], [0.9, 0.1, 0.5])


@pytest.mark.parametrize(
    ("values", "stage"), [(BETTER, PRETRAIN), (EITHER, PRETRAIN), (WORSE, WARM_START)]
)
def test_an_interval_below_zero_gives_the_encoder_as_it_was(values, stage):
    assert adapt_report.decide(results("queries", *values)) is stage
    sentences = results("held-out sentences", *values)
    assert adapt_report.decide(sentences) is stage
    # Where there are queries, they decide.
    assert adapt_report.decide(sentences | results("queries", *BETTER)) is PRETRAIN


def test_so_does_one_metric_of_the_queries_that_falls_or_no_measurement_at_all():
    worse = dict(zip((adaptation.BEFORE, adaptation.AFTER), WORSE, strict=True))
    measured = results("queries", *EITHER, **{"MRR@10": worse})
    assert adapt_report.decide(measured) is adapt_report.decide({}) is WARM_START


def test_three_lines_say_what_happened(tmp_path):
    worse, spent = results("queries", *WORSE), {"seconds": 90, "bytes": 2**31}
    made = adapt_report.make_report(worse, str(tmp_path), {}, **spent)
    gained, cost, export = adapt_report.summary(made, "runs/my", "runs/my/export")
    assert gained.startswith("gained: nDCG@10 of 3 queries 53.3 -> 20.0 (-33.3 [")
    assert gained.endswith("; BM25 53.3, both fused 20.0)")
    assert cost == "cost: measuring 1.5 min, 2.0 GiB in the largest process"
    assert "encoder as it was, for REALM made it worse: nDCG@10 -33.3 [" in export
    assert " of the queries; try realm search runs/my/warm_start" in export
    nothing = adapt_report.make_report({}, str(tmp_path), {}, seconds=0, bytes=0)
    gained, _, export = adapt_report.summary(nothing, "runs/my", "runs/my/export")
    assert "no article that was held out has two blocks" in gained
    assert "for nothing was measured" in export


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
