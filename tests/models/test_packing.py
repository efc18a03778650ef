"""Packed sequences: every one is there, and gives what it gives by itself."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from realm_jax.models import packing
from realm_jax.models.bert import Bert
from tests.models.conftest import assert_close


def make_ids(lengths, width=12):
    """Sequences of distinct wordpieces, so that none can be mistaken for another."""
    ids = 1 + np.arange(len(lengths) * width).reshape(len(lengths), width)
    return np.where(np.arange(width) < np.array(lengths)[:, None], ids, 0)


# Of few sizes, for each of which it is compiled.
LENGTHS = st.sampled_from([1, 4, 9]).flatmap(
    lambda size: st.lists(st.integers(0, 12), min_size=size, max_size=size)
)


@hypothesis.given(LENGTHS)
@hypothesis.settings(max_examples=30)
def test_every_sequence_is_in_the_rows_once_and_whole(lengths):
    ids = make_ids(lengths)
    packed = jax.jit(packing.pack, static_argnums=2)(ids, 2 * ids, 24)
    assert len(packed.ids) == (len(lengths) + 1) // 2
    found = {}
    for row, sequences in enumerate(np.asarray(packed.sequences)):
        for number in (1, 2):
            there = sequences == number
            pieces = tuple(packed.ids[row][there].tolist())
            found[pieces] = found.get(pieces, 0) + 1
            assert packed.positions[row][there].tolist() == list(range(len(pieces)))
            assert packed.segment_ids[row][there].tolist() == [2 * p for p in pieces]
        assert not packed.ids[row][sequences == 0].any()
    found.pop((), None)
    expected = [tuple(row[row > 0].tolist()) for row in ids if row.any()]
    assert found == dict.fromkeys(expected, 1)


def test_the_longest_shares_a_row_with_the_shortest():
    for longest, lengths in {13: [12, 1, 7, 6], 9: [9, 3, 4], 2: [2]}.items():
        ids = make_ids(lengths)
        assert packing.fits(ids, longest)
        assert not packing.fits(ids, longest - 1)


def every_state(config, params, ids, segment_ids, packed_length):
    encoded = Bert(config).apply(
        {"params": params}, ids, segment_ids, packed_length=packed_length
    )
    return jnp.where((ids > 0)[..., None], encoded.sequence, 0.0)


def some_states(config, params, ids, segment_ids, packed_length):
    positions = np.array([[0, 2], [1, 4], [0, 1], [7, 3]], np.int32)[: len(ids)]
    return Bert(config).apply(
        {"params": params},
        ids,
        segment_ids,
        positions,
        packed_length=packed_length,
        method="encode_positions",
    )


@pytest.mark.parametrize(("count", "states"), [(4, every_state), (3, some_states)])
def test_packed_sequences_are_encoded_alike(config, params, joined, states, count):
    ids, segment_ids = (array[:count] for array in joined)
    length = 18
    assert packing.fits(ids, length)

    def loss(params, packed_length):
        found = states(config, params, ids, segment_ids, packed_length)
        return jnp.sin(found).sum(), found

    step = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    gradient, found = step(params, length)
    expected_gradient, expected = step(params, None)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-4)


def test_packing_with_recomputation_and_dropout(config, params, joined):
    config = dataclasses.replace(config, remat="dots", dropout_rate=0.5)
    states = [
        Bert(config)
        .apply(
            {"params": params},
            *joined,
            deterministic=False,
            packed_length=18,
            rngs={"dropout": jax.random.key(seed)},
        )
        .pooled
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(states[0], states[1])
    assert np.abs(np.asarray(states[0] - states[2])).max() > 0.01
    assert np.isfinite(states[0]).all()
