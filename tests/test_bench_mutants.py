"""What `bench/mutants.py` changes in a source, draws, and tries first."""

import itertools

from bench.mutants import draw, files_by_distance, find_again
from bench.mutations import find_mutations, is_mutant

_MISTAKES = {
    "x = a < b": ["x = a <= b"],
    "x = a not in b": ["x = a in b"],
    "x = a is b": ["x = a is not b"],
    "x = (a) + (b)": ["x = (a) - (b)"],
    "x = a // b": ["x = a * b"],
    "x = a and b or c": ["x = a or b or c", "x = a and b and c"],
    "x = not a": ["x =  a"],
    "x = True": ["x = False"],
    "x = 7": ["x = 8"],
    "x = np.maximum(a, b)": ["x = np.minimum(a, b)"],
    "x = a if b else c": ["x = a if (not (b)) else c"],
    "f(a)": ["pass"],
    "def f(): return a": ["def f(): return None"],
}
_LEFT_ALONE = (
    "x: Literal[1] = a",
    "__all__ = [*a, *(b + c)]",
    "if TYPE_CHECKING: f()",
    "raise ValueError(a + b)",
    "print(a + 1)",
    "_log.info('%s', 1)",
    "x = f'{a + 1}'",
    "x = 'a' + b",
)


def mutants(source: str) -> list[str]:
    text = source.encode()
    return [m.apply(text).decode() for m in find_mutations(text) if is_mutant(text, m)]


def test_a_mistake_makes_another_program():
    for source, expected in _MISTAKES.items():
        assert mutants(source) == expected


def test_types_and_what_people_read_are_left_alone():
    for source in _LEFT_ALONE:
        assert not mutants(source), source


def test_lines_keep_their_numbers():
    assert mutants("f(\n  a,\n)\nx = a  # é\n") == ["pass\n\n\nx = a  # é\n"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_seed_draws_the_same_mutants(tmp_path):
    write(tmp_path / "realm_jax/metrics/sums.py", "x = a + b\n" * 30)

    def drawn(seed):
        return [one.line for one, _ in draw(tmp_path, "metrics", seed)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert sorted(drawn(0)) == [*range(1, 31)]


def test_a_mutant_is_found_where_its_line_has_moved_to(tmp_path):
    source = tmp_path / "realm_jax/metrics/sums.py"
    write(source, "x = a + b\ny = a * b\n")
    ((one, _),) = itertools.islice(draw(tmp_path, "metrics", 0), 1)
    source.write_text("z = 0\n" + source.read_text())
    ((again, mutated),) = find_again(tmp_path, one)
    assert again == one._replace(line=one.line + 1)
    assert one.after in mutated.decode().splitlines()
    source.write_text("")
    assert not find_again(tmp_path, one)


def test_files_of_tests_come_in_the_order_of_their_distance(tmp_path):
    for file, text in {
        "lib/deep.py": "",
        "lib/near.py": "def f():\n    from lib.deep import x",
        "lib/named.py": "NAME = 'lib.near.Config'",
        "lib/other.py": "",
        "tests/test_direct.py": "from lib import deep",
        "tests/end/test_deep.py": "from lib import named",
        "tests/test_near.py": "import lib.near",
        "tests/test_named.py": "from lib import (\n    named,\n)",
        "tests/test_other.py": "from lib import other",
        "tests/lib/conftest.py": "from lib import near",
        "tests/lib/test_all.py": "",
    }.items():
        write(tmp_path / file, text)
    assert files_by_distance(tmp_path, "lib/deep.py") == [
        ["tests/end/test_deep.py"],
        ["tests/test_direct.py"],
        ["tests/test_near.py"],
        ["tests/lib/test_all.py"],
        ["tests/test_named.py"],
    ]
