"""Classes of an engine with the members that a connector needs, and those that the release here does not have."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from inspect import getsource
from pkgutil import resolve_name
from textwrap import dedent


def lacking(needed: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """The members that are not here, as `module.Class.member`; all of a class that is not here. `needed` has those of
    each class, by its full name: `name`, or of a method that the engine calls `name(self, parameter)`.
    """
    for name, members in needed.items():
        try:
            here = set(bound(getsource(resolve_name(name))))
        except (ImportError, AttributeError):
            here = set()
        yield from (f"{name}.{member}" for member in members if member not in here)


def bound(source: str) -> Iterator[str]:
    """Names that get a value or a body in a class's source, also in its methods and in the classes within. Of a method
    also its name with its parameters.
    """
    for node in ast.walk(ast.parse(dedent(source))):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name, args=arguments):
                yield name
                yield f"{name}({', '.join(each.arg for each in ast.walk(arguments) if isinstance(each, ast.arg))})"
