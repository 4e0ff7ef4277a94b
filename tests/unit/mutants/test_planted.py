"""The script that plants the faults of `property_tests/planted`: its report, and the faults that it lets pass."""

import subprocess
import sys
from pathlib import Path

import pytest

from property_tests.planted.plant import read

HOME = Path(__file__).parents[3]
LISTS = sorted((HOME / "property_tests/planted").glob("*.toml"))
FAULT = """
[[fault]]
says = "{says}"
file = "src/small.py"
old = "{old}"
new = "return n - 1"
by = ["{by}"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\npythonpath = ["src"]\n',
        "src/small.py": "def after(n):\n    return n + 1\n\ndef later(n):\n    return n + 2\n",
        "tests/test_small.py": "from small import after\n\ndef test_after():\n    assert after(1) == 2\n",
        "tests/test_blind.py": "from small import after\n\ndef test_nothing():\n    after(1)\n",
    }
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    (tmp_path / "tree" / "property_tests").symlink_to(HOME / "property_tests")  # the plugin of the runs that it starts
    return tmp_path / "tree"


def planted(tree: Path, *faults: str) -> subprocess.CompletedProcess[str]:
    (tree / "list.toml").write_text("".join(faults))
    command = [sys.executable, "-m", "property_tests.planted.plant", "--root", tree, tree / "list.toml"]
    return subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False)


def test_a_fault_that_is_noticed_is_not_printed(tree: Path) -> None:
    done = planted(tree, FAULT.format(says="before", old="return n + 1", by="tests/test_small.py"))
    assert (done.returncode, done.stdout) == (0, "1 faults, 0 complaints\n"), done.stderr
    assert "n + 1" in (tree / "src/small.py").read_text()


def test_faults_unnoticed_or_not_in_the_source_are_printed(tree: Path) -> None:
    done = planted(
        tree,
        FAULT.format(says="unseen", old="return n + 1", by="tests/test_blind.py"),
        FAULT.format(says="no such test", old="return n + 1", by="tests/test_none.py"),
        FAULT.format(says="gone", old="return n + 3", by="tests/test_small.py"),
        FAULT.format(says="twice", old="return n", by="tests/test_small.py"),
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("unseen: tests/test_blind.py: ")
    assert lines[1].startswith("no such test: tests/test_none.py: ")
    assert lines[2:4] == ["gone: src/small.py has the text 0 times", "twice: src/small.py has the text 2 times"]
    assert lines[4] == "4 faults, 4 complaints"


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_fault_of_the_lists_can_be_planted_today(path: Path) -> None:
    for fault in read(path):
        source = (HOME / fault.file).read_text()
        assert source.count(fault.old) == 1, fault.says
        compile(source.replace(fault.old, fault.new), fault.file, "exec")
        assert fault.by and all((HOME / test.split("::")[0]).exists() for test in fault.by), fault.says
