"""Namespaces: processes that may serve each other's bytes."""

import re
import sys
from itertools import combinations

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import ChunkLocalGroup, HybridChunkPlanner, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.slab.namespace import Namespace
from tests.support.sinks import SinkGroup
from tests.unit.slab.small_slab import BLOCK, FULL, Letters, namespace, planner

SAME = {"name": "full", "block_tokens": 16, "block_bytes": BLOCK}
OTHERS = {
    "model": namespace(model="n"),
    "weights": namespace(revision="s"),  # S8.15
    "dtype": namespace(dtype="fp8"),  # S8.16
    "hash": namespace(hash="sha256_cbor"),
    "ranks": namespace(ranks=2),
    "grid": namespace(planner=planner(FULL, grid_tokens=32)),
    "block": namespace(planner=planner(PrefixGroup(name="full", block_tokens=16, block_bytes=4096))),
    "kind": namespace(planner=planner(WindowGroup(window_tokens=40, **SAME))),
    "window": namespace(planner=planner(WindowGroup(window_tokens=41, **SAME))),
    "sinks": namespace(planner=planner(SinkGroup(window_tokens=40, sink_tokens=3, **SAME))),
    "more sinks": namespace(planner=planner(SinkGroup(window_tokens=40, sink_tokens=4, **SAME))),
    "extra": namespace(extra={"tensor parallel": 1}),
    "extra text": namespace(extra={"tensor parallel": "1"}),
    "extra name": namespace(extra={"pipeline parallel": 1}),
}

# One group of each kind.
EVERY_KIND = (
    PrefixGroup(name="full", block_tokens=32, block_bytes=4096, lookahead_tokens=1, lanes=1),
    WindowGroup(name="window", window_tokens=40, extra_tokens=3, block_tokens=16, block_bytes=8192),
    ChunkLocalGroup(name="local", window_tokens=64, block_tokens=16, block_bytes=8192, device_blocks=2),
    StateGroup(name="state", block_tokens=32, block_bytes=20_000),
)
# Of each of these: kind, tokens and bytes of a block, tokens of the window, device and host blocks, bytes, replicated.
SPELLED = (
    ("full", "prefix", 32, 4096, 0, 1, 1, 4096, 1),
    ("window", "window", 16, 8192, 40, 1, 4, 8192, 0),
    ("local", "chunk-local", 16, 8192, 64, 2, 8, 16_384, 0),
    ("state", "state", 32, 20_000, 0, 1, 10, 20_000, 0),
)


def test_a_folder_of_an_older_version_is_found(monkeypatch):
    """Folders on people's disks are named by the fields that each kind of group spells: they never change."""
    monkeypatch.setattr("cpu_prefix_cache.slab.namespace.LAYOUT_VERSION", 2)
    monkeypatch.setattr(sys, "byteorder", "little")
    kept = HybridChunkPlanner(EVERY_KIND, max_model_len=4096, ranks=2)
    found = namespace(planner=kept, ranks=2, extra={"attention": "a"})
    spelled = [value for name, value in found.fields if name.startswith("group ")]
    assert spelled == [value for group in SPELLED for value in group]
    fields = "kind, block tokens, block bytes, window tokens, device blocks, host blocks, piece bytes, replicated"
    assert list(found.spelled)[9:19] == ["group 0", *(f"group 0 {field}" for field in fields.split(", ")), "group 1"]
    assert found.folder == "c74588ca768a5bea962183bdfce13a82"


def test_whatever_differs_has_a_folder_of_its_own(monkeypatch):  # S8.15, S8.16
    monkeypatch.setattr("cpu_prefix_cache.slab.namespace.LAYOUT_VERSION", 1)
    all = [namespace(), *OTHERS.values()]
    monkeypatch.undo()
    all.append(namespace())
    for one, other in combinations(all, 2):
        assert one.folder != other.folder


def test_equal_fields_have_one_folder():
    assert namespace(extra={"a": 1, "b": 2}) == namespace(extra={"b": 2, "a": 1})
    assert re.fullmatch("[0-9a-f]{32}", namespace().folder)


@pytest.mark.parametrize(("one", "other"), [("a/b", "a-b"), ("a/b", "a\\b"), ("..", "."), ("a", "A"), ("é", "e\u0301")])
def test_names_that_would_map_to_one_path_do_not(one, other):  # S8.21
    assert namespace(model=one).folder != namespace(model=other).folder


def test_no_field_runs_into_the_next():  # S8.21
    assert namespace(model="ab", revision="c").folder != namespace(model="a", revision="bc").folder


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_served_to_another(name, tmp_path):  # S8.15
    letters = Letters(tmp_path)
    letters.put("a")
    letters.reopen(tmp_path, named=OTHERS[name])
    assert letters.get("a") == "."
    letters.reopen(tmp_path)
    assert letters.get("a") == "a"


@pytest.mark.parametrize("hash", ["xxh3_128", "xxhash", "", "sha1"])
def test_keys_on_disk_are_cryptographic_digests(hash):
    with pytest.raises(ConfigurationError, match="sha256"):
        namespace(hash=hash)


def test_an_extra_field_does_not_replace_one_of_ours():
    with pytest.raises(ConfigurationError, match="'model'"):
        namespace(extra={"model": "other"})


@pytest.mark.parametrize("field", ["model", "revision", "dtype"])
def test_no_field_is_empty(field):
    with pytest.raises(ConfigurationError, match=f"never empty, and '{field}' is"):
        namespace(**{field: ""})


def test_a_field_has_characters_that_can_be_encoded():
    for fields in (("a", "\udcff"),), (("\udcff", "a"),):
        with pytest.raises(ConfigurationError, match="UTF-8"):
            Namespace(fields)


def test_a_field_is_a_text_or_a_number():
    with pytest.raises(ConfigurationError, match="'a'"):
        Namespace((("a", b"bytes"),))
