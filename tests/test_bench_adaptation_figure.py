"""The figure of `bench.adaptation` draws what the tables of a page say."""

import numpy as np
import pytest

from bench.adaptation_figure import Change, draw, read_panels
from tests.refused import refused

PAGE = """
<!-- bench: adaptation-ships -->
    python -m bench.adaptation RUN

| 30 queries | nDCG@10 | change | by seed |
| --- | --- | --- | --- |
| BM25 | 31.6 [28.3, 35.1] |  |  |
| the encoder as it was | 37.0 [33.5, 40.7] |  |  |
| taught by it and BM25 | 39.2 [35.6, 42.9] | +2.2 [+0.6, +3.8] | 38.9, 39.5 |
| TSDAE | 10.1 [8.1, 12.2] | -27.0 [-30.1, -23.9] | 11.5, 8.7 |
<!-- end -->

<!-- bench: adaptation-towns -->
| 400 queries | nDCG@10 | change | by seed |
| --- | --- | --- | --- |
| ICT | 38.3 [34.7, 41.8] | +0.0 [-0.3, +2.8] |  |
<!-- end -->

<!-- bench: adaptation-to-come -->
<!-- end -->
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_rows_with_a_change_are_read_from_the_tables_that_are_there(page):
    ships, towns = read_panels(page)
    assert (ships.name, ships.queries) == ("ships", 30)
    assert ships.changes == {
        "taught by it and BM25": Change(2.2, 0.6, 3.8),
        "TSDAE": Change(-27.0, -30.1, -23.9),
    }
    assert towns.changes == {"ICT": Change(0.0, -0.3, 2.8)}


def test_what_is_beyond_the_panel_has_its_figure_at_the_edge(page):
    ships, towns = draw(read_panels(page)).axes
    rows = ["taught by it and BM25", "TSDAE", "ICT"]
    assert [label.get_text() for label in ships.get_yticklabels()] == rows
    assert [text.get_text() for text in ships.texts] == ["◀ -27"]
    assert not towns.texts
    points = np.concatenate([line.get_xydata() for line in ships.lines[1:]])
    assert {*map(tuple, points)} == {(2.2, 0), (0.6, 0), (3.8, 0)}


def test_a_page_without_such_tables_is_refused(page):
    page.write_text("<!-- bench: other -->\n<!-- end -->\n")
    with refused("expected tables of bench.adaptation"):
        read_panels(page)
