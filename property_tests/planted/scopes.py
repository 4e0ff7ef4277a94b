"""Where a fault is put: a scope, and in it the one expression or run of statements that has a given syntax tree.

A scope is written as `hashing:ChainHasher.extend`: the last names of a module, as many as no other has, and the
qualified name of a function or class; nothing after the colon is the whole module. So no fault is moved by a moved
module, a comment, another line break, or by whatever else its function does.
"""

import ast
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class NotOnceError(LookupError):
    """A module or a syntax tree that is not there exactly once."""


def file_of(folder: Path, scope: str) -> Path:
    """The file of a scope's module."""
    names = tuple(scope.partition(":")[0].split("."))
    files = [file for file in folder.rglob(f"{names[-1]}.py") if file.with_suffix("").parts[-len(names) :] == names]
    if len(files) != 1:
        raise NotOnceError(f"{len(files)} modules are named {'.'.join(names)}")
    return files[0]


def put(source: str, scope: str, old: str, new: str) -> str:
    """`source` with `new` in place of the one `old` of a scope; statements may be replaced by nothing."""
    text = source.encode()  # columns of `ast` count bytes
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {
        (starts[first.lineno - 1] + first.col_offset, starts[(last.end_lineno or 0) - 1] + (last.end_col_offset or 0))
        for node in _named(ast.parse(source), scope.partition(":")[2])
        for first, last in _equal(node, ast.parse(old).body)
    }
    if len(found) != 1:
        raise NotOnceError(f"{scope} has `{old}` {len(found)} times")
    ((start, stop),) = found
    indentation = " " * (start - text.rfind(b"\n", 0, start) - 1)
    return (text[:start] + _fitted(new, indentation).encode() + text[stop:]).decode()


def _named(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """The definitions of a qualified name: a property that can be set has two."""
    if not name:
        yield node
        return
    first, _, rest = name.partition(".")
    for child in _definitions(node):
        if child.name == first:
            yield from _named(child, rest)


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Definitions right below a node, also in an `if` or a `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            yield child
        else:
            yield from _definitions(child)


def _equal(scope: ast.AST, old: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt | ast.expr, ast.stmt | ast.expr]]:
    """First and last node of each run of statements, and each expression, that has the syntax tree of `old`."""
    for body in _bodies(scope):
        for first in range(len(body) - len(old) + 1):
            run = body[first : first + len(old)]
            if all(map(_is_same, run, old)):
                yield run[0], run[-1]
    if len(old) == 1 and isinstance(old[0], ast.Expr):
        for node in _nodes(scope):
            if isinstance(node, ast.expr) and _is_same(node, old[0].value):
                yield node, node


def _is_same(one: ast.AST, other: ast.AST) -> bool:
    return type(one) is type(other) and ast.dump(one) == ast.dump(other)


def _bodies(scope: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in _nodes(scope):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what is below it, but for the inside of f-strings: Python 3.11 does not know where that is."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _nodes(child)


def _fitted(new: str, indentation: str) -> str:
    """The text as it can stand within any expression, or else as statements of this indentation."""
    try:
        ast.parse(new, mode="eval")
    except SyntaxError:
        return textwrap.indent(new or "pass", indentation).lstrip()
    return f"({new})"
