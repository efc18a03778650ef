"""Losses against loops in float64, one sequence at a time, and where gradients go."""

import functools
import math

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.index.candidates import gather_candidates
from realm_jax.metrics import means as means_lib
from realm_jax.models import span_reader
from realm_jax.models.knowledge_encoder import KnowledgeEncoder
from realm_jax.models.retriever import Retriever
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.masked_lm import Marginalization
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.objectives.retrieval import Normalization, log_share_of_batch
from realm_jax.training.initialization import initial_params
from realm_jax.training.losses import (
    FinetuneInputs,
    FinetuneLoss,
    PretrainInputs,
    PretrainLoss,
    ReaderInputs,
    WarmStartInputs,
    WarmStartLoss,
)
from realm_jax.training.unmasked_targets import UnmaskedTargets
from realm_jax.types import InverseClozeBatch, PretrainBatch, QuestionBatch
from tests import tiny_world
from tests.tiny_world import LENGTHS

KEY = jax.random.key(0)
MAX_SPAN = 3


def make(corpus, reader_class, *, dropout=0.0, **options):
    """Towers, reader, and parameters large enough that documents differ."""
    models = tiny_world.models(dropout=dropout)
    config = models.retriever_config(corpus.vocabulary.size)
    retriever, reader = Retriever(config), reader_class(config.bert, **options)
    return retriever, reader, draw(corpus.vocabulary.size, reader_class)


@functools.cache
def draw(vocab_size, reader_class):
    config = tiny_world.models().retriever_config(vocab_size)
    params, _ = initial_params(
        Retriever(config), reader_class(config.bert), LENGTHS, seed=3
    )
    return jax.tree.map(lambda x: 8 * np.asarray(x) if x.ndim > 1 else x, params)


def masked_queries(corpus):
    """Three sentences: two masks, one mask, none."""
    query_ids = corpus.joined_ids(
        np.full((3, 1), corpus.vocabulary.cls), np.array([[0], [4], [9]]), 9
    )[0][:, 0]
    positions = np.array([[3, 4], [2, 0], [0, 0]], np.int32)
    weights = np.array([[1, 1], [1, 0], [0, 0]], np.float32)
    mask_ids = np.take_along_axis(query_ids, positions, 1) * weights.astype(np.int32)
    query_ids = query_ids.copy()
    for row, position in ((0, 3), (0, 4), (1, 2)):
        query_ids[row, position] = corpus.vocabulary.mask
    return PretrainBatch(
        query_ids=query_ids,
        mask_positions=positions,
        mask_ids=mask_ids,
        mask_weights=weights,
        source_block=np.full(3, -1, np.int32),
    )


def pretrain_inputs(corpus):
    """Null document and two blocks each; the second row has an empty slot."""
    batch = masked_queries(corpus)
    candidates = gather_candidates(
        corpus,
        np.array([[-1, 4, 7], [-1, 2, -1], [-1, 3, 5]], np.int32),
        batch.query_ids,
        document_length=LENGTHS.document,
        joined_length=LENGTHS.joined,
    )
    return PretrainInputs(batch, candidates)


def embed(retriever, params, method, *ids):
    """One sequence, alone, in float64 from here on."""
    rows = [np.asarray(row)[None] for row in ids]
    return np.asarray(_embed(retriever, params["retriever"], method, *rows), float)[0]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _embed(retriever, params, method, *rows):
    return retriever.apply({"params": params}, *rows, method=method)


@functools.partial(jax.jit, static_argnums=0)
def read(reader, params, *rows):
    return reader.apply({"params": params["reader"]}, *rows)


def softmax(scores):
    exponentials = [math.exp(score - max(scores)) for score in scores]
    return [value / sum(exponentials) for value in exponentials]


def token_probability(logits, token):
    return softmax([float(value) for value in logits])[int(token)]


def padding_in(*arrays):
    """The share of zeros, one number after the other."""
    numbers = [int(number) for array in arrays for number in np.ravel(array)]
    return sum(number == 0 for number in numbers) / len(numbers)


