"""What `bench.examples` says of the two ways to store examples."""

from bench import examples
from tests.data.conftest import small_store

__all__ = ["small_store"]


def test_both_ways_hold_the_same_rows(small_store, tmp_path):
    found = examples.measure(small_store, 1, tmp_path)
    rows = {(one.name, one.stored): one for one in found}
    for name in ("masked sentences", "inverse cloze"):
        whole, references = rows[name, "whole"], rows[name, "references"]
        assert whole.rows == references.rows > 20
        # Headers of so few rows weigh most.
        assert whole.row_bytes > 4 * references.row_bytes
    # By hand: query, masks and block; block, two places and two more, or a flag.
    by_hand = {("masked sentences", "whole"): 4 * (96 + 3 * 10 + 1)}
    by_hand["inverse cloze", "whole"] = 4 * (64 + 2 * 288 + 1)
    by_hand["masked sentences", "references"] = 4 + 2 + 2 + 1 + 1
    by_hand["inverse cloze", "references"] = 4 + 2 + 2 + 1
    assert {key: one.wikipedia_bytes for key, one in rows.items()} == by_hand
    text = examples.as_text(found, "python -m bench.examples CORPUS")
    assert "| 508 | 41.7 GB |" in text
    assert "| 9 | 0.7 GB |" in text
