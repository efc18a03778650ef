"""Manifests: what was sealed comes back, and what differs by a bit is named."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realm_jax.manifests import FileRecord, find_damage, parse_files, seal, unseal

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text().filter(lambda name: name != "crc32c"), VALUES)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES, st.data())
def test_what_was_sealed_comes_back_and_no_other_bit_passes(body, data):
    sealed = seal(body)
    assert unseal(sealed) == body
    assert json.loads(sealed).items() >= body.items()
    changed = bytearray(sealed)
    place = data.draw(st.integers(0, len(sealed) - 1))
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match=r"."):
        unseal(bytes(changed))


def test_what_was_never_sealed_does_not_pass():
    for text in (b"", b"3", b"{}", b'{"a": 1}\n', b"\xff", b"[1]"):
        with pytest.raises(ValueError, match=r"."):
            unseal(text)
    assert unseal(b'{"a": 1}', required=False) == {"a": 1}
    for text in (b"[1]", b'{"a": 1, "crc32c": null}', b'{"a": 1, "crc32c": 0}'):
        with pytest.raises(ValueError, match="checksum"):
            unseal(text, required=False)


def test_what_an_earlier_release_sealed_passes_in_its_order():
    """The bytes that one wrote: keys as they were put in, not in order."""
    text = (
        b'{\n "step": 4,\n "details": {\n  "number": 2,\n  "utility": -0.5\n },\n'
        b' "files": {\n  "4/x": {\n   "size": 9,\n   "crc32c": 3808858755\n'
        b'  }\n },\n "crc32c": 3883119423\n}\n'
    )
    body = unseal(text)
    assert list(body) == ["step", "details", "files"]
    # The check value of CRC-32C.
    assert parse_files(body["files"]) == {"4/x": FileRecord.of(b"123456789")}
    with pytest.raises(ValueError, match="does not fit"):
        unseal(text.replace(b"-0.5", b"-0.6"))
    digits = {"x": {"size": 9, "crc32c": "e3069283"}}
    assert parse_files(digits) == {"x": FileRecord(9, 0xE3069283)}


def test_the_order_in_which_a_body_was_filled_does_not_show():
    one, two = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}
    assert seal(one) == seal(two)


def test_the_first_file_that_is_not_as_it_was_is_named():
    contents = {"a": b"sound", "b": b"held", "c": b""}
    files = {name: FileRecord.of(data) for name, data in contents.items()}
    assert find_damage(files, files.get) is None
    for found, said in (
        (None, "b is missing"),
        (b"short", "b has 5 bytes, not 4"),
        (b"lost", "b is damaged (crc32c "),
        (b"sold", "b is damaged (crc32c "),
    ):
        now = None if found is None else FileRecord.of(found)
        there = files | {"b": now, "c": FileRecord.of(b"more")}
        assert find_damage(files, there.get).startswith(said)
