import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from realm_jax.answering.masks import MaskFiller
from realm_jax.data.blocks import BlockStore
from realm_jax.data.examples import Examples
from realm_jax.evaluation.stage_results import masked_examples
from realm_jax.index.searchers import make_searcher
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.training.initialization import initial_params
from realm_jax.training.masked_spans import HeldOutSpans
from tests import tiny_world
from tests.refused import refused
from tests.tiny_world import LENGTHS

NUM_CANDIDATES = 4


pytestmark = pytest.mark.usefixtures("traced_once")


@pytest.fixture(scope="module")
def measured(world):
    """Corpus, models and what they make of the twelve held-out facts."""
    store = BlockStore.open(world.corpus)
    config = tiny_world.models().retriever_config(store.vocabulary.size)
    retriever, reader = Retriever(config), KnowledgeEncoder(config.bert)
    params, _ = initial_params(retriever, reader, LENGTHS, seed=0)
    # Loud enough that documents and words differ.
    params = jax.tree.map(lambda x: 12 * x if x.ndim > 1 else x, params)
    embeddings = jax.jit(
        lambda *row: retriever.apply(
            {"params": params["retriever"]}, *row, method="embed_documents"
        )
    )(*store.document_ids(np.arange(store.num_blocks), LENGTHS.document))
    examples = Examples.open(store.directory / "examples/asked/validation")

    @functools.cache
    def measure(max_examples):
        spans = HeldOutSpans(
            retriever,
            reader,
            corpus=store,
            examples=examples,
            num_candidates=NUM_CANDIDATES,
            lengths=LENGTHS,
            max_examples=max_examples,
        )
        return spans.fill_in(params, make_searcher("device", np.asarray(embeddings)))

    return store, retriever, reader, params, np.asarray(embeddings), measure


def softmax(scores):
    exponentials = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    return exponentials / exponentials.sum()


def test_each_span_is_filled_in_as_if_alone(measured):
    store, retriever, reader, params, embeddings, measure = measured
    spans = measure(100)
    read = jax.jit(lambda *row: reader.apply({"params": params["reader"]}, *row))
    embed = jax.jit(
        lambda method, *row: retriever.apply(
            {"params": params["retriever"]}, *row, method=method
        ),
        static_argnums=0,
    )
    null = embed(
        "embed_documents", *store.document_ids(np.array([-1]), LENGTHS.document)
    )
    assert len(spans.correct) == 12
    for i in range(12):
        query = spans.batch.query_ids[i]
        vector = np.asarray(embed("embed_queries", query[None]))[0]
        best = np.argsort(-(embeddings @ vector), kind="stable")[: NUM_CANDIDATES - 1]
        blocks = [-1, *best]
        # A query is worded as no block is, so nothing retrieved is trivial.
        assert spans.block_ids[i].tolist() == blocks
        scores = [float(null[0] @ vector), *(embeddings[best] @ vector)]
        retrieval = softmax(scores)
        np.testing.assert_allclose(
            np.exp(spans.log_retrieval[i]), retrieval, rtol=1e-3, atol=1e-6
        )
        target = int(spans.batch.mask_ids[i, 0])
        position = spans.batch.mask_positions[i][None]
        words = []
        for block in blocks:
            ids, segments = store.joined_ids(
                query[None], np.array([[block]]), LENGTHS.joined
            )
            words.append(softmax(np.asarray(read(ids[0], segments[0], position))[0, 0]))
        marginal = sum(p * w for p, w in zip(retrieval, words, strict=True))
        for found, is_correct, expected in (
            (spans.log_marginal[i], spans.correct[i], marginal),
            (spans.log_null[i], spans.null_correct[i], words[0]),
        ):
            assert math.exp(found) == pytest.approx(expected[target], rel=1e-3)
            assert is_correct == (expected.argmax() == target)


def test_fewer_are_spread_evenly_and_none_is_counted_twice(measured):
    *_, measure = measured
    all_of_them, some = measure(100), measure(3)
    rows = [0, 5, 11]
    assert (len(all_of_them.correct), len(some.correct)) == (12, 3)
    expected = all_of_them.batch.query_ids[rows]
    np.testing.assert_array_equal(some.batch.query_ids, expected)
    logs = all_of_them.log_marginal[rows]
    np.testing.assert_allclose(some.log_marginal, logs, rtol=1e-4)


def test_the_parts_of_a_masked_sentence_join_to_the_sentence(measured):
    """Cut at the mask with the spaces beside it, which a part alone would lose."""
    store, *_, measure = measured
    spans = measure(1)
    decode = store.vocabulary.decode
    for sentence, (first, last) in (
        ("kise posa nuso bura.", (1, 2)),  # A word between two others.
        ("kise posa nuso.", (2, 3)),  # Before a full stop, which stands close.
        ("posa nuso.", (0, 1)),
        ("kise. posa nuso", (2, 4)),
        ("kise fedi bura.", (1, 3)),  # A word of two pieces.
    ):
        pieces = store.vocabulary.encode(sentence).ids
        masked = pieces.copy()
        masked[first:last] = store.vocabulary.mask
        query = [store.vocabulary.cls, *masked, store.vocabulary.sep]
        batch = spans.batch.replace(
            query_ids=np.asarray([query]),
            mask_ids=pieces[None, first:last],
            mask_weights=np.ones((1, last - first), np.float32),
        )
        [example] = masked_examples(dataclasses.replace(spans, batch=batch), store, 1)
        assert example.before + example.answer + example.after == decode(pieces)
        assert example.answer == decode(pieces[first:last])
        assert "[UNK]" not in decode(pieces)


