"""Sealed JSON: what was sealed comes back, and nothing that differs by a bit does."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realm_jax.checksummed_json import seal, unseal

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text().filter(lambda name: name != "crc32c"), VALUES)


@settings(max_examples=50)
@given(BODIES)
def test_what_was_sealed_comes_back_and_others_can_read_it(body):
    assert unseal(seal(body)) == body
    assert json.loads(seal(body)).items() >= body.items()


@settings(max_examples=50)
@given(BODIES, st.data())
def test_no_other_bit_passes(body, data):
    sealed = bytearray(seal(body))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    with pytest.raises(ValueError, match=r"."):
        unseal(bytes(sealed))


@pytest.mark.parametrize("text", [b"", b"3", b"{}", b'{"a": 1}\n', b"\xff", b"[1]"])
def test_what_was_never_sealed_does_not_pass(text):
    with pytest.raises(ValueError, match=r"."):
        unseal(text)
