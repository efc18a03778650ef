import dataclasses

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realm_jax.answering.reader import find_spans
from realm_jax.answering.search import batches_by_length, fill, padded_lengths
from realm_jax.index import device_search
from realm_jax.index.embed import query_embedder
from realm_jax.index.searchers import make_searcher
from realm_jax.models.span_reader import SpanReader
from realm_jax.objectives.open_qa import AnswerMarginalization
from tests.evaluation.test_answering import QUESTIONS as LONG
from tests.evaluation.tiny_reader import LENGTHS, make_answerer

# With one that is read in a shorter batch.
QUESTIONS = [*LONG, "a"]


@given(st.integers(3, 600))
def test_rows_are_padded_by_at_most_a_quarter(longest):
    lengths = padded_lengths(longest)
    assert len(lengths) <= 4
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == longest
    assert all(length % 8 == 0 for length in lengths[:-1])
    assert np.diff([0, *lengths]).max() <= longest / 4 + 8


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 9))
def test_every_row_is_in_one_batch_of_its_own_length(lengths, batch_size):
    seen = []
    for rows, length in batches_by_length(np.array(lengths, int), 100, batch_size):
        assert 0 < len(rows) <= batch_size
        for row in rows:
            fitting = [one for one in padded_lengths(100) if one >= lengths[row]]
            assert length == fitting[0]
        filled = fill(rows, batch_size)
        assert filled[: len(rows)].tolist() == rows.tolist()
        assert set(filled) == set(rows)
        assert len(filled) == batch_size
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_a_shape_is_compiled_once_for_each_length(models, corpus, embeddings):
    answerer = make_answerer(models, corpus, make_searcher("device", embeddings))
    embed = query_embedder(models.retriever.config)
    shapes = []

    class Recorded(type(answerer)):
        def _find_spans(self, *inputs):
            shapes.append(inputs[0].shape)
            return super()._find_spans(*inputs)

    answerer = Recorded(**vars(answerer))
    answerer.compile()
    assert shapes == [(8, 3, length) for length in padded_lengths(LENGTHS.joined)]
    functions = embed, find_spans, device_search.search
    compiled = [function._cache_size() for function in functions]
    del shapes[:]
    for count in range(1, len(QUESTIONS) + 1):
        answerer.answer(QUESTIONS[:count])
    assert [function._cache_size() for function in functions] == compiled
    assert set(shapes) == {(8, 3, 32), (8, 3, 48)}


def test_what_only_reads_is_not_unrolled(models):
    """It would compile for twice as long."""
    bert = dataclasses.replace(models.reader.config, num_layers=3)
    ids, edges = np.zeros((1, 1, 8), np.int32), np.zeros((1, 1, 8), bool)
    scores = np.zeros((1, 1), np.float32)

    def program(unroll):
        reader = SpanReader(dataclasses.replace(bert, scan_unroll=unroll), max_span=4)
        params = jax.eval_shape(reader.init, jax.random.key(0), ids, ids)["params"]
        inputs = (params, ids, ids, scores, edges, edges)
        return find_spans.lower(
            reader, AnswerMarginalization.PRODUCT, *inputs
        ).as_text()

    assert program(3) == program(1)


def test_an_answer_does_not_depend_on_the_questions_beside_it(
    models, corpus, embeddings
):
    """To the last bit, in batches of one size."""
    answerer = make_answerer(models, corpus, make_searcher("device", embeddings))
    together = answerer.answer(QUESTIONS)
    for question, expected in zip(QUESTIONS, together, strict=True):
        assert answerer.answer([question]) == [expected]
    assert answerer.answer(QUESTIONS[::-1]) == together[::-1]
