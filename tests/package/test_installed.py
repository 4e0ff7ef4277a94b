"""The wheel in an empty environment: the command, the library, and the connector's way into vLLM."""

import json
import sys
from pathlib import Path

import pytest

from tests.package.conftest import ROOT, run

TRACE = [dict(timestamp=second, input_length=64, output_length=1, hash_ids=[second % 2]) for second in range(4)]


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Python of an environment with the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("installed")
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run([*pip, "--constraint", ROOT / "requirements/constraints.txt", wheel], folder)
    return python


def test_the_installed_library_is_the_one_imported(python, tmp_path):
    printed = run([python, "-c", "import cpu_prefix_cache; print(cpu_prefix_cache.__file__)"], tmp_path)
    assert Path(printed.strip()).is_relative_to(python.parents[1])


def test_the_command_prints_the_version_of_the_wheel(python, wheel, tmp_path):
    version = wheel.name.split("-")[1]
    assert run([python.parent / "cpu-prefix-cache", "--version"], tmp_path) == f"cpu-prefix-cache {version}\n"
    printed = run([python, "-c", "import cpu_prefix_cache; print(cpu_prefix_cache.__version__)"], tmp_path)
    assert printed == f"{version}\n"


def test_the_command_replays_a_trace(python, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    command = [python.parent / "cpu-prefix-cache", "replay", trace, "--bytes-per-token", "1024", "--capacity", "1GiB"]
    assert "lru" in run(command, tmp_path)


def test_the_entry_point_of_vllm_leads_to_the_connector(python, tmp_path):
    """From there it leads to vLLM, which is not in this environment."""
    code = """
from importlib.metadata import entry_points
(entry,) = entry_points(group="vllm.general_plugins")
print(entry.value)
entry.load()
import cpu_prefix_cache_vllm
try:
    cpu_prefix_cache_vllm.CPUPrefixCacheConnector
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run([python, "-c", code], tmp_path) == "cpu_prefix_cache_vllm:register\nvllm\n"
