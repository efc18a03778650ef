import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.answering.hybrid import BM25Index, add_scores, fuse
from realm_jax.data.words import answer_tokens
from realm_jax.types import Neighbours


def slow_bm25(documents, question, k1=0.9, b=0.4):
    """Lucene's scores of all documents, word by word."""
    mean_length = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        counts, score = Counter(document), 0.0
        for word in question:
            containing = sum(word in other for other in documents)
            rarity = math.log(
                1 + (len(documents) - containing + 0.5) / (containing + 0.5)
            )
            damping = k1 * (1 - b + b * len(document) / mean_length)
            score += rarity * counts[word] / (counts[word] + damping)
        scores.append(score)
    return scores


def test_bm25_ranks_as_a_loop_over_words_and_documents(corpus):
    questions = ["Who founded Čudo in 1580?", "On which river lies Ansk?", "Bells!"]
    texts = corpus.texts(np.arange(corpus.num_blocks))
    documents = [answer_tokens(f"{text.title} {text.body}") for text in texts]
    index = BM25Index(corpus)
    found = index.search(questions, 5)
    for row, scored, question in zip(found.ids, found.scores, questions, strict=True):
        scores = slow_bm25(documents, answer_tokens(question))
        [given] = np.maximum(index.scores([question]), 0.0)
        np.testing.assert_array_equal(scored[row >= 0], given[row[row >= 0]])
        assert (scored[row < 0] == -np.inf).all()
        np.testing.assert_allclose(given, scores, rtol=1e-5)
        best = sorted(scores, reverse=True)[:5]
        # Blocks with the same score may stand in any order.
        np.testing.assert_allclose(
            [scores[block] if block >= 0 else 0.0 for block in row], best, rtol=1e-5
        )
    assert texts[found.ids[0, 0]].title == "Čudo"


def test_what_shares_no_word_is_not_found(corpus):
    index = BM25Index(corpus)
    assert (index.search(["xyzzy", ""], 3).ids == -1).all()
    assert index.search([], 3).ids.shape == (0, 3)
    wide = index.search(["Bells"], corpus.num_blocks + 2).ids
    assert wide.shape == (1, corpus.num_blocks + 2)
    assert (wide[0, -2:] == -1).all()


def require_best(found, scores, k):
    """Requires the blocks of the k highest scores, of equal ones the first."""
    best = sorted(scores, key=lambda block: (-scores[block], block))[:k]
    empty = k - len(best)
    assert found.ids.tolist() == [[*best, *[-1] * empty]]
    expected = [*(scores[block] for block in best), *[-np.inf] * empty]
    np.testing.assert_allclose(found.scores[0], expected, rtol=1e-6)


# A searcher of one's own may find a block twice; -1 is none.
rankings = st.lists(st.integers(-1, 12), max_size=8)


@given(rankings, rankings, st.integers(1, 15))
def test_fused_is_the_sum_of_reciprocal_ranks(retrieved, by_words, k):
    """Of the blocks that either has; half as much of BM25's."""
    rows = [[*ids, *[-1] * (8 - len(ids))] for ids in (retrieved, by_words)]
    found = fuse(*(np.array([row]) for row in rows), k)
    scores = {
        block: sum(
            weight / (61 + ids.index(block))
            for ids, weight in ((retrieved, 1.0), (by_words, 0.5))
            if block in ids
        )
        for block in {*retrieved, *by_words} - {-1}
    }
    require_best(found, scores, k)


# Whole numbers, whose sums are exact.
scored = st.dictionaries(st.integers(0, 12), st.integers(1, 8), max_size=8)


@given(scored, scored, st.integers(0, 3), st.integers(1, 15))
def test_added_scores_are_those_of_a_retriever_plus_bm25_of_the_best(
    retrieved, by_words, spread, k
):
    def found(scores):
        empty = 8 - len(scores)
        return Neighbours(
            np.array([[*scores, *[-1] * empty]]),
            np.array([[*scores.values(), *[-np.inf] * empty]], np.float32),
        )

    added = add_scores(found(retrieved), found(by_words), np.array([spread]), k)
    last = min(retrieved.values(), default=0)
    scores = {
        block: retrieved.get(block, last)
        + spread * (by_words.get(block, 0) / max(by_words.values(), default=1))
        for block in {*retrieved, *by_words}
    }
    require_best(added, scores, k)
