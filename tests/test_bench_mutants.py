"""What `bench.mutants` changes, draws and counts; its runs are tried by hand."""

import ast
import collections

import pytest

from bench import mutants

SOURCE = '''"""One + two is not 3."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import this as that
SIZE: "int if 1 else 2" = 4
"é"; FLAG = True
@decorated(True)
def function(x: Literal[1], y=2.5) -> Literal[2]:
    """Returns 1 < 2."""
    _log.info("%d", x + 1)
    if x <= y and not x:
        call(
            x,
        )
    x += SIZE
    if x == y:
        raise ValueError(f"{x + 1} is not {1 < 2}")
    text = "a" + x
    return x // y
'''

# By hand: line, operator, before, after.
EXPECTED = {
    (5, "constant + 1", "4", "(5)"),
    (6, "flipped", "True", "(False)"),
    (8, "constant + 1", "2.5", "(3.5)"),
    (11, "condition negated", "x <= y and not x", "(not (x <= y and (not x)))"),
    (11, "and/or", "x <= y and not x", "(x <= y or not x)"),
    (11, "comparison", "x <= y", "(x < y)"),
    (11, "not removed", "not x", "(x)"),
    (12, "call deleted", "call(\n            x,\n        )", "pass\n\n"),
    (15, "arithmetic", "x += SIZE", "x -= SIZE"),
    (16, "comparison", "x == y", "(x != y)"),
    (19, "arithmetic", "x // y", "(x / y)"),
    (19, "return None", "return x // y", "return None"),
}


def test_mutants_are_those_found_by_hand():
    found = mutants.mutants_of(SOURCE)
    assert {(m.line, m.operator, m.before, m.after) for m in found} == EXPECTED
    assert len(found) == len(EXPECTED)
    assert [m.line for m in found if m.at_import] == [5, 6, 8]
    # The condition's own lines, without those of what it guards.
    assert {(m.first, m.last) for m in found if m.line == 11} == {(11, 11)}
    assert [(m.first, m.last) for m in found if m.line == 12] == [(12, 14)]


def test_a_mutant_differs_in_its_place_alone_and_keeps_line_numbers():
    content, trees = SOURCE.encode(), {ast.dump(ast.parse(SOURCE))}
    found = mutants.mutants_of(SOURCE)
    for mutant in found:
        changed = mutants.mutated(content, mutant)
        trees.add(ast.dump(ast.parse(changed)))
        assert changed[: mutant.start] == content[: mutant.start]
        assert changed.endswith(content[mutant.start + len(mutant.before.encode()) :])
        assert changed.count(b"\n") == content.count(b"\n")
    assert len(trees) == 1 + len(found)
    with pytest.raises(ValueError, match="has changed since its mutants were drawn"):
        mutants.mutated(b"# A new line.\n" + content, found[0])


def test_a_seed_draws_the_same_and_small_packages_get_their_ten():
    sizes = {"large": 900, "middle": 300, "small": 20, "tiny": 4}
    places = {
        package: mutants.mutants_of("x = 1\n" * size, package=package)
        for package, size in sizes.items()
    }
    drawn = mutants.draw(places, 104, seed=3)
    assert drawn == mutants.draw(places, 104, seed=3)
    assert set(drawn) != set(mutants.draw(places, 104, seed=4))
    assert len(set(drawn)) == 104
    counts = collections.Counter(mutant.package for mutant in drawn)
    # Three to one, as their sizes.
    assert counts == {"large": 68, "middle": 22, "small": 10, "tiny": 4}


@pytest.mark.parametrize(
    ("killed", "count", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_intervals_are_those_of_newcombe(killed, count, low, high):
    assert mutants.wilson(killed, count) == pytest.approx((low, high), abs=6e-5)


def test_the_table_counts_packages_and_all():
    rows = [{"package": p, "killed": k} for p, k in [("b", True), ("a", 0), ("b", 0)]]
    shown = mutants.markdown({"day": rows, "all": rows}).splitlines()
    assert shown[2].startswith("| a | 0 of 1 | 0% (0% to 79%) | 0 of 1 |")
    assert shown[-1].startswith("| total | 1 of 3 | 33% (6% to 79%) | 1 of 3 |")
