"""The options in `kv_connector_extra_config` that mean the same under each engine, and their checks.

An option that is unknown, of another type or too small raises ConfigurationError with a message that names what would
work. No value is rounded or replaced.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from cpu_prefix_cache import OFFLOAD_MODES, ConfigurationError
from cpu_prefix_cache.deciding import CODECS, policy_of

BYTES = "cpu_bytes_to_use"
POOL = "pool"  # in its place
TIER = "tier"  # below
CODEC = "codec"

Check = Callable[[str, Any], Any]  # of a name and its value: the value to use. Raises ConfigurationError


def whole(least: int, unit: str) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or value < least:
            raise ConfigurationError(f"{name} is a whole number of {unit}, at least {least}; got {value!r}")
        return value

    return check


def one_of(*words: str) -> Check:
    def check(name: str, value: Any) -> Any:
        if value not in words:
            raise ConfigurationError(f"{name} must be one of {', '.join(words)}; got {value!r}")
        return value

    return check


def _policy(_: str, value: Any) -> Any:
    policy_of(str(value))  # raises
    return value


CHECKS: Mapping[str, Check] = {
    BYTES: whole(1, "bytes"),
    "min_load_tokens": whole(0, "tokens"),
    "store_after": whole(1, "prompts"),
    "min_store_tokens": whole(0, "tokens"),
    "offload": one_of(*OFFLOAD_MODES),
    "policy": _policy,
    CODEC: one_of(*CODECS),
}


def check_known(given: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigurationError if an option is unknown."""
    if unknown := sorted(set(given).difference(known)):
        raise ConfigurationError(f"unknown option {unknown[0]!r}; known options are {', '.join(known)}")


def checked(options: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """The options given, as their checks return them, and a policy. Raises ConfigurationError."""
    given = options if isinstance(options, Mapping) else {}
    check_known(given, checks)
    if BYTES not in given and POOL not in given:
        raise ConfigurationError(f"kv_connector_extra_config needs {BYTES}, a whole number of bytes")
    return {"policy": _usual_policy(given)} | {name: checks[name](name, value) for name, value in given.items()}


def _usual_policy(given: Mapping[str, Any]) -> str:
    """`adaptive` finds what an LRU finds where that is nearly all, and more where it is not. A pool has an LRU, and
    only below one may a tier be lazy.
    """
    return "adaptive" if given.keys().isdisjoint((POOL, TIER)) else "lru"
