"""A tier as a text, as a dictionary and as a class: the same fields by the same names, checked in one place."""

import pytest

from cpu_prefix_cache import ConfigurationError, FileTier, SharedTier
from cpu_prefix_cache.stores.dialect import parse_tier

FILE = {"kind": "file", "path": "/nvme/kv", "bytes": 64 << 30}
STORE = {"kind": "rediss", "store": "rediss://cache:6379"}


@pytest.mark.parametrize(
    ("text", "fields", "tier"),
    [
        ("file:/nvme/kv:64GiB", FILE, FileTier("/nvme/kv", 64 << 30)),
        ("rediss://cache:6379", STORE, SharedTier("rediss://cache:6379")),
    ],
)
def test_text_dictionary_and_class_are_one_tier(text, fields, tier):
    assert parse_tier(text) == parse_tier(fields) == tier


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        (FILE, {"offload": "lazy", "policy": "arc", "model": "m", "revision": "1", "keep_others": True}),
        (STORE, {"offload": "lazy", "policy": "arc", "model": "m", "revision": "1", "ask_seconds": 0.5}),
    ],
)
def test_every_field_goes_by_its_name(fields, more):
    tier = parse_tier({**fields, **more})
    assert {name: getattr(tier, name) for name in more} == more


def test_the_old_name_of_a_store_is_understood():
    assert parse_tier({"kind": "redis", "url": "redis://cache"}) == SharedTier("redis://cache")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({**STORE, "ask_milliseconds": 20}, "ask_milliseconds of a tier is ask_seconds, in seconds: 0.02"),
        ({**STORE, "ask_seconds": "20"}, "ask_seconds of a tier is a number of seconds above 0; got '20'"),
        ({**STORE, "bytes": 5}, "unknown key 'bytes' in a tier; known keys are kind, store"),
        ({"kind": "redis"}, "a tier needs store; its keys are kind, store"),
        ({**FILE, "ask_seconds": 1}, "unknown key 'ask_seconds' in a tier; known keys are kind, path, bytes"),
        ({**FILE, "bytes": "64GiB"}, "bytes of a tier is a whole number of bytes, at least 1; got '64GiB'"),
        ({**FILE, "policy": 7}, "policy of a tier is a text"),
        ({**FILE, "model": None}, "model of a tier is left out rather than null"),
        ({**FILE, "engine": 1}, "unknown key 'engine'"),
        ({"path": "/nvme", "bytes": 5}, "a tier needs kind"),
        ({"kind": 7}, "kind of a tier is a text; got 7"),
        ({**STORE, "url": "redis://other"}, "url of a tier is its store by an older name: leave url out"),
        ("nobody://cache", "unknown kind of tier 'nobody'"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(fields, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        parse_tier(fields)
