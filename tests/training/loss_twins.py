"""Losses one sequence at a time, in float64, and inputs small enough for that."""

import functools
import math

import jax
import numpy as np

from realm_jax.index.candidates import gather_candidates
from realm_jax.metrics import means as means_lib
from realm_jax.models.retriever import Retriever
from realm_jax.objectives.open_qa import AnswerMarginalization
from realm_jax.training.finetune_loss import FinetuneInputs
from realm_jax.training.initialization import initial_params
from realm_jax.training.pretrain_loss import PretrainInputs
from realm_jax.training.warm_start_loss import ReaderInputs, WarmStartInputs
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
    source_block = np.full(3, -1, np.int32)
    return PretrainBatch(query_ids, positions, mask_ids, weights, source_block)


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
    answer_ids, rows = np.zeros((2, 1, 1), np.int32), np.arange(2, dtype=np.int32)
    return FinetuneInputs(
        questions=QuestionBatch(question_ids, answer_ids, rows),
        block_embeddings=rng.standard_normal((2, 3, 8)).astype(np.float32),
        block_valid=blocks >= 0,
        block_has_answer=np.array([[False, True, True], [True, False, False]]),
        joined_ids=joined_ids,
        joined_segment_ids=joined_segment_ids,
        span_is_answer=answers,
    )


def embed(retriever, params, method, *ids):
    """One sequence, alone, in float64 from here on."""
    rows = [row[None] for row in ids]
    return np.asarray(_embed(retriever, params["retriever"], method, *rows), float)[0]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _embed(retriever, params, method, *rows):
    return retriever.apply({"params": params}, *rows, method=method)


def read_one(reader, params, *row):
    """One sequence, alone: logits in float64, or those of spans and which are valid."""
    found = _read(reader, params, *(part[None] for part in row))
    return jax.tree.map(lambda part: np.asarray(part, np.float64)[0], found)


@functools.partial(jax.jit, static_argnums=0)
def _read(reader, params, *rows):
    return reader.apply({"params": params["reader"]}, *rows)


def softmax(scores):
    highest = max(scores)
    exponentials = [math.exp(score - highest) for score in scores]
    total = sum(exponentials)
    return [value / total for value in exponentials]


def surprises(reader, params, reading, positions, ids, places):
    """Negative log-probabilities of the wordpieces at these rows and slots."""
    found = []
    for i, m in places:
        row = reading.joined_ids[i], reading.joined_segment_ids[i], positions[i]
        found.append(-math.log(softmax(read_one(reader, params, *row)[m])[ids[i, m]]))
    return found


def padding_in(*arrays):
    """The share of zeros, one number after the other."""
    numbers = [number for array in arrays for number in np.ravel(array)]
    return numbers.count(0) / len(numbers)


def measured(loss, params, inputs):
    """The value of a loss, and its metrics."""
    value, means = jax.jit(loss)(params, inputs, KEY)
    return float(value), means_lib.compute(means)


def finetune_parts(retriever, reader, params, inputs):
    """Embeddings of questions; of what is read, the logits and which are valid."""
    questions = inputs.questions.question_ids
    queries = [embed(retriever, params, "embed_queries", row) for row in questions]
    logits = {}
    for place in np.ndindex(2, 2):
        row = inputs.joined_ids[place], inputs.joined_segment_ids[place]
        read = read_one(reader, params, *row)
        logits[place] = read.logits, read.valid > 0
    return queries, logits


def twin_of_finetune(queries, blocks, logits, inputs, marginalization):
    """By question the retriever's loss and the reader's, None if it reads no answer."""
    losses = []
    for i, query in enumerate(queries):
        real = np.flatnonzero(inputs.block_valid[i])
        scores = blocks[i] @ query
        found = np.array(softmax(scores[real]))
        of_retriever = -math.log(found[inputs.block_has_answer[i, real]].sum())
        right, everything, share = 0.0, 0.0, softmax(scores[:2])
        for z in range(2):
            values, valid = logits[i, z]
            places = np.flatnonzero(valid)
            if marginalization is AnswerMarginalization.PRODUCT:
                mass = share[z] * np.array(softmax(values[places]))
            else:
                mass = np.exp(values[places] + scores[z])
            right += mass[inputs.span_is_answer[i, z, places]].sum()
            everything += mass.sum()
        losses.append((of_retriever, -math.log(right / everything) if right else None))
    return losses


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
            scores.append(float(query @ document))
        scored = [m for m in range(2) if batch.mask_weights[i, m]]
        tokens = []
        for z in real:
            row = found.joined_ids[i, z], found.joined_segment_ids[i, z]
            logits = read_one(reader, params, *row, batch.mask_positions[i])
            tokens.append([softmax(logits[m])[batch.mask_ids[i, m]] for m in scored])
        examples.append((softmax(scores), tokens))
    return examples
