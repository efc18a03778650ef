import itertools

import numpy as np
import pytest

from realm_jax.answering.hybrid import BM25Index
from realm_jax.data.questions import Question
from realm_jax.data.words import answer_tokens
from realm_jax.evaluation import stage_results
from realm_jax.evaluation.stage_results import baseline_recalls, random_recall
from realm_jax.metrics import retrieval
from realm_jax.metrics.answers import has_pattern


@pytest.mark.parametrize("k", [1, 3, 6, 9])
def test_random_recall_is_that_of_all_ways_to_draw(k):
    relevant = [frozenset(), {0}, {1, 4}, {0, 1, 2, 3, 4, 5}]
    draws = list(itertools.combinations(range(6), min(k, 6)))
    expected = [
        sum(bool(set(draw) & set(blocks)) for draw in draws) / len(draws)
        for blocks in relevant
    ]
    np.testing.assert_allclose(random_recall(relevant, 6, k), expected, atol=1e-12)


def measured(corpus, questions, recall_at, max_blocks):
    """The recalls of the baselines, with what BM25 finds."""
    texts = [question.question for question in questions]
    return baseline_recalls(
        corpus,
        questions,
        recall_at=recall_at,
        max_blocks=max_blocks,
        bm25=lambda: BM25Index(corpus).search(texts, max(recall_at)).ids,
    )


def test_a_corpus_above_the_limit_is_not_read(corpus, monkeypatch, caplog):
    questions = [
        Question("a", 0, "Who founded Ansk?", (corpus.text(0).body,), "test"),
        Question("b", 1, "Who founded Brel?", ("nobody",), "test"),
    ]
    whole = measured(corpus, questions, (1, 5), corpus.num_blocks)
    assert list(whole) == ["random blocks", "BM25"]
    assert list(whole["BM25"]) == ["recall@1", "recall@5"]
    assert whole["random blocks"]["recall@1"][0] == pytest.approx(1 / corpus.num_blocks)
    # A question without a relevant block is answered by nothing.
    assert all(values[1] == 0.0 for row in whole.values() for values in row.values())
    monkeypatch.setattr(type(corpus), "texts", None)
    assert measured(corpus, questions, (1, 5), corpus.num_blocks - 1) == {}
    assert f"the corpus has {corpus.num_blocks:,} blocks" in caplog.text


def test_patterns_are_matched_in_a_sample_where_all_would_take_long(
    corpus, monkeypatch, caplog
):
    texts = corpus.texts(np.arange(corpus.num_blocks))
    word = answer_tokens(texts[0].body)[0]
    questions = [
        Question("a", 0, texts[0].title, (word,), "test"),
        Question("b", 1, texts[0].title, (word,), "test", answers_are_patterns=True),
        Question("c", 2, "Bells?", ("bells",), "test", answers_are_patterns=True),
    ]
    settings = corpus, questions, (1, 3), corpus.num_blocks
    exact = measured(*settings)
    assert not caplog.records
    matched = []

    def counting(body, patterns):
        matched.append(body)
        return has_pattern(body, patterns)

    monkeypatch.setattr(retrieval, "has_pattern", counting)
    size = corpus.num_blocks // 2
    monkeypatch.setattr(stage_results, "_MOST_MATCHED", 2 * size + 1)
    draw = np.random.default_rng(7)
    monkeypatch.setattr(stage_results.np.random, "default_rng", lambda seed: draw)
    estimates = [measured(*settings) for _ in range(60)]
    # Two questions, in the sample and in what BM25 finds.
    assert len(matched) <= 60 * 2 * (size + 3)
    assert f"from {size:,} of {corpus.num_blocks:,} blocks" in caplog.text
    for estimate in estimates:
        assert list(estimate) == ["random blocks (estimated)", "BM25"]
        for name, values in exact["BM25"].items():
            np.testing.assert_array_equal(estimate["BM25"][name], values)
    for name, values in exact["random blocks"].items():
        drawn = np.array([e["random blocks (estimated)"][name] for e in estimates])
        assert (drawn[:, 0] == values[0]).all()
        error = drawn.std(axis=0) / np.sqrt(len(drawn)) + 1e-9
        assert (abs(drawn.mean(axis=0) - values) < 4 * error).all()
    assert drawn[:, 1:].std() > 0.0
