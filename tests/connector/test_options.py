"""Options that mean the same under each engine."""

import pytest

from connector.common.options import BYTES, CHECKS, POOL, TIER, checked


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({BYTES: 1}, "adaptive"),
        ({BYTES: 1, TIER: "file:/kv:1GiB"}, "lru"),
        ({POOL: "unix:/run/kv.sock"}, "lru"),
        ({BYTES: 1, TIER: "file:/kv:1GiB", "policy": "arc"}, "arc"),
        ({BYTES: 1, "policy": "lru"}, "lru"),
    ],
)
def test_the_policy_is_adaptive_where_nothing_lies_below(given, policy):
    checks = {**CHECKS, TIER: lambda _, value: value, POOL: lambda _, value: value}
    assert checked(given, checks) == given | {"policy": policy}
