"""Runs the tests against one fault, in a scratch copy of the tree and in a fork of a process that has imported pytest.

First everything runs once under `coverage`, a context for each test; what fails there is left out. Against a fault run
the tests that cover it, quickest first, then the property tests that came through its function, with a fixed search,
fewer examples and no shrinking. The first failure ends it. Each test has a limit of processor time, far above what it
took, so that an endless loop ends and counts as seen; what waits for ever is ended, too.

Libraries that the tests import are imported once, and a fork has them. What is measured stays in the scratch folder.

Programs that a test starts belong to it: they import the scratch copy, what they run is covered by that test, and they
end with it.
"""

import contextlib
import copy
import dataclasses
import json
import os
import resource
import shutil
import signal
import sys
import sysconfig
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import coverage
import hypothesis.stateful  # imported here once, and not again in each fork
import pytest
from _pytest.config import default_plugins

from property_tests.mutants.faults import Fault
from property_tests.mutants.subjects import Subject
from property_tests.search import search

PROPERTIES = "property_tests/"
MEASURED_SHARE = 0.1  # of a property test's examples, to see which functions it comes through
MEMORY_BYTES = 6 * 10**9  # a fault may allocate any amount
WAIT_SECONDS = 120.0  # of the clock, beside 20 times the test's own: longer than a loaded machine takes
BESIDE = "shared"  # a folder beside the tree, where tests look for the sources of engines

# How coverage measures the programs that a test starts: pytest names the test in their environment.
PROGRAMS = """[run]
data_file = {scratch}/coverage
parallel = true
source = {code}
context = ${{PYTEST_CURRENT_TEST}}
sigterm = true
patch = _exit
"""

for plugin in default_plugins:
    import_module(f"_pytest.{plugin}")


@dataclasses.dataclass(frozen=True)
class Outcome:
    result: str  # "killed", "survived", "not run": no test comes there
    by: str = ""  # the test that failed first
    seconds: float = 0.0  # of the processor


class Trial:
    """`seconds` of processor time that each test took, who runs which line, and what is `failing` already."""

    def __init__(self, root: Path, subject: Subject, scratch: Path, share: float) -> None:
        self._scratch = scratch
        self.tree = scratch / "tree"
        self._output = scratch / "output"
        self._share = share
        if not (scratch / "failing.json").exists():
            shutil.copytree(root, self.tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build"))
            if (root.parent / BESIDE).exists():
                (scratch / BESIDE).symlink_to((root.parent / BESIDE).resolve())
            status = _forked(lambda: _measure(self.tree, subject, scratch), self._output)
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                raise SystemExit("the tests do not run without a fault:\n" + self._output.read_text()[-4000:])
        self.seconds: dict[str, float] = json.loads((scratch / "seconds.json").read_text())
        self.failing: list[str] = json.loads((scratch / "failing.json").read_text())
        self._runs: dict[str, dict[int, set[str]]] = defaultdict(dict)
        data = _combined(scratch)
        for file in data.measured_files():
            lines = data.contexts_by_lineno(file)
            of_file = self._runs[str(Path(file).relative_to(self.tree))]
            for line, contexts in lines.items():
                of_file[line] = {_test(context) for context in contexts}.difference(self.failing)

    def of_this_process(self) -> "Trial":
        """The same trial in a tree of its own, so that several processes try faults at once."""
        _import_libraries(self._scratch)
        own = copy.copy(self)
        home = self._scratch / f"{os.getpid()}"
        own.tree, own._output = home / "tree", home / "output"
        shutil.copytree(self.tree, own.tree)
        if (self._scratch / BESIDE).exists():
            (home / BESIDE).symlink_to((self._scratch / BESIDE).resolve())
        return own

    def tests_of(self, fault: Fault) -> list[str]:
        """Tests in the order in which they run: examples that run the statement, then properties of its function."""
        lines = self._runs[fault.file]
        imported = any("" in lines.get(line, ()) for line in fault.lines)
        near = lines if imported else fault.lines  # what runs at import may concern all that runs the file
        wide = lines if imported else fault.whole
        of_line = {test for line in near for test in lines.get(line, ()) if test and not test.startswith(PROPERTIES)}
        of_function = {test for line in wide for test in lines.get(line, ()) if test.startswith(PROPERTIES)}
        return [*sorted(of_line, key=self.seconds.__getitem__), *sorted(of_function, key=self.seconds.__getitem__)]

    def run(self, fault: Fault) -> Outcome:
        tests = self.tests_of(fault)
        if not tests:
            return Outcome("not run")
        path = self.tree / fault.file
        source, times = path.read_bytes(), path.stat()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        answer = self.tree.parent / "failed"
        answer.write_text("")
        try:
            path.write_bytes(fault.put_into(source))
            limits = self._limits(tests)
            status = _forked(lambda: _run(self.tree, tests, limits, self._share, answer), self._output)
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what was compiled of it is right again
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2)
        if status == 0:
            return Outcome("survived", seconds=seconds)
        return Outcome("killed", answer.read_text() or "out of time", seconds)

    def _limits(self, tests: Sequence[str]) -> dict[str, float]:
        shares = {test: self._share / MEASURED_SHARE if test.startswith(PROPERTIES) else 1 for test in tests}
        return {test: 3 + 5 * self.seconds[test] * shares[test] for test in tests}


