"""The script that plants the faults of `property_tests/planted`: where it puts them, its report, what it lets pass."""

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from property_tests.mutants.faults import faults_of
from property_tests.planted.plant import of_day, read
from property_tests.planted.scopes import NotOnceError, file_of, put

HOME = Path(__file__).parents[3]
SRC = HOME / "src"
LISTS = sorted((HOME / "property_tests/planted").glob("*.toml"))
FAULT = """
[[fault]]
says = "{says}"
scope = "small:after"
old = "{old}"
new = "{new}"
by = ["{by}"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\npythonpath = ["src"]\n',
        "src/small.py": "def after(n):\n    return n + 1\n\ndef later(n):\n    return n + 1\n",
        "tests/test_small.py": "from small import after\n\ndef test_after():\n    assert after(1) == 2\n",
        "tests/test_blind.py": "from small import after\n\ndef test_nothing():\n    after(1)\n",
    }
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    (tmp_path / "tree" / "property_tests").symlink_to(HOME / "property_tests")  # the plugin of the runs that it starts
    return tmp_path / "tree"


def planted(tree: Path, *faults: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    (tree / "list.toml").write_text("".join(faults))
    command = [sys.executable, "-m", "property_tests.planted.plant", "--root", tree, *options, tree / "list.toml"]
    return subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False)


def fault(says: str, by: str, *, old: str = "n + 1", new: str = "n - 1") -> str:
    return FAULT.format(says=says, by=by, old=old, new=new)


def test_a_fault_that_is_noticed_is_not_printed(tree: Path) -> None:
    done = planted(tree, fault("before", "tests/test_small.py"))
    assert (done.returncode, done.stdout) == (0, "1 faults, 0 complaints\n"), done.stderr
    assert (tree / "src/small.py").read_text().count("n + 1") == 2


def test_faults_unnoticed_or_not_in_the_source_are_printed(tree: Path) -> None:
    done = planted(
        tree,
        fault("unseen", "tests/test_blind.py"),
        fault("no such test", "tests/test_none.py"),
        fault("gone", "tests/test_small.py", old="n + 3"),
        fault("no module", "tests/test_small.py").replace("small:after", "large:after"),
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("unseen: tests/test_blind.py: ")
    assert lines[1].startswith("no such test: tests/test_none.py: ")
    assert lines[2:4] == ["gone: small:after has `n + 3` 0 times", "no module: 0 modules are named large"]
    assert lines[4] == "4 faults, 4 complaints"


def test_a_week_of_nights_tries_every_fault_once(tree: Path) -> None:
    nights = [of_day(list(range(16)), day) for day in range(1, 8)]
    assert nights[0] == [0, 7, 14] and sorted(at for night in nights for at in night) == list(range(16))
    gone = [fault(f"fault {number}", "tests/test_small.py", old="gone") for number in range(9)]
    lines = planted(tree, *gone, options=["--day", "2"]).stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["fault 1", "fault 8", "2 faults, 2 complaints"]


SOURCE = """
class Box:
    @property
    def size(self):
        return self._size

    @size.setter
    def size(self, size):
        if (size  # a comment
                > self.most):
            size = self.most
        self._size = size
        self.tell(size, f"{size + 1}")

def size(box):
    def doubled(n):
        return n * 2
    return doubled(box.size) * 2 or None
"""


@pytest.mark.parametrize(
    ("scope", "old", "new", "expected"),
    [
        ("box:Box.size", "size > self.most", "True", "if ((True))"),  # neither layout nor comments count
        ("box:Box.size", "self.tell(size, f'{size + 1}')", "", "        pass"),
        ("box:Box.size", "self._size = size", "a = 1\nb = 2", "        a = 1\n        b = 2\n"),
        (
            "box:Box.size",
            "if size > self.most:\n    size = self.most\nself._size = size",
            "pass",
            "size):\n        pass",
        ),
        ("box:size", "doubled(box.size) * 2", "1 or 2", "return (1 or 2) or None"),  # as one operand
        ("box:size.doubled", "n * 2", "n", "return (n)\n"),
        ("box:", "n * 2", "n", "return (n)\n"),
    ],
)
def test_a_fault_is_put_where_its_syntax_tree_is(scope: str, old: str, new: str, expected: str) -> None:
    changed = put(SOURCE, scope, old, new)
    assert expected in changed and expected not in SOURCE
    compile(changed, "box.py", "exec")


@pytest.mark.parametrize(
    ("scope", "old", "times"),
    [
        ("box:Box.size", "self._size", 1),  # what is assigned is another tree than what is read
        ("box:Box.size", "size", 4),
        ("box:Box.size", "size + 1", 0),  # in an f-string
        ("box:Box.size", "n * 2", 0),  # in another function
        ("box:Box.length", "self._size", 0),
    ],
)
def test_a_fault_is_put_nowhere_unless_there_is_one_place(scope: str, old: str, times: int) -> None:
    if times == 1:
        put(SOURCE, scope, old, "0")
    else:
        with pytest.raises(NotOnceError, match=f"{times} times"):
            put(SOURCE, scope, old, "0")


def test_a_module_is_named_by_as_much_as_only_it_has(tmp_path: Path) -> None:
    for file in ("a/plan.py", "b/plan.py", "b/myplan.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert file_of(tmp_path, "a.plan:f") == tmp_path / "a/plan.py"
    assert file_of(tmp_path, "myplan:f") == tmp_path / "b/myplan.py"
    with pytest.raises(NotOnceError, match="2 modules"):
        file_of(tmp_path, "plan:f")


def tree_of(text: str) -> str:
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_fault_of_the_lists_can_be_planted_today(path: Path) -> None:
    for each in read(path):
        file = file_of(SRC, each.scope)
        compile(put(file.read_text(), each.scope, each.old, each.new), file, "exec")
        assert tree_of(each.new or "pass") != tree_of(each.old), each.says
        assert each.by and all((HOME / test.split("::")[0]).exists() for test in each.by), each.says


def equal_lines(one: Sequence[str], other: Sequence[str]) -> int:
    """How many lines from the first on are equal."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def made_by_the_random_tool(file: str, source: str, planted: str) -> bool:
    """Whether one of its faults of a file makes the syntax tree of the planted text."""
    one, other = source.splitlines(), planted.splitlines()
    first = equal_lines(one, other) + 1
    last = len(one) - equal_lines(one[first - 1 :][::-1], other[first - 1 :][::-1])
    near = [each for each in faults_of(file, source) if each.lines.start <= last and first <= each.lines.stop]
    trees = (tree_of(each.put_into(source.encode()).decode()) for each in near)
    return tree_of(planted) in trees


def test_a_fault_that_the_random_tool_makes_is_noticed() -> None:
    source = "def after(n):\n    return n + 1 if n > 2 else n\n"
    assert made_by_the_random_tool("small.py", source, source.replace("n > 2", "n >= 2"))
    assert not made_by_the_random_tool("small.py", source, source.replace("n > 2", "n > 7 * n"))


@pytest.mark.slow
@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_no_fault_of_the_lists_is_one_that_the_random_tool_makes(path: Path) -> None:
    for each in read(path):
        file = file_of(SRC, each.scope)
        source = file.read_text()
        planted = put(source, each.scope, each.old, each.new)
        assert not made_by_the_random_tool(file.name, source, planted), each.says
