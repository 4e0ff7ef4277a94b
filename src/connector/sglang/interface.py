"""Check, before anything else of this package is imported, that this SGLang has what the connector needs.

The contract of the release that it is tested with names that: the calls of a linker with their parameters, because
SGLang makes them, and one of another meaning would not raise; and of other classes the members that are read.
"""

import ast
import json
import logging
from collections.abc import Iterator
from importlib import import_module
from inspect import getsource, signature
from pathlib import Path
from textwrap import dedent
from typing import Any

import sglang

from cpu_prefix_cache import ConfigurationError

logger = logging.getLogger(__name__)

TESTED = "0.5.23"
CONTRACT: dict[str, Any] = json.loads(Path(__file__).with_name(f"{TESTED}.json").read_text())


def lacking() -> Iterator[str]:
    """The names of the contract that this SGLang has not, or has in another form."""
    linker = _found(CONTRACT["linker"])
    calls = {
        name: list(signature(vars(linker)[name]).parameters) for name in getattr(linker, "__abstractmethods__", ())
    }
    if calls != CONTRACT["calls"]:
        yield f"{CONTRACT['linker']} with the calls {', '.join(CONTRACT['calls'])} of {TESTED}"
    for name, members in CONTRACT["members"].items():
        owner = _found(name)
        here = set() if owner is None else set(_bound(getsource(owner)))
        yield from (f"{name}.{member}" for member in members if member not in here)


def _found(name: str) -> Any:
    module, _, owner = name.rpartition(".")
    try:
        return vars(import_module(module)).get(owner)
    except ImportError:
        return None


def _bound(source: str) -> Iterator[str]:
    """Names that get a value or a body in a class's source, also in its methods and in the classes within."""
    for node in ast.walk(ast.parse(dedent(source))):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.FunctionDef(name=name):
                yield name


def check_interface() -> None:
    """Raises ConfigurationError where the contract is not kept. A warning for another release that keeps it."""
    for name in lacking():
        raise ConfigurationError(f"SGLang {sglang.__version__} has no {name}: take SGLang {TESTED}")
    if sglang.__version__ != TESTED:
        logger.warning("HostLinker was tested with SGLang %s; this is %s", TESTED, sglang.__version__)


check_interface()
