import jax
import numpy as np
import pytest

from realm_jax.data.questions import question_examples, read_questions
from realm_jax.index.searchers import make_searcher
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.training.zero_shot_recall import HeldOutQuestions, search_questions
from tests import tiny_world
from tests.refused import refused
from tests.tiny_world import LENGTHS
from tests.training.loss_twins import draw


@pytest.fixture(scope="module")
def tower(corpus):
    config = tiny_world.models().retriever_config(corpus.vocabulary.size)
    return config, draw(corpus.vocabulary.size, KnowledgeEncoder)["retriever"]


@pytest.fixture(scope="module")
def embeddings(corpus):
    rng = np.random.default_rng(0)
    return rng.standard_normal((corpus.num_blocks, 8)).astype(np.float32)


def scores_one_by_one(tower, ids, embeddings):
    config, params = tower
    embed = jax.jit(
        lambda ids: Retriever(config).apply(
            {"params": params}, ids, method="embed_queries"
        )
    )
    return np.stack([np.asarray(embed(row[None]))[0] @ embeddings.T for row in ids])


def test_any_number_of_questions_is_searched_as_if_one_by_one(
    world, corpus, tower, embeddings
):
    questions = [
        question
        for split in ("train", "dev")
        for question in read_questions(world.questions, split)
    ]
    ids = question_examples(questions, corpus.vocabulary, query_length=LENGTHS.query)[
        "question_ids"
    ]
    assert len(ids) == 72  # More than a batch, less than two.
    found = search_questions(
        *tower,
        make_searcher("device", embeddings),
        ids,
        corpus.num_blocks + 1,
    )
    scores = scores_one_by_one(tower, ids, embeddings)
    assert found.ids.shape == (72, corpus.num_blocks + 1)
    assert (found.ids[:, -1] == -1).all()
    np.testing.assert_array_equal(np.sort(found.ids[:, :-1]), [range(24)] * 72)
    np.testing.assert_allclose(
        found.scores[:, :-1],
        np.take_along_axis(scores, found.ids[:, :-1], 1),
        rtol=1e-4,
        atol=1e-4,
    )
    assert (np.diff(found.scores[:, :-1]) <= 0).all()


def test_recall_is_that_of_the_blocks_that_hold_the_answer(
    world, corpus, tower, embeddings
):
    held_out = HeldOutQuestions(corpus, world.questions, "dev", LENGTHS.query)
    searcher = make_searcher("device", embeddings)
    recall = held_out.recall(*tower, searcher, k=5)
    bodies = [corpus.text(block).body.split() for block in range(corpus.num_blocks)]
    scores = scores_one_by_one(tower, held_out.ids, embeddings)
    expected = [
        any(question.answers[0] in bodies[b] for b in np.argsort(-row)[:5])
        for question, row in zip(held_out.questions, scores, strict=True)
    ]
    np.testing.assert_array_equal(recall, expected)
    assert 0 < recall.mean() < 1
    with refused("nobody"):
        HeldOutQuestions(corpus, world.questions, "nobody", LENGTHS.query)


def test_no_block_is_read_that_was_not_retrieved(
    world, corpus, tower, embeddings, monkeypatch
):
    """Also when several k are asked for, of which the largest decides."""
    read = []
    texts = type(corpus).texts

    def counted(store, block_ids):
        read.extend(np.asarray(block_ids).tolist())
        return texts(store, block_ids)

    monkeypatch.setattr(type(corpus), "texts", counted)
    held_out = HeldOutQuestions(corpus, world.questions, "dev", LENGTHS.query)
    assert read == []
    searcher = make_searcher("device", embeddings)
    found = search_questions(*tower, searcher, held_out.ids, 2)
    recalls = held_out.recalls(*tower, searcher, (1, 2))
    assert read == np.unique(found.ids).tolist()
    assert len(read) < corpus.num_blocks
    np.testing.assert_array_equal(recalls[1], held_out.recall(*tower, searcher, 1))
