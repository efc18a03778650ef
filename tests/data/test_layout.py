"""Layouts against lists made one document at a time."""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.data import layout

CLS, SEP = 2, 3
pieces = st.lists(st.integers(5, 119_546), max_size=7)
documents = st.lists(st.tuples(pieces, pieces), min_size=1, max_size=4)


def made(rows, xp) -> layout.Documents:
    """As documents that follow one another, or as padded rows on a device."""
    titles, bodies = zip(*rows, strict=True)
    if xp is np:
        return layout.from_lists(
            [np.array(title, np.int32) for title in titles],
            [np.array(body, np.int32) for body in bodies],
        )
    padded = np.zeros((len(rows), 15), np.int32)
    for row, (title, body) in zip(padded, rows, strict=True):
        row[: len(title) + len(body)] = title + body
    return layout.Documents(
        lambda places: jnp.take_along_axis(padded, places, axis=-1, mode="clip"),
        jnp.array([len(title) for title in titles]),
        jnp.array([len(body) for body in bodies]),
    )


def padded(row, length):
    return row + [0] * (length - len(row))


def is_second(start, end, length):
    return [int(start <= column < end) for column in range(length)]


@hypothesis.given(rows=documents, length=st.integers(3, 20))
def test_title_then_what_fits_of_the_body(rows, length):
    ids, segments = layout.document_inputs(made(rows, np), length, CLS, SEP, np)
    for row, segment, (title, body) in zip(ids, segments, rows, strict=True):
        kept_title = title[: length - 3]
        kept_body = body[: length - 3 - len(kept_title)]
        expected = [CLS, *kept_title, SEP, *kept_body, SEP]
        assert row.tolist() == padded(expected, length)
        start = len(kept_title) + 2
        assert segment.tolist() == is_second(start, len(expected), length)


@hypothesis.given(rows=documents, query=pieces, space=st.integers(0, 9))
def test_query_then_what_fits_of_the_body(rows, query, space):
    query_ids = np.array([CLS, *query, SEP, 0, 0], np.int32)
    length = len(query_ids) + 1 + space
    ids, segments = layout.joined_inputs(made(rows, np), query_ids, length, SEP, np)
    for row, segment, (_, body) in zip(ids, segments, rows, strict=True):
        expected = [*[CLS, *query, SEP, *body][: length - 1], SEP]
        assert row.tolist() == padded(expected, length)
        assert segment.tolist() == is_second(len(query) + 2, len(expected), length)


@hypothesis.given(rows=documents, length=st.integers(1, 9))
def test_bodies_alone(rows, length):
    ids = layout.body_inputs(made(rows, np), length, np)
    expected = [padded(body[:length], length) for _, body in rows]
    assert ids.tolist() == expected


@pytest.mark.parametrize("length", [3, 6, 20])
def test_a_device_lays_out_the_same(length):
    rows = [([5, 6], [7, 8, 9]), ([], [10]), ([11] * 7, [12] * 7), ([13], [])]
    query = np.array([CLS, 5, SEP, 0, 0], np.int32)
    for make in (
        lambda xp: layout.document_inputs(made(rows, xp), length, CLS, SEP, xp),
        lambda xp: layout.joined_inputs(
            made(rows, xp), xp.asarray(query), length + 3, SEP, xp
        ),
        lambda xp: layout.body_inputs(made(rows, xp), length, xp),
    ):
        np.testing.assert_array_equal(make(jnp), make(np))
