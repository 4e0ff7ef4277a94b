"""Files whose packages are not installed: left out, counted in the last lines, and without xdist named there.

Without torch `pytest` runs the tests of the deciding half. Where a package is installed, an error of its import is an
error. The deciding half itself imports none of them (tests/unit/test_layering.py), so its tests are never left out.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore = ["docs/site"]  # a hook, which MkDocs loads

OPTIONAL = frozenset({"numpy", "safetensors", "tokenizers", "torch", "transformers", "triton"})

LEFT_OUT = pytest.StashKey[set[str]]()
FROM_WORKER = "left_out"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = set()


def pytest_exception_interact(
    node: pytest.Item | pytest.Collector, call: pytest.CallInfo, report: pytest.CollectReport | pytest.TestReport
) -> None:
    """Makes a skip of the error of a file that imports an absent package."""
    if isinstance(report, pytest.CollectReport) and (name := _absent(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(node.path), 0, f"{name} is not installed")
        node.config.stash[LEFT_OUT].add(str(node.path))
        _forget(node.path)


def _absent(error: BaseException) -> str | None:
    """The optional package that is not installed and that this error comes from."""
    missing = (each.name for each in _causes(error) if isinstance(each, ModuleNotFoundError))
    return next((name for name in missing if name in OPTIONAL and find_spec(name) is None), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _forget(path: Path) -> None:
    """Removes the half of a module that pytest keeps: other files that import it are to have the same error."""
    half = [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(path)]
    for name in half:
        del sys.modules[name]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Sends what a worker of xdist has left out; each of them collects all files."""
    output = getattr(session.config, "workeroutput", None)  # a run that a test of a worker starts has none
    if output is not None:
        output[FROM_WORKER] = sorted(session.config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    if error is None:
        node.config.stash[LEFT_OUT].update(node.workeroutput[FROM_WORKER])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash[LEFT_OUT]:
        terminalreporter.write_line(f"{len(left_out)} files were left out: they need packages that are not installed")