def _forked(body: Callable[[], int], output: Path) -> int | None:
    """Runs `body` in a child that prints to `output`; its exit status, or None where a signal ended it."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setpgid(0, 0)
            printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            status = body()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    try:
        ended = os.waitpid(child, 0)[1]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests started and did not end
    return os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else None


def _pytest(root: Path, files: Sequence[str], plugin: object, *options: str) -> int:
    os.chdir(root)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    # Bytecode is that of a file of the same second and size: a program that a test starts would run another fault's.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    return int(pytest.main([*options, "-p", "no:cacheprovider", "--rootdir", str(root), *files], plugins=[plugin]))


def _measure(root: Path, subject: Subject, scratch: Path) -> int:
    """Every test once; writes coverage, seconds of each test, and which fail."""
    code = [str(root / folder) for folder in subject.code]
    (scratch / "programs.ini").write_text(PROGRAMS.format(scratch=scratch, code=",".join(code)))
    os.environ["COVERAGE_PROCESS_START"] = str(scratch / "programs.ini")
    plugin = _Measuring(code, scratch)
    return _pytest(root, [str(file.relative_to(root)) for file in subject.test_files(root)], plugin)


def _run(root: Path, tests: Sequence[str], limits: dict[str, float], share: float, answer: Path) -> int:
    sys.dont_write_bytecode = True  # a fault of the same size and second would be taken for the one before
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _limit_time(30)
    return _pytest(root, sorted({test.split("::")[0] for test in tests}), _Chosen(tests, limits, share, answer), "-x")


def _limit_time(seconds: float) -> None:
    """Limits processor time, and far more loosely the clock. Nobody catches the signals: the process ends."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAIT_SECONDS + 4 * seconds)


def _write_libraries(scratch: Path) -> None:
    """Which modules are imported that are not of the tree."""
    homes = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    (scratch / "libraries.json").write_text(json.dumps([name for name in files if files[name].startswith(homes)]))


def _import_libraries(scratch: Path) -> None:
    os.environ.update(json.loads((scratch / "environment.json").read_text()))  # as libraries read it at their import
    for name in json.loads((scratch / "libraries.json").read_text()):
        with contextlib.suppress(Exception):  # of one that wants to be imported in another way
            import_module(name)


def _combined(scratch: Path) -> coverage.CoverageData:
    """Lines that the tests ran in their own process, and in the programs that they started."""
    whole = coverage.Coverage(data_file=str(scratch / "coverage"), config_file=False)
    whole.load()
    whole.combine([str(scratch)])
    return whole.get_data()


def _test(context: str) -> str:
    """The test of a context, which in a program ends with the part of the test that started it, as ` (call)`."""
    return context.rpartition(" (")[0] if context.endswith((" (setup)", " (call)", " (teardown)")) else context


class _Measuring:
    def __init__(self, code: list[str], scratch: Path) -> None:
        self._scratch = scratch
        self._coverage = coverage.Coverage(data_file=str(scratch / "coverage"), source=code)
        self._environment = dict(os.environ)
        self._seconds: dict[str, float] = {}
        self._failing: list[str] = []
        self._coverage.start()  # before pytest imports a conftest.py, and with it some of the code

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        search_alike(items, MEASURED_SHARE)
        changed = {name: value for name, value in os.environ.items() if self._environment.get(name) != value}
        (self._scratch / "environment.json").write_text(json.dumps(changed))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        before = resource.getrusage(resource.RUSAGE_SELF)
        try:
            return (yield)
        finally:
            after = resource.getrusage(resource.RUSAGE_SELF)
            self._seconds[item.nodeid] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failing.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        _write_libraries(self._scratch)
        (self._scratch / "seconds.json").write_text(json.dumps(self._seconds))
        (self._scratch / "failing.json").write_text(json.dumps(self._failing))


class _Chosen:
    """Runs the tests it is given, in that order, each within its limit, and writes down which one fails."""

    def __init__(self, tests: Sequence[str], limits: dict[str, float], share: float, answer: Path) -> None:
        self._order = {test: at for at, test in enumerate(tests)}
        self._limits = limits
        self._share = share
        self._answer = answer

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])
        search_alike(items, self._share)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._answer.write_text(f"out of time: {nodeid}")
        _limit_time(self._limits[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._answer.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._answer.write_text(f"import: {report.nodeid}")


def search_alike(items: Sequence[pytest.Item], share: float) -> None:
    """Searches a share of the examples, always the same ones, and does not shrink what is found."""
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    search(items, share, derandomize=True, database=None, phases=phases)
