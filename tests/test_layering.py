"""The arrows are a test: data flows one way and imports go the other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1] / "src" / "cpu_prefix_cache"
COPIER = {"errors", "memory", "copier", "plan", "planner"}
OTHERS = {  # rooms of what does not decide, and what they may import
    "memory": {"errors", "memory"},
    "copier": COPIER,
    "bench": {*COPIER, "bench", "groups", "plots"},
    "cli": {"bench", "errors", "replay"},
}
DECIDES = sorted(path for path in HOME.rglob("*.py") if path.relative_to(HOME).with_suffix("").parts[0] not in OTHERS)
EVERYTHING = sorted(HOME.rglob("*.py"))
ENGINES = {"connector", "vllm", "sglang", "transformers", "lmcache"}
MAY_IMPORT = {
    "errors": set(),
    "plan": set(),
    "break_even": set(),
    "stats": set(),
    "plots": {"errors"},
    "request": set(),
    "groups": {"errors"},
    "hashing": {"errors"},
    "forest": {"errors"},
    "free_runs": {"errors"},
    "lineage": {"hashing", "request", "sweep"},
    "states": set(),
    "sweep": set(),
    "pieces": {"errors", "states"},
    "boundary_log": {"forest"},
    "resume": {"boundary_log", "forest"},
    "planner": {"errors", "groups"},
    "eviction": {"errors", "forest", "hashing"},
    "admission": {"errors"},
    "block_pool": {
        *("admission", "boundary_log", "errors", "eviction", "forest"),
        *("free_runs", "pieces", "resume", "states", "stats"),
    },
    "coordinator": {"block_pool", "hashing", "pieces", "plan", "planner", "request"},
    "device": {"block_pool", "errors", "hashing", "request"},
    "transfers": {"block_pool", "plan"},
    "stores": {"block_pool", "coordinator", "device", "errors", "hashing", "plan", "request", "transfers"},
    "postponed": {"block_pool", "request"},
    "offload": {"block_pool", "device", "hashing", "lineage", "postponed", "request", "stores", "transfers"},
    "prefix_cache": {
        "break_even",
        *("block_pool", "boundary_log", "coordinator", "device", "errors", "offload"),
        *("plan", "planner", "request", "states", "stats", "stores", "transfers"),
    },
    "replay": {
        *("block_pool", "coordinator", "device", "errors", "eviction", "groups", "hashing"),
        *("plan", "planner", "plots", "prefix_cache", "request"),
    },
}


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            yield node.module


def room(file):
    return file.relative_to(HOME).with_suffix("").parts[0]


@pytest.mark.parametrize("file", [file for file in DECIDES if room(file) in MAY_IMPORT], ids=lambda file: file.stem)
def test_imports_point_one_way(file):
    ours = {name.split(".")[1] for name in imports(file) if name.startswith("cpu_prefix_cache.")}
    assert ours - {room(file)} <= MAY_IMPORT[room(file)]


def test_the_table_has_no_circle_and_lists_every_room():
    assert {room(file) for file in DECIDES} - {"__init__"} == set(MAY_IMPORT)
    seen = set()
    while len(seen) < len(MAY_IMPORT):
        free = {each for each, below in MAY_IMPORT.items() if each not in seen and below <= seen}
        assert free, f"a circle among {set(MAY_IMPORT) - seen}"
        seen |= free


@pytest.mark.parametrize("file", DECIDES, ids=lambda file: file.stem)
def test_what_decides_knows_no_torch(file):
    assert not {name.split(".")[0] for name in imports(file)} & {"torch", "triton", "numpy"}


def test_what_copies_knows_of_what_decides_only_the_words_they_share():
    for file in set(EVERYTHING) - set(DECIDES):
        ours = {name.split(".")[1] for name in imports(file) if name.startswith("cpu_prefix_cache.")}
        assert ours <= OTHERS[room(file)], file


def test_one_file_knows_triton_and_is_imported_by_staging_alone():
    knows = {file.stem for file in EVERYTHING if "triton" in {name.split(".")[0] for name in imports(file)}}
    assert knows == {"triton_staging"}
    uses = {file.stem for file in EVERYTHING if "triton_staging" in file.read_text()}
    assert uses == {"staged", "paths"}


@pytest.mark.parametrize("file", EVERYTHING, ids=lambda file: str(file.relative_to(HOME)))
def test_the_library_knows_no_engine(file):
    assert not {name.split(".")[0] for name in imports(file)} & ENGINES


def test_importing_the_library_imports_no_torch():
    program = "import sys, cpu_prefix_cache; print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(HOME.parent), "PATH": ""},
    )
    assert found.stdout.strip() == "[]"
