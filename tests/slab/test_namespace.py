"""Who may serve whose bytes."""

import re
from itertools import combinations

import pytest

from cpu_prefix_cache import ConfigurationError, Group, GroupKind
from cpu_prefix_cache.slab.namespace import Namespace
from tests.slab.small_slab import FULL, Letters, namespace, planner

OTHERS = {
    "model": namespace(model="n"),
    "weights": namespace(revision="s"),  # S8.15
    "dtype": namespace(dtype="fp8"),  # S8.16
    "hash": namespace(hash="sha256_cbor"),
    "ranks": namespace(ranks=2),
    "grid": namespace(planner=planner(FULL, grid_tokens=32)),
    "block": namespace(planner=planner(Group(name="full", kind=GroupKind.PREFIX, block_tokens=16, block_bytes=4096))),
    "extra": namespace(extra={"tensor parallel": 1}),
    "extra text": namespace(extra={"tensor parallel": "1"}),
    "extra name": namespace(extra={"pipeline parallel": 1}),
}


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