def twin_of_pretrain(retriever, reader, params, inputs):
    """p(z|x) and, for each scored mask, p(token|z,x), by example and document."""
    batch, found = inputs.batch, inputs.candidates
    examples = []
    for i in range(len(batch.query_ids)):
        query = embed(retriever, params, "embed_queries", batch.query_ids[i])
        real = [z for z in range(3) if found.valid[i, z]]
        scores = []
        for z in real:
            row = found.document_ids[i, z], found.document_segment_ids[i, z]
            document = embed(retriever, params, "embed_documents", *row)
            scores.append(
                sum(float(a) * float(b) for a, b in zip(query, document, strict=True))
            )
        scored = [m for m in range(2) if batch.mask_weights[i, m]]
        tokens = []
        for z in real:
            row = (
                found.joined_ids[i, z][None],
                found.joined_segment_ids[i, z][None],
                batch.mask_positions[i][None],
            )
            logits = np.asarray(read(reader, params, *row), np.float64)[0]
            tokens.append(
                [token_probability(logits[m], batch.mask_ids[i, m]) for m in scored]
            )
        examples.append((softmax(scores), tokens))
    return examples


@pytest.mark.parametrize("marginalization", list(Marginalization))
def test_pretrain_loss_equals_its_twin(corpus, marginalization):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    loss = PretrainLoss(retriever, reader, marginalization)
    value, means = jax.jit(loss)(params, inputs, KEY)
    twin = twin_of_pretrain(retriever, reader, params, inputs)
    scored = [(p, tokens) for p, tokens in twin if tokens[0]]
    assert len(scored) == 2
    spans = [[math.prod(row) for row in tokens] for _, tokens in scored]
    marginals = [
        sum(a * b for a, b in zip(p, span, strict=True))
        for (p, _), span in zip(scored, spans, strict=True)
    ]
    if marginalization is Marginalization.PER_SPAN:
        terms = marginals
    else:
        terms = [
            sum(p[z] * tokens[z][m] for z in range(len(p)))
            for p, tokens in scored
            for m in range(len(tokens[0]))
        ]
    expected = -sum(math.log(term) for term in terms) / len(terms)
    assert float(value) == pytest.approx(expected, rel=1e-4)
    utility = [
        math.log(marginal / span[0])
        for marginal, span in zip(marginals, spans, strict=True)
    ]
    entropy = [-sum(q * math.log(q) for q in p) for p, _ in scored]
    assert means_lib.compute(means) == pytest.approx(
        {
            "loss": expected,
            "retrieval_utility": sum(utility) / 2,
            "likelihood": sum(marginals) / 2,
            "null_likelihood": sum(span[0] for span in spans) / 2,
            "null_retrieval": sum(p[0] for p, _ in scored) / 2,
            "retrieval_entropy": sum(entropy) / 2,
            "padding_share": padding_in(
                inputs.batch.query_ids,
                inputs.candidates.document_ids,
                inputs.candidates.joined_ids,
            ),
        },
        rel=1e-3,
        abs=1e-6,
    )
    # The twin would agree with anything if documents made no difference.
    assert max(abs(value) for value in utility) > 0.01


def test_normalised_over_the_batch_the_loss_adds_the_share_of_the_own_candidates(
    corpus,
):
    """The metrics stay those of the candidates, so that runs can be compared."""
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    of_candidates, means = jax.jit(PretrainLoss(retriever, reader))(params, inputs, KEY)
    loss = PretrainLoss(retriever, reader, normalization=Normalization.BATCH)
    of_batch, batch_means = jax.jit(loss)(params, inputs, KEY)
    candidates = inputs.candidates
    bound = retriever.bind({"params": params["retriever"]})
    log_share = log_share_of_batch(
        *bound(
            inputs.batch.query_ids,
            candidates.document_ids,
            candidates.document_segment_ids,
        ),
        candidates.block_ids,
        inputs.batch.source_block,
        candidates.valid,
    )
    # The third sentence has nothing to score.
    expected = float(of_candidates) - float(log_share[:2].mean())
    assert float(of_batch) == pytest.approx(expected, rel=1e-5)
    assert expected > float(of_candidates) + 0.01
    means, batch_means = means_lib.compute(means), means_lib.compute(batch_means)
    share = batch_means.pop("share_of_batch")
    assert share == pytest.approx(float(jnp.exp(log_share[:2]).mean()), rel=1e-5)
    assert batch_means.pop("loss") == pytest.approx(expected, rel=1e-5)
    del means["loss"]
    assert batch_means == pytest.approx(means, rel=1e-5)


