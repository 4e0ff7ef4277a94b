"""Files that need torch, in a run without it: left out and counted. All other errors of import stay errors."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = 'import sys\nsys.modules["torch"] = None\n'
WITH_TORCH = 'import sys, types\nsys.modules["torch"] = types.ModuleType("torch")\nsys.modules["torch"].__path__ = []\n'
FILES = {
    "helper.py": "import torch\nNAME = 1",
    "test_directly.py": "import torch\ndef test_it(): pass",
    "test_through_another.py": "from helper import NAME\ndef test_it(): pass",
    "test_guarded.py": "try:\n    import torch\nexcept ImportError as error:\n    raise RuntimeError from error",
    "test_alone.py": "def test_it(): pass",
}
LINE = "4 files were left out: they need packages that are not installed"


@pytest.fixture
def outcome(tmp_path):
    """Exit status and output of a run of FILES, with what is given besides."""
    shutil.copy(ROOT / "conftest.py", tmp_path)

    def run(torch, options=(), **files):
        written = FILES | {"torch_or_not.py": torch} | {f"{name}.py": text for name, text in files.items()}
        for name, text in written.items():
            (tmp_path / name).write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "torch_or_not", "-p", "no:cacheprovider", "-q"]
        options = ["--doctest-modules", "--import-mode=importlib", "-o", "pythonpath=.", *options]
        ran = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return ran.returncode, ran.stdout + ran.stderr

    return run


def test_files_that_need_torch_are_left_out_counted_and_named(outcome):
    status, output = outcome(WITHOUT_TORCH, ["-rs"])
    assert status == 0 and "1 passed" in output and LINE in output
    assert [name for name in FILES if f"{name}:0: torch is not installed" not in output] == ["test_alone.py"]


def test_with_xdist_they_are_counted_too(outcome):
    status, output = outcome(WITHOUT_TORCH, ["--numprocesses", "2"])
    assert status == 0 and "1 passed" in output and LINE in output


def test_another_package_that_is_missing_is_an_error(outcome):
    missing = ("nothing_there", "torchvision")
    status, output = outcome(WITHOUT_TORCH, **{f"test_{name}": f"import {name}" for name in missing})
    assert status == 2 and all(f"No module named '{name}'" in output for name in missing)


def test_a_module_that_torch_lacks_is_an_error_where_torch_is(outcome):
    status, output = outcome(WITH_TORCH, test_other="import torch.nothing_there")
    assert status == 2 and "No module named 'torch.nothing_there'" in output and "left out" not in output


def test_a_test_that_imports_torch_as_it_runs_fails(outcome):
    status, output = outcome(WITHOUT_TORCH, test_late="def test_late(): import torch")
    assert status == 1 and "1 failed, 1 passed" in output