def test_the_examples_shown_are_those_that_retrieval_helped_most_and_least(measured):
    store, *_, measure = measured
    spans = measure(100)
    shown = masked_examples(spans, store, 6)
    utility = spans.log_marginal - spans.log_null
    order = np.argsort(-utility, kind="stable")
    for example, row in zip(shown, order[[0, 1, 2, 3, -2, -1]], strict=True):
        assert example.marginal == pytest.approx(math.exp(spans.log_marginal[row]))
        answer = store.vocabulary.decode(spans.batch.mask_ids[row][:1])
        assert example.answer == answer
        pieces = spans.batch.query_ids[row]
        pieces = pieces[pieces != 0][1:-1]
        (masked,) = np.flatnonzero(pieces == store.vocabulary.mask)
        pieces[masked] = spans.batch.mask_ids[row][0]
        sentence = store.vocabulary.decode(pieces)
        # Each value is a word of its own, and ends its sentence.
        assert sentence.endswith(f" {answer}.")
        parts = example.before, example.after
        assert parts == (sentence.removesuffix(f"{answer}."), ".")
        shares = [d.retrieval_probability for d in example.documents]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1.0, rel=1e-4)
        chances = [document.answer_probability for document in example.documents]
        mixed = np.dot(shares, chances)
        assert mixed == pytest.approx(example.marginal, rel=1e-3)
        assert [d.block_id for d in example.documents].count(-1) == 1
        for document in example.documents:
            body = store.text(document.block_id).body if document.block_id >= 0 else ""
            assert document.snippet == body


def sentences_of(measured, masks):
    """The held-out sentences as a person would type them, and what was measured."""
    store, *_, measure = measured
    spans = measure(100)
    rows = range(len(spans.correct))
    for example in masked_examples(spans, store, len(rows)):
        mask = masks(example.answer, len(store.vocabulary.encode(example.answer).ids))
        yield f"{example.before}{mask}{example.after}", example


@pytest.fixture(scope="module")
def filler(measured):
    store, retriever, reader, params, embeddings, _ = measured
    return MaskFiller(
        retriever=retriever.config,
        params=params,
        corpus=store,
        searcher=make_searcher("device", embeddings),
        lengths=LENGTHS,
        batch_size=1,
        reader=reader,
        num_candidates=NUM_CANDIDATES,
    )


def test_a_sentence_that_is_typed_gets_the_probabilities_that_are_measured(
    measured, filler
):
    asked = list(sentences_of(measured, lambda words, _: f"[MASK={words}]"))
    answers = filler.answer([sentence for sentence, _ in asked])
    for (sentence, example), answer in zip(asked, answers, strict=True):
        assert (answer.question, answer.text) == (sentence, example.answer)
        assert answer.probability == pytest.approx(example.marginal, rel=1e-4)
        for found, shown in zip(answer.documents, example.documents, strict=True):
            assert found.block_id == shown.block_id
            expected = shown.retrieval_probability, shown.answer_probability
            probabilities = found.probability, found.answer_probability
            assert probabilities == pytest.approx(expected, rel=1e-4)
            if found.block_id < 0:
                assert (found.title, found.text) == ("No document", "")
            else:
                assert found.text == filler.corpus.text(found.block_id).body
            for start, end in found.places:
                assert found.text[start:end].lower() == example.answer.lower()
    assert any(found.places for answer in answers for found in answer.documents)


def test_what_is_guessed_is_likelier_than_what_was_masked(measured, filler):
    given = filler.answer(
        [text for text, _ in sentences_of(measured, lambda words, _: f"[MASK={words}]")]
    )
    asked = list(sentences_of(measured, lambda _, count: " ".join(["[MASK]"] * count)))
    guessed = filler.answer([sentence for sentence, _ in asked])
    for own, other, (_, example) in zip(guessed, given, asked, strict=True):
        is_word = len(measured[0].vocabulary.encode(example.answer).ids) == 1
        # Of several wordpieces each is guessed alone, so the whole may be unlikely.
        if is_word and own.text != example.answer:
            assert own.probability > other.probability
        (again,) = filler.answer([own.question.replace("[MASK]", f"[MASK={own.text}]")])
        if is_word:
            assert again.probability == pytest.approx(own.probability, rel=1e-4)


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("kise [MASK] posa [MASK]", "one mask"),
        ("kise [MASK=nuso] [MASK]", "one mask"),
        ("kise [MASK= ] posa", "one mask"),
        ("kise [MASK=] posa", "one mask"),
        ("kise posa", "one mask"),
        ("kise " * 60 + "[MASK]", "at most .* wordpieces"),
        ("kise " + "[MASK] " * 11, "1 to 10 of them masked"),
    ],
)
def test_a_sentence_that_cannot_be_filled_in_is_refused(filler, sentence, message):
    with refused(message):
        filler.answer([sentence])