def gradient_of(loss, params, inputs):
    gradient = jax.jit(jax.grad(lambda p, x: loss(p, x, KEY)[0]))(params, inputs)
    flat = flax.traverse_util.flatten_dict(jax.device_get(gradient), sep="/")
    assert all(np.isfinite(value).all() for value in flat.values())
    # A number added to every key changes no softmax: rounding alone decides.
    return {
        name: float(np.abs(value).max())
        for name, value in flat.items()
        if not name.endswith("attention/key/bias")
    }


def test_the_pretrain_gradient_reaches_both_towers_and_the_reader(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    gradient = gradient_of(
        PretrainLoss(retriever, reader), params, pretrain_inputs(corpus)
    )
    untouched = {name for name, size in gradient.items() if size == 0.0}
    # The reader has no use for the pooler of its encoder.
    assert untouched == {"reader/bert/pooler/kernel", "reader/bert/pooler/bias"}
    for tower in ("query_tower", "document_tower"):
        assert gradient[f"retriever/{tower}/bert/token_embedding/embedding"] > 1e-5


def test_dropout_only_with_a_key(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder, dropout=0.5)
    inputs = pretrain_inputs(corpus)
    likelihood = functools.partial(
        jax.jit(PretrainLoss(retriever, reader).likelihood), params, inputs
    )
    without = [likelihood(None)[0].log_marginal for _ in range(2)]
    np.testing.assert_array_equal(*without)
    drawn = [likelihood(jax.random.key(i))[0].log_marginal for i in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (np.asarray(drawn[0]) != np.asarray(drawn[2]))[:2].all()
    assert (np.asarray(drawn[0]) != np.asarray(without[0]))[:2].all()


def warm_start_inputs(corpus):
    """Pairs of blocks 0, 4 and 4 again; sentences read with blocks 0, 4 and 9."""
    batch = masked_queries(corpus)
    blocks = np.array([0, 4, 4], np.int32)
    document_ids, segment_ids = corpus.document_ids(blocks, LENGTHS.document)
    joined_ids, joined_segment_ids = corpus.joined_ids(
        batch.query_ids, np.array([[0], [4], [9]]), LENGTHS.joined
    )
    pairs = InverseClozeBatch(batch.query_ids, document_ids, segment_ids, blocks)
    reading = ReaderInputs(
        batch,
        joined_ids[:, 0],
        joined_segment_ids[:, 0],
        kind=np.array([0, 2, 2], np.int32),
        has_answer=np.array([False, True, False]),
    )
    return WarmStartInputs(pairs, reading)


def test_warm_start_loss_equals_its_twin(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = warm_start_inputs(corpus)
    value, means = jax.jit(WarmStartLoss(retriever, reader))(params, inputs, KEY)
    pairs, reading, terms = inputs.pairs, inputs.reading, []
    documents = [
        embed(retriever, params, "embed_documents", *row)
        for row in zip(pairs.document_ids, pairs.document_segment_ids, strict=True)
    ]
    for i in range(3):
        query = embed(retriever, params, "embed_queries", pairs.query_ids[i])
        # Another pair of the same block is no negative.
        others = [j for j in range(3) if pairs.block_ids[j] != pairs.block_ids[i]]
        scores = [float(query @ documents[j]) for j in [i, *others]]
        terms.append(-math.log(softmax(scores)[0]))
    tokens = []
    for i, m in ((0, 0), (0, 1), (1, 0)):
        logits = read(
            reader,
            params,
            reading.joined_ids[i][None],
            reading.joined_segment_ids[i][None],
            reading.batch.mask_positions[i][None],
        )
        tokens.append(
            -math.log(
                token_probability(
                    np.asarray(logits, np.float64)[0, m], reading.batch.mask_ids[i, m]
                )
            )
        )
    found = means_lib.compute(means)
    assert found["retriever_loss"] == pytest.approx(sum(terms) / 3, rel=1e-4)
    assert found["reader_loss"] == pytest.approx(sum(tokens) / 3, rel=1e-4)
    # The first sentence has two masks and reads its own block, the second has one and
    # reads a retrieved block; the third has none.
    assert found["reader_loss_own"] == pytest.approx(sum(tokens[:2]) / 2, rel=1e-4)
    assert found["reader_loss_retrieved"] == pytest.approx(tokens[2], rel=1e-4)
    assert "reader_loss_null" not in found
    assert found["answer_retrieved"] == 0.5
    assert found["padding_share"] == pytest.approx(
        padding_in(pairs.query_ids, pairs.document_ids, reading.joined_ids)
    )
    assert float(value) == pytest.approx(sum(terms) / 3 + sum(tokens) / 3, rel=1e-4)


def test_a_reader_with_a_span_scorer_also_selects_the_masked_span(corpus):
    make_encoder = functools.partial(KnowledgeEncoder, span_scorer=True)
    retriever, reader, params = make(corpus, make_encoder)
    reading = warm_start_inputs(corpus).reading
    # One answer of two wordpieces in the first document, none in the others.
    starts = np.argmax(reading.joined_segment_ids, axis=1)
    answers = np.zeros((3, LENGTHS.joined, span_reader.MAX_SPAN), bool)
    answers[0, starts[0] + 1, 1] = True
    answers = answers.reshape(3, -1)
    loss = jax.jit(WarmStartLoss(retriever, reader))
    value, means = loss(
        params,
        WarmStartInputs(None, reading.replace(span_is_answer=answers)),
        KEY,
    )
    of_questions = SpanReader(reader.config)
    names = ("bert", "span_dense", "span_norm", "span_output")
    scores = jax.jit(of_questions.apply)(
        {"params": {name: params["reader"][name] for name in names}},
        reading.joined_ids[:1],
        reading.joined_segment_ids[:1],
    )
    spans = softmax(np.asarray(scores.logits[0], np.float64)[scores.valid[0]])
    (place,) = np.flatnonzero(answers[0][np.asarray(scores.valid[0])])
    found = means_lib.compute(means)
    assert found["span_loss"] == pytest.approx(-math.log(spans[place]), rel=1e-4)
    assert found["span_accuracy"] == float(spans[place] == max(spans))
    _, without = loss(params, WarmStartInputs(None, reading), KEY)
    without = means_lib.compute(without)
    assert "span_loss" not in without
    assert found["reader_loss"] == pytest.approx(without["reader_loss"], rel=1e-5)
    assert float(value) == pytest.approx(
        found["reader_loss"] + found["span_loss"], rel=1e-5
    )


def test_a_reader_that_also_predicts_what_is_not_masked(corpus):
    """The twin asks the reader for each place by itself."""
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    reading = warm_start_inputs(corpus).reading
    # The first sentence has no slot left, the second one and the third two.
    positions = np.array([[0, 0], [0, 5], [1, 10]], np.int32)
    unmasked = UnmaskedTargets(
        np.array([[0, 0], [0, 1], [1, 1]], np.float32),
        positions,
        np.take_along_axis(reading.joined_ids, positions, axis=1),
    )
    loss = jax.jit(WarmStartLoss(retriever, reader))
    value, means = loss(
        params, WarmStartInputs(None, reading.replace(unmasked=unmasked)), KEY
    )
    seen = []
    for i, m in ((1, 1), (2, 0), (2, 1)):
        logits = read(
            reader,
            params,
            reading.joined_ids[i][None],
            reading.joined_segment_ids[i][None],
            positions[i][None],
        )
        logits = np.asarray(logits, np.float64)[0, m]
        seen.append(-math.log(token_probability(logits, unmasked.ids[i, m])))
    plain, of_masked = loss(params, WarmStartInputs(None, reading), KEY)
    found, of_masked = means_lib.compute(means), means_lib.compute(of_masked)
    assert found["reader_loss_unmasked"] == pytest.approx(sum(seen) / 3, rel=1e-4)
    assert float(value) == pytest.approx(float(plain) + sum(seen) / 3, rel=1e-4)
    # What is said of masked wordpieces is said of them alone.
    for name in ("reader_loss", "reader_loss_own", "reader_loss_retrieved"):
        assert found[name] == pytest.approx(of_masked[name], rel=1e-5)


@pytest.mark.parametrize("trained", ["retriever", "reader"])
def test_a_warm_start_of_one_model_computes_nothing_of_the_other(corpus, trained):
    retriever, reader, params = make(corpus, KnowledgeEncoder, dropout=0.1)
    both = warm_start_inputs(corpus)
    loss = WarmStartLoss(retriever, reader)
    inputs = both.replace(**{"pairs" if trained == "reader" else "reading": None})
    # Parameters that are not there cannot be computed with.
    value, means = loss({trained: params[trained]}, inputs, KEY)
    found, of_both = (means_lib.compute(m) for m in (means, loss(params, both, KEY)[1]))
    assert float(value) == found["loss"] == found[f"{trained}_loss"]
    assert found[f"{trained}_loss"] == pytest.approx(of_both[f"{trained}_loss"])
    words = {"retriever": ("retriever_", "in_batch_"), "reader": ("reader_", "answer_")}
    expected = {name for name in of_both if name.startswith(words[trained])}
    assert found.keys() == expected | {"loss", "padding_share"}


def test_the_warm_start_gradient_reaches_both_towers_and_the_reader(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    gradient = gradient_of(
        WarmStartLoss(retriever, reader), params, warm_start_inputs(corpus)
    )
    untouched = {name for name, size in gradient.items() if size == 0.0}
    assert untouched == {"reader/bert/pooler/kernel", "reader/bert/pooler/bias"}


def finetune_inputs(corpus):
    """Three blocks retrieved, two read; the second question has an empty last slot."""
    batch = masked_queries(corpus)
    question_ids = batch.query_ids[:2]
    blocks = np.array([[4, 7, 2], [5, 1, -1]], np.int32)
    joined_ids, joined_segment_ids = corpus.joined_ids(
        question_ids, blocks[:, :2], LENGTHS.joined
    )
    answers = np.zeros((2, 2, LENGTHS.joined * MAX_SPAN), bool)
    # Somewhere in the bodies: two right spans for the first question, none elsewhere.
    body = int(np.argmax(joined_segment_ids[0, 0]))
    answers[0, 0, (body + 1) * MAX_SPAN + 1] = True
    answers[0, 1, (body + 2) * MAX_SPAN] = True
    rng = np.random.default_rng(0)
    return FinetuneInputs(
        questions=QuestionBatch(
            question_ids, np.zeros((2, 1, 1), np.int32), np.arange(2, dtype=np.int32)
        ),
        block_embeddings=rng.standard_normal((2, 3, 8)).astype(np.float32),
        block_valid=blocks >= 0,
        block_has_answer=np.array([[False, True, True], [True, False, False]]),
        joined_ids=joined_ids,
        joined_segment_ids=joined_segment_ids,
        span_is_answer=answers,
    )


@pytest.mark.parametrize("marginalization", list(AnswerMarginalization))
def test_finetune_loss_equals_its_twin(corpus, marginalization):
    retriever, reader, params = make(corpus, SpanReader, max_span=MAX_SPAN)
    inputs = finetune_inputs(corpus)
    loss = FinetuneLoss(retriever, reader, marginalization)
    value, means = jax.jit(loss)(params, inputs, KEY)
    retriever_loss, reader_loss = [], []
    for i in range(2):
        query = embed(
            retriever, params, "embed_queries", inputs.questions.question_ids[i]
        )
        real = [z for z in range(3) if inputs.block_valid[i, z]]
        scores = [
            float(query @ np.asarray(inputs.block_embeddings[i, z], np.float64))
            for z in real
        ]
        blocks = softmax(scores)
        right = sum(blocks[z] for z in real if inputs.block_has_answer[i, z])
        retriever_loss.append(-math.log(right))
        spans, right_spans, within = [], [], []
        for z in range(2):
            row = inputs.joined_ids[i, z][None], inputs.joined_segment_ids[i, z][None]
            logits, valid = (np.asarray(part)[0] for part in read(reader, params, *row))
            places = np.flatnonzero(valid)
            spans += [float(logits[s]) + scores[z] for s in places]
            right_spans += [bool(inputs.span_is_answer[i, z, s]) for s in places]
            share = softmax(scores[:2])[z]
            within += [share * p for p in softmax([float(logits[s]) for s in places])]
        joint = marginalization is AnswerMarginalization.JOINT_SOFTMAX
        mass = softmax(spans) if joint else within
        right = sum(
            p for p, is_right in zip(mass, right_spans, strict=True) if is_right
        )
        reader_loss.append(-math.log(right) if any(right_spans) else None)
    assert reader_loss[0] is not None
    assert reader_loss[1] is None
    assert means_lib.compute(means) == pytest.approx(
        {
            "loss": (sum(retriever_loss) + reader_loss[0]) / 2,
            "retriever_loss": sum(retriever_loss) / 2,
            "reader_loss": reader_loss[0],
            "answer_retrieved": 1.0,
            "answer_read": 0.5,
            "padding_share": padding_in(
                inputs.questions.question_ids, inputs.joined_ids
            ),
        },
        rel=1e-4,
    )
    assert float(value) == pytest.approx(
        (sum(retriever_loss) + reader_loss[0]) / 2, rel=1e-4
    )


def test_the_finetune_gradient_reaches_the_query_tower_and_the_reader_alone(corpus):
    retriever, reader, params = make(corpus, SpanReader, max_span=MAX_SPAN)
    gradient = gradient_of(
        FinetuneLoss(retriever, reader), params, finetune_inputs(corpus)
    )
    reached = {name for name, size in gradient.items() if size > 0}
    documents = {name for name in gradient if "/document_tower/" in name}
    poolers = {name for name in gradient if name.startswith("reader/bert/pooler")}
    assert documents
    # A number added to every logit changes no softmax.
    assert gradient.keys() - reached - {"reader/span_output/bias"} == {
        *documents,
        *poolers,
    }


def test_a_question_without_any_document_gives_no_nan(corpus):
    retriever, reader, params = make(corpus, SpanReader, max_span=MAX_SPAN)
    inputs = finetune_inputs(corpus).replace(
        block_valid=np.zeros((2, 3), bool), block_has_answer=np.zeros((2, 3), bool)
    )
    loss = FinetuneLoss(retriever, reader)
    assert float(jax.jit(loss)(params, inputs, KEY)[0]) == 0.0
    assert set(gradient_of(loss, params, inputs).values()) == {0.0}


def test_all_masks_unscored_is_no_loss_and_no_nan(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = pretrain_inputs(corpus)
    batch = inputs.batch.replace(mask_weights=jnp.zeros((3, 2)))
    loss = PretrainLoss(retriever, reader)
    value, means = jax.jit(loss)(params, PretrainInputs(batch, inputs.candidates), KEY)
    assert float(value) == 0.0
    assert means_lib.compute(means).keys() == {"padding_share"}


def several(inputs):
    """The same examples six times over, so that they split evenly."""
    return jax.tree.map(lambda array: np.concatenate([array] * 6), inputs)


@pytest.mark.parametrize("microbatches", [3])
@pytest.mark.parametrize("stage", ["pretrain", "warm_start", "finetune"])
def test_microbatches_are_the_same_loss_with_the_same_gradient(
    corpus, stage, microbatches
):
    make_loss, reader_class, inputs, options = {
        "pretrain": (PretrainLoss, KnowledgeEncoder, pretrain_inputs, {}),
        "warm_start": (WarmStartLoss, KnowledgeEncoder, warm_start_inputs, {}),
        "finetune": (
            FinetuneLoss,
            SpanReader,
            finetune_inputs,
            {"max_span": MAX_SPAN},
        ),
    }[stage]
    retriever, reader, params = make(corpus, reader_class, **options)

    def run(**changes):
        loss = make_loss(retriever, reader, **changes)
        gradient = jax.jit(jax.grad(loss, has_aux=True))
        return gradient(params, several(inputs(corpus)), KEY)

    (whole, means), (parts, means_of_parts) = run(), run(microbatches=microbatches)
    # The largest are about 1; the smallest are sums of what cancels.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        whole,
        parts,
    )
    expected, found = means_lib.compute(means), means_lib.compute(means_of_parts)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.full
def test_microbatches_take_the_memory_of_one(corpus):
    retriever, reader, params = make(corpus, KnowledgeEncoder)
    inputs = several(pretrain_inputs(corpus))

    def temporaries(**changes):
        loss = PretrainLoss(retriever, reader, **changes)
        step = jax.jit(jax.grad(loss, has_aux=True))
        analysis = step.lower(params, inputs, KEY).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries(microbatches=6) < 0.5 * temporaries()
