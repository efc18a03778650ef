import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.data.features import query_row, stack
from realm_jax.data.masking import pretrain_specs
from realm_jax.errors import BadInputError


@settings(deadline=None)
@given(pieces=st.lists(st.integers(5, 400), max_size=20), length=st.integers(3, 16))
def test_a_query_row_keeps_its_ends_and_as_much_as_fits(small_store, pieces, length):
    vocabulary = small_store.vocabulary
    expected = [vocabulary.cls]
    for piece in pieces:
        if len(expected) < length - 1:
            expected.append(piece)
    expected.append(vocabulary.sep)
    while len(expected) < length:
        expected.append(0)
    row = query_row(np.array(pieces, np.int32), length, vocabulary)
    assert row.tolist() == expected


def test_a_row_without_room_is_refused(small_store):
    pieces = np.array([7], np.int32)
    with pytest.raises(BadInputError, match="query length of 2"):
        query_row(pieces, 2, small_store.vocabulary)


def test_no_examples_stack_to_arrays_of_no_rows():
    stacked = stack([], pretrain_specs(12, 3))
    shapes = {name: (array.shape, array.dtype) for name, array in stacked.items()}
    assert shapes == {
        "query_ids": ((0, 12), np.int32),
        "mask_positions": ((0, 3), np.int32),
        "mask_ids": ((0, 3), np.int32),
        "mask_weights": ((0, 3), np.float32),
        "source_block": ((0,), np.int32),
    }
