"""A store by its URL: ours, a third party's by entry point, and the refusal where there is none."""

import pytest

from cpu_prefix_cache.messages.errors import ConfigurationError, TierUnavailable
from cpu_prefix_cache.stores.opening import GROUP, check_kind, open_store
from tests.support.packages import install
from tests.unit.stores.example_store import FolderStore


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Packages that have these entry points: name and value."""
    return lambda **points: install(tmp_path, monkeypatch, GROUP, points)


def test_a_third_party_has_an_entry_point(installed, tmp_path):
    installed(folder="tests.unit.stores.example_store:FolderStore", redis="tests.unit.stores.example_store:FolderStore")
    store = open_store(f"folder://{tmp_path}")
    assert isinstance(store, FolderStore)
    value, into = memoryview(b"value"), memoryview(bytearray(5))
    assert store.put_from(["key"], [[value]], 1.0) == [True]
    assert all(store.get_into(["key"], [[into]], 1.0)) and into == value
    with pytest.raises(TierUnavailable, match="redis"):  # which is ours, whatever is installed
        open_store("redis://127.0.0.1:1")


def test_control_another_value_is_noticed(installed, tmp_path):
    installed(folder="tests.unit.stores.example_store:FolderStore")
    store, into = open_store(f"folder://{tmp_path}"), memoryview(bytearray(5))
    store.put_from(["key"], [[memoryview(b"value")]], 1.0)
    for file in tmp_path.glob("[0-9a-f]" * 64):
        file.write_bytes(b"valve")
    assert all(store.get_into(["key"], [[into]], 1.0)) and into != b"value"


@pytest.mark.parametrize("url", ["memcached://host", "redis", "redis://", "", "/nvme/kv"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(url):
    with pytest.raises(ConfigurationError, match="one of mooncake, redis, rediss, unix"):
        open_store(url)


@pytest.mark.parametrize(
    ("value", "told"), [("no_such_package:Store", "cannot be imported"), ("builtins:str", "no KeyedStore")]
)
def test_an_entry_point_that_is_no_store_is_refused(installed, value, told):
    installed(other=value)
    with pytest.raises(ConfigurationError, match=told):
        open_store("other://address")


class NobodyThere:
    def __init__(self, url):
        raise ConnectionRefusedError("nobody there")


def test_a_store_that_cannot_be_reached_may_be_reached_later(installed):
    """So its error is not that of a configuration, which nobody would try again."""
    installed(other=f"{__name__}:NobodyThere")
    with pytest.raises(TierUnavailable, match="nobody there") as raised:
        open_store("other://address")
    assert not isinstance(raised.value, ConfigurationError)


def test_the_url_of_a_kind_begins_with_it():
    check_kind("redis", "redis://cache")
    check_kind("redis", "rediss://cache")
    check_kind("redis", None)  # each kind checks its own requirements
    with pytest.raises(ConfigurationError, match="begins with redis://, not with mooncake://"):
        check_kind("redis", "mooncake://cache")
    with pytest.raises(ConfigurationError, match="unknown kind of tier 'tape'"):
        check_kind("tape", "tape://cache")
