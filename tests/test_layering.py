"""The arrows are a test: data flows one way and imports go the other."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1] / "src" / "cpu_prefix_cache"
MAY_IMPORT = {  # rooms of what decides: each file and each folder of the library is one
    "messages": set(),
    "model": {"messages"},
    "index": {"messages"},
    "eviction": {"index", "messages", "model"},
    "pool": {"eviction", "index", "messages", "model"},
    "offload": {"messages", "model", "pool"},
    "prefix_cache": {"index", "messages", "model", "offload", "pool"},
    "tiers": {"messages", "model", "offload", "pool", "prefix_cache"},
    "plots": {"messages"},
    "replay": {"eviction", "messages", "model", "offload", "plots", "pool", "prefix_cache", "tiers"},
}
BOTH = {
    *("copier", "kv_layout", "memory", "messages", "model", "offload", "pool", "prefix_cache", "slab", "stores"),
    "tiers",
}
OTHERS = {  # rooms of what copies, of both halves together, of the tests of others, and the command
    "memory": {"messages"},
    "copier": {"memory", "messages", "model"},
    "slab": {"copier", "memory", "messages", "model"},
    "bench": {"copier", "memory", "messages", "model", "plots", "replay", "slab", "stores"},
    "stores": {"messages", "model", "slab"},
    "kv_layout": {"memory", "messages", "model"},
    "host_cache": BOTH,
    "testing": {"messages", "offload", "stores"},
    "cli": {"bench", "messages", "replay"},
}
DECIDES = sorted(path for path in HOME.rglob("*.py") if path.relative_to(HOME).with_suffix("").parts[0] not in OTHERS)
EVERYTHING = sorted(HOME.rglob("*.py"))
ENGINES = {"connector", "vllm", "atom", "sglang", "transformers", "lmcache"}


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            yield node.module


def room(file):
    return file.relative_to(HOME).with_suffix("").parts[0]


def ours(file):
    """The modules of the library that a file imports, each as its path in it: "pool.states"."""
    return {name.removeprefix("cpu_prefix_cache.") for name in imports(file) if name.startswith("cpu_prefix_cache.")}


def name_of(file):
    return str(file.relative_to(HOME))


@pytest.mark.parametrize("file", [file for file in EVERYTHING if room(file) != "__init__"], ids=name_of)
def test_imports_point_one_way(file):
    rooms = {name.split(".")[0] for name in ours(file)}
    assert rooms - {room(file)} <= {**MAY_IMPORT, **OTHERS}[room(file)]


def test_the_table_lists_every_room():
    assert {room(file) for file in DECIDES} - {"__init__"} == set(MAY_IMPORT)


def is_free_of_circles(arrows):
    """Whether all can be taken away, each after everything that it imports."""
    left = dict(arrows)
    while free := [each for each, below in left.items() if not below & set(left)]:
        left = {each: below for each, below in left.items() if each not in free}
    return not left


def test_rooms_do_not_import_in_a_circle():
    assert is_free_of_circles({**MAY_IMPORT, **OTHERS})
    assert not is_free_of_circles({"a": {"b"}, "b": {"a"}, "c": set()})


def test_one_room_alone_imports_both_halves():
    halves = {"copier", "memory", "slab"}, {"offload", "pool", "prefix_cache", "tiers"}
    both = {name for name, below in {**MAY_IMPORT, **OTHERS}.items() if all(below & half for half in halves)}
    assert both == {"host_cache"}


@pytest.mark.parametrize("file", DECIDES, ids=name_of)
def test_what_decides_knows_no_torch(file):
    assert not {name.split(".")[0] for name in imports(file)} & {"torch", "triton", "numpy"}


def test_one_file_knows_triton_and_is_imported_by_staging_alone():
    knows = {file.stem for file in EVERYTHING if "triton" in {name.split(".")[0] for name in imports(file)}}
    assert knows == {"triton_staging"}
    uses = {file.stem for file in EVERYTHING if "triton_staging" in file.read_text()}
    assert uses == {"staged", "paths"}


@pytest.mark.parametrize("file", EVERYTHING, ids=name_of)
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


def test_the_picture_of_the_rooms_is_drawn_from_their_imports():
    drawn = {}
    for line in (HOME.parents[1] / "docs" / "design.md").read_text().splitlines():
        if match := re.match(r"\* `(\w+)` imports ([\w, ]+):", line):
            drawn[match[1]] = set(match[2].split(", ")) - {"nothing"}
    found = {room(file): set() for file in EVERYTHING if room(file) != "__init__"}
    for file in EVERYTHING:
        if room(file) != "__init__":
            found[room(file)] |= {name.split(".")[0] for name in ours(file)} - {room(file)}
    assert drawn == found
