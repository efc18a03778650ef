"""Finds where a source can be given a small mistake, and makes it.

The operators are those that mutation testing commonly has. Left alone are annotations,
decorators, texts (error messages, and what is printed or logged), `__all__`,
`if TYPE_CHECKING` and `if __name__ == "__main__"`.
"""

import ast
import bisect
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Mutation(NamedTuple):
    """A text in place of the bytes from `start` to `end`; lines keep their numbers."""

    start: int
    end: int
    text: str
    operator: str
    line: int

    def apply(self, source: bytes) -> bytes:
        """Returns the source with the mistake."""
        gone = source[self.start : self.end].count(b"\n") - self.text.count("\n")
        text = self.text.encode() + b"\n" * gone
        return source[: self.start] + text + source[self.end :]


def find_mutations(source: bytes) -> list[Mutation]:
    """Returns the mistakes that can be made, in the order of the source.

    A few make no program, or the same one: see `is_mutant`.
    """
    begins = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    return sorted(
        Mutation(*mistake, line=bisect.bisect_right(begins, mistake[0]))
        for node in _walk(ast.parse(source))
        for mistake in _mistakes(node, source, begins)
    )


def is_mutant(source: bytes, mutation: Mutation) -> bool:
    """Returns whether what a mistake makes compiles, to something else."""
    try:
        tree = ast.parse(mutation.apply(source))
        compile(tree, "mutant", "exec")
    except SyntaxError:
        return False
    return ast.dump(tree) != ast.dump(ast.parse(source))


_SWAPPED = {
    ast.Lt: ("<", "<=", "comparison"),
    ast.LtE: ("<=", "<", "comparison"),
    ast.Gt: (">", ">=", "comparison"),
    ast.GtE: (">=", ">", "comparison"),
    ast.Eq: ("==", "!=", "comparison"),
    ast.NotEq: ("!=", "==", "comparison"),
    ast.In: (r"\bin\b", "not in", "comparison"),
    ast.NotIn: (r"\bnot\s+in\b", "in", "comparison"),
    ast.Is: (r"\bis\b", "is not", "comparison"),
    ast.IsNot: (r"\bis\s+not\b", "is", "comparison"),
    ast.Add: (r"\+", "-", "arithmetic"),
    ast.Sub: ("-", "+", "arithmetic"),
    ast.Mult: (r"\*", "/", "arithmetic"),
    ast.Div: ("/", "*", "arithmetic"),
    ast.FloorDiv: ("//", "*", "arithmetic"),
    ast.Mod: ("%", "//", "arithmetic"),
    ast.And: (r"\band\b", "or", "and, or"),
    ast.Or: (r"\bor\b", "and", "and, or"),
}
_EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
# Calls that say something to people.
_SAYING = re.compile(r"(print|warnings\.warn|_?log(ging)?\.\w+)$")
_NOT_RUN = re.compile(r"(typing\.)?TYPE_CHECKING$|__name__ == '__main__'$")


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in _children(node):
        yield from _walk(child)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            return [*filter(None, defaults), *node.body]
        case ast.ClassDef():
            return node.body
        case ast.AnnAssign():
            return [node.value] if node.value else []
        # Python 3.11 does not know where the parts of an f-string are.
        case ast.JoinedStr() | ast.Raise():
            return []
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return []
        case ast.If() if _NOT_RUN.match(ast.unparse(node.test)):
            return []
        case ast.Call() if _SAYING.match(ast.unparse(node.func)):
            return []
    return ast.iter_child_nodes(node)


def _mistakes(
    node: ast.AST, source: bytes, begins: list[int]
) -> Iterator[tuple[int, int, str, str]]:
    """Yields start, end, replacement and operator of what can be done to a node."""

    def place(of: ast.AST) -> tuple[int, int]:
        start = begins[of.lineno - 1] + of.col_offset
        return start, begins[of.end_lineno - 1] + of.end_col_offset

    match node:
        case ast.Constant(value=bool(value)):
            yield *place(node), str(not value), "True, False"
        case ast.Constant(value=int(value)):
            yield *place(node), str(value + 1), "constant + 1"
        case ast.Return(value=ast.expr() as value):
            yield *place(value), "None", "None returned"
        case ast.Expr(value=ast.Call(func=func)):
            if not _SAYING.match(ast.unparse(func)):
                yield *place(node), "pass", "call removed"
        case ast.If(test=test) | ast.IfExp(test=test):
            if not _NOT_RUN.match(ast.unparse(test)):
                start, end = place(test)
                text = f"(not ({source[start:end].decode()}))"
                yield start, end, text, "condition negated"
        case ast.UnaryOp(op=ast.Not()):
            start, _ = place(node)
            yield start, start + len("not"), "", "not removed"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name) as func):
            if name in _EXTREMES:
                _, end = place(func)
                yield end - len(name), end, _EXTREMES[name], "min, max"
    operands, operators = _operands(node)
    for (left, right), operator in zip(
        itertools.pairwise(operands), operators, strict=True
    ):
        if type(operator) in _SWAPPED:
            pattern, text, kind = _SWAPPED[type(operator)]
            start = place(left)[1]
            between = re.sub(
                rb"#.*", lambda c: b" " * len(c[0]), source[start : place(right)[0]]
            )
            token = re.search(pattern.encode(), between)
            assert token, f"no {pattern} in {between!r}"
            yield start + token.start(), start + token.end(), text, kind


def _operands(node: ast.AST) -> tuple[list[ast.expr], list[ast.AST]]:
    """Returns what operators stand between, and them."""
    match node:
        case ast.BinOp():
            both = [node.left, node.right]
            # Texts and paths know no other operator: whatever runs the line fails.
            return ([], []) if any(map(_is_text, both)) else (both, [node.op])
        case ast.Compare():
            return [node.left, *node.comparators], list(node.ops)
        case ast.BoolOp():
            return node.values, [node.op] * (len(node.values) - 1)
    return [], []


def _is_text(node: ast.expr) -> bool:
    value = getattr(node, "value", None)
    return isinstance(node, ast.JoinedStr) or isinstance(value, str | bytes)
