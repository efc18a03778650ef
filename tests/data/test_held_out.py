import hashlib

import pytest

from realm_jax.data.documents import (
    held_out,
    is_held_out,
    share_of_at_least_one,
    stable_uniform,
)


def test_numbers_stay_what_they_were():
    # Spelled out: a changed hash would silently move articles between the splits.
    digest = hashlib.blake2b(b"validation\x00town-1", digest_size=8).digest()
    expected = (int.from_bytes(digest, "little") // 2**11) / 2**53
    assert stable_uniform("validation", "town-1") == expected
    assert stable_uniform(0, 12, 3) == 0.4571624582551126


def test_a_larger_share_holds_out_more_of_the_same():
    sources = [f"article {i}" for i in range(5_000)]
    few, many = held_out(sources, 0.01), held_out(sources, 0.05)
    assert few.sum() == pytest.approx(50, abs=28)
    assert many.sum() == pytest.approx(250, abs=62)
    assert (few <= many).all()
    assert [is_held_out(source) for source in sources] == few.tolist()
    assert not held_out(sources, 0.0).any()
    assert held_out(sources, 1.0).all()


def test_of_a_few_articles_the_first_that_any_share_holds_out_is_held_out():
    sources = [f"article {i}" for i in range(20)]
    assert not held_out(sources, 0.01).any()
    kept = held_out(sources, share_of_at_least_one(sources, 0.01))
    assert kept.sum() == 1
    shares = [share / 1000 for share in range(1001)]
    smallest = next(share for share in shares if held_out(sources, share).any())
    assert held_out(sources, smallest)[kept].all()
    # A share that holds out enough stays, and so does none at all.
    assert share_of_at_least_one(sources, 0.5) == 0.5
    assert share_of_at_least_one(sources, 0.0) == 0.0
