"""How `bench.encoder_settings` reads what it compares."""

import pytest

from bench.encoder_settings import settings_from
from realm_jax.errors import BadInputError


def test_settings_are_those_of_the_encoder():
    found = settings_from("products=bfloat16,scan_unroll=6,attention_dropout_rate=None")
    expected = {
        "products": "bfloat16",
        "scan_unroll": 6,
        "attention_dropout_rate": None,
    }
    assert found == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [("layers=6", "'layers=6'"), ("remat", "'remat'"), ("products=int8", "products")],
)
def test_what_is_none_is_refused(text, said):
    with pytest.raises(BadInputError, match=said):
        settings_from(text)
