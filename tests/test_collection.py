"""Every worker names the tests alike: pytest-xdist runs nothing otherwise."""

import gzip

from tests.conftest import pytest_make_parametrize_id


def test_the_time_of_collection_is_in_no_name():
    first, second = (gzip.compress(b"{}", mtime=time) for time in (1, 2))
    assert first != second
    assert pytest_make_parametrize_id(first) == pytest_make_parametrize_id(second)


def test_what_can_be_read_keeps_its_name():
    assert pytest_make_parametrize_id(b"id,question") is None
