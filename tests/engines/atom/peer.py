"""ATOM's own tests, run as they are written, with other classes in the place of those that they import.

A test is taken out of its file as source and run with the names that it is given here. Error messages are not compared,
as ours are other sentences.
"""

import ast
from types import SimpleNamespace

import pytest

from tests.engines.atom.test_double import real

WITHOUT_MESSAGES = SimpleNamespace(
    raises=lambda error, match=None: pytest.raises(error), mark=pytest.mark, param=pytest.param, skip=pytest.skip
)


def their(path, *names, **given):
    """Functions of one of ATOM's test files, as a namespace."""
    source = ast.parse(real(path))
    source.body = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(source.body) == len(names), f"{path} has not all of {names}"
    found = {"pytest": WITHOUT_MESSAGES, "SimpleNamespace": SimpleNamespace, **given}
    exec(compile(source, path, "exec"), found)
    return SimpleNamespace(**{name: found[name] for name in names})


def cases(test):
    """The arguments of a test that is parametrized, by their names in the report."""
    ((names, values),) = (mark.args for mark in test.pytestmark)
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    return {
        getattr(value, "id", str(at)): dict(zip(names, getattr(value, "values", (value,)), strict=True))
        for at, value in enumerate(values)
    }
