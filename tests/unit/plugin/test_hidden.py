"""A module named `connector` in the way of ours is named in a sentence. Where none is, the sentence names vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[3] / "src"
NO_VLLM = "ModuleNotFoundError: import of vllm halted"
ASK = "import cpu_prefix_cache_vllm; cpu_prefix_cache_vllm.CPUPrefixCacheConnector"


def asked_in(folder: Path) -> str:
    """The last line on stderr when Python, begun in `folder` and without vLLM, imports the connector."""
    code = f"import sys; sys.path.append({str(SOURCES)!r}); sys.modules['vllm'] = None; {ASK}"
    ran = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    return ran.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["connector/__init__.py", "connector.py"])
def test_a_foreign_module_is_named_and_not_imported(tmp_path, name):
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise SystemExit('imported')\n")
    said = asked_in(tmp_path)
    assert said.startswith("cpu_prefix_cache.messages.errors.ConfigurationError: ")
    assert f"{foreign} hides the package of the same name that CPUPrefixCacheConnector is in" in said


def test_a_folder_that_is_no_package_hides_nothing(tmp_path):
    (tmp_path / "connector").mkdir()
    (tmp_path / "connector" / "notes.txt").touch()
    assert asked_in(tmp_path).startswith(NO_VLLM)


def test_control_where_nothing_is_in_the_way_vllm_is_what_is_missing(tmp_path):
    assert asked_in(tmp_path).startswith(NO_VLLM)
