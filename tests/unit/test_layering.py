"""The arrows are a test: data flows one way and imports go the other."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2] / "src" / "cpu_prefix_cache"
MAY_IMPORT = {  # rooms of what decides: each file and each folder of the library, and of its `tools`, is one
    "messages": set(),
    "model": {"messages"},
    "index": {"messages"},
    "eviction": {"index", "messages", "model"},
    "pool": {"eviction", "index", "messages", "model"},
    "offload": {"messages", "model", "pool"},
    "prefix_cache": {"index", "messages", "model", "offload", "pool"},
    "tiers": {"messages", "model", "offload", "pool", "prefix_cache"},
    "keyed": {"messages", "model", "offload", "pool", "tiers"},
    "keeper": {"eviction", "index", "messages", "model", "offload", "pool", "prefix_cache", "tiers"},
    "deciding": {"eviction", "index", "keeper", "messages", "model", "offload", "pool", "prefix_cache", "tiers"},
    "tools.plots": {"messages"},
    "tools.replay": {"eviction", "messages", "model", "offload", "pool", "prefix_cache", "tiers", "tools.plots"},
    "tools.plan": {"eviction", "messages", "model", "tools.plots", "tools.replay"},
}
BOTH = {
    "copier",
    "keeper",
    "keyed",
    "kv_layout",
    "memory",
    "messages",
    "model",
    "node",
    "offload",
    "pool",
    "prefix_cache",
    "slab",
    "tiers",
}
OTHERS = {  # rooms of what copies, of both halves together, of a tier, of the tests of others, and the command
    "memory": {"messages"},
    "copier": {"memory", "messages", "model"},
    "slab": {"copier", "memory", "messages", "model"},
    "tools.bench": {"copier", "memory", "messages", "model", "slab", "stores", "tools.plots", "tools.replay"},
    "stores": {"messages", "model", "slab"},
    "node": {"keeper", "memory", "messages", "model", "slab"},
    "kv_layout": {"memory", "messages", "model"},
    "host_cache": BOTH,
    "by_keys": {"host_cache", "keyed", "messages"},
    "copying": {"copier", "memory", "model", "node", "slab"},
    "tier": {"messages", "slab", "stores"},
    "testing": {"copier", "memory", "messages", "model", "offload", "pool", "prefix_cache", "stores"},
    "tools.keep": {"memory", "messages", "node", "stores"},
    "tools.cli": {"messages", "tools.bench", "tools.keep", "tools.plan", "tools.replay"},
}
EVERYTHING = sorted(HOME.rglob("*.py"))
TOOLS = sorted((HOME / "tools").rglob("*.py"))
ENGINES = {"connector", "vllm", "atom", "sglang", "transformers", "lmcache"}


@cache
def imports(file):
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def room_at(parts):
    """The room of a path in the library: "pool" of ("pool", "states"), "tools.cli" of ("tools", "cli")."""
    return ".".join(parts[: 2 if parts[0] == "tools" else 1])


def room(file):
    return room_at(file.relative_to(HOME).with_suffix("").parts)


ROOMS = set(map(room, EVERYTHING))
DECIDES = [file for file in EVERYTHING if room(file) not in OTHERS]
IN_ROOMS = [file for file in EVERYTHING if room(file) not in ("__init__", "tools.__init__")]


def rooms_imported(file):
    """Rooms other than its own that a file imports something of."""
    ours = [name.split(".")[1:] for name in imports(file) if name.startswith("cpu_prefix_cache.")]
    return {room_at(parts) for parts in ours} & ROOMS - {room(file)}


def test_imports_point_one_way():
    allowed = {**MAY_IMPORT, **OTHERS}
    others = {file: rooms_imported(file) - allowed[room(file)] for file in IN_ROOMS}
    assert {file: rooms for file, rooms in others.items() if rooms} == {}


def test_nothing_in_the_library_or_a_connector_imports_the_tools():
    tools, source = f"{HOME.name}.tools", HOME.parent.rglob("*.py")
    importers = {file for file in source if any(f"{name}.".startswith(f"{tools}.") for name in imports(file))}
    assert importers and importers <= set(TOOLS)


def test_no_room_imports_the_public_face():
    assert not {"by_keys", "copying", "deciding", "testing", "tier"} & set().union(
        *MAY_IMPORT.values(), *OTHERS.values()
    )


def test_the_table_lists_every_room():
    assert set(map(room, IN_ROOMS)) == {*MAY_IMPORT, *OTHERS}


def is_free_of_circles(arrows):
    """Whether all can be taken away, each after everything that it imports."""
    left = dict(arrows)
    while free := [each for each, below in left.items() if not below & set(left)]:
        left = {each: below for each, below in left.items() if each not in free}
    return not left


def test_rooms_do_not_import_in_a_circle():
    assert is_free_of_circles({**MAY_IMPORT, **OTHERS})
    assert not is_free_of_circles({"a": {"b"}, "b": {"a"}, "c": set()})


def test_one_room_alone_imports_both_halves():  # of `testing` each file one of them
    halves = {"copier", "memory", "slab"}, {"offload", "pool", "prefix_cache", "tiers"}
    both = {name for name, below in {**MAY_IMPORT, **OTHERS}.items() if all(below & half for half in halves)}
    assert both - {"testing"} == {"host_cache"}


def importing(files, packages):
    """Files of these that import one of the packages."""
    return [file for file in files if {name.split(".")[0] for name in imports(file)} & packages]


def test_the_deciding_half_imports_no_torch():
    assert importing(DECIDES, {"torch", "triton", "numpy"}) == []
    assert importing(EVERYTHING, {"torch"}), "the control"


def test_two_files_know_triton_and_staging_alone_imports_them():
    knows = {file.stem for file in importing(EVERYTHING, {"triton"})}
    assert knows == {"triton_staging", "triton_coding"}
    modules = {f"cpu_prefix_cache.copier.{name}" for name in knows}
    uses = {file.stem for file in EVERYTHING if modules & set(imports(file))}
    assert uses - knows == {"staged", "paths"}


def connectors_imported(name):
    """Packages of connectors, other than this one, that its files import something of."""
    files = (HOME.parent / "connector" / name).rglob("*.py")
    parts = [each.split(".") for file in files for each in imports(file)]
    return {each[1] for each in parts if each[0] == "connector" and len(each) > 1} - {name}


@pytest.mark.parametrize(
    ("name", "may_import"),
    [
        ("common", set()),
        ("multi", set()),
        ("tier", {"common"}),
        ("transformers", {"tier"}),
        ("atom", {"common", "tier"}),
        ("sglang", {"common"}),
        ("vllm", {"common", "multi", "tier"}),
        ("vllm_offloading", {"common"}),
        ("vllm_tiers", {"tier", "vllm"}),
    ],
)
def test_connectors_import_common_parts_and_none_the_other(name, may_import):
    assert connectors_imported(name) == may_import


@pytest.mark.parametrize("name", ["common", "multi", "tier"])
def test_the_common_parts_of_connectors_know_no_engine(name):
    assert importing((HOME.parent / "connector" / name).rglob("*.py"), ENGINES - {"connector"}) == []


def named_twice(files):
    """Classes of one name in several of these files."""
    found = Counter(node.name for file in files for node in ast.walk(ast.parse(file.read_text())) if is_class(node))
    return sorted(name for name, count in found.items() if count > 1)


def is_class(node):
    return isinstance(node, ast.ClassDef)


def test_no_class_name_of_the_library_stands_for_two_things():
    assert named_twice(HOME.rglob("*.py")) == []


def test_a_name_for_two_things_is_found(tmp_path):
    for name, text in {"a": "class Run: pass", "b": "class Row: pass\nclass Run: pass"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert named_twice(tmp_path.glob("*.py")) == ["Run"]


def test_the_library_knows_no_engine():
    assert importing(EVERYTHING, ENGINES) == []


@pytest.mark.parametrize("name", ["cpu_prefix_cache", "cpu_prefix_cache.deciding", "cpu_prefix_cache.tier"])
def test_importing_what_decides_imports_no_torch(name):
    program = f"import sys, {name}; print(sorted({{'torch', 'triton', 'numpy'}} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(HOME.parent), "PATH": ""},
    )
    assert found.stdout.strip() == "[]"


def test_the_picture_of_the_rooms_is_drawn_from_their_imports():
    page = (HOME.parents[1] / "docs" / "design.md").read_text()
    drawn = {
        name: set(re.split(r",\s+", rooms)) - {"nothing"}
        for name, rooms in re.findall(r"^\| `([\w.]+)` \| ([\w., ]+) \|", page, re.MULTILINE)
    }
    found = {room(file): set() for file in IN_ROOMS}
    for file in IN_ROOMS:
        found[room(file)] |= rooms_imported(file)
    assert drawn == found
