"""The tier that a text or a dictionary spells: the fields of FileTier and of SharedTier, by their names.

    "file:/nvme/kv:64GiB"          {"kind": "file", "path": "/nvme/kv", "bytes": 68719476736}
    "redis://cache:6379"           {"kind": "redis", "store": "redis://cache:6379"}

Values are checked by the classes. Other fields of these are for programs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.slab.settings import FILE, FileTier, parse_file_tier
from cpu_prefix_cache.slab.tier import check_option
from cpu_prefix_cache.stores.opening import check_kind
from cpu_prefix_cache.stores.settings import SharedTier

ALL = ("offload", "policy", "model", "revision")
OLD_NAMES = {"url": "store"}  # understood
GONE = {"ask_milliseconds": "ask_seconds, in seconds: 0.02 in place of 20"}


def parse_tier(spelled: str | Mapping[str, Any], extra: Sequence[str] = ()) -> FileTier | SharedTier:
    """Raises ConfigurationError. `extra` are keys that the caller reads itself from the dictionary of a store.

    >>> parse_tier("file:/nvme/kv:1.5GiB").bytes
    1610612736
    >>> parse_tier({"kind": "redis", "store": "redis://cache:6379"}) == parse_tier("redis://cache:6379")
    True
    """
    if isinstance(spelled, str):
        if "://" not in spelled:
            return parse_file_tier(spelled)
        spelled = {"kind": spelled.partition("://")[0], "store": spelled}
    if not isinstance(spelled, Mapping):
        raise ConfigurationError(
            "a tier is a text such as file:/nvme/kv:64GiB or redis://host:6379, or a dictionary with kind, path, bytes "
            f"or kind, store; got {type(spelled).__name__}"
        )
    for old, name in OLD_NAMES.items():
        if old in spelled and name in spelled:
            raise ConfigurationError(f"{old} of a tier is its {name} by an older name: leave {old} out")
    given = {OLD_NAMES.get(name, name): value for name, value in spelled.items()}
    kind = given.get("kind", FILE)
    check_option("kind", kind, isinstance(kind, str), "a text")
    if kind == FILE:
        return FileTier(**_fields(given, ("path", "bytes"), (*ALL, "keep_others")))
    check_kind(kind, given.get("store"))
    fields = _fields(given, ("store",), (*ALL, "ask_seconds", *extra))
    return SharedTier(**{name: value for name, value in fields.items() if name not in extra})


def _fields(given: Mapping[str, Any], required: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    """The fields given, without the kind. Raises ConfigurationError for a key that is missing, unknown or null."""
    required = ("kind", *required)
    known = (*required, *optional)
    for name, value in given.items():
        if name in GONE:
            raise ConfigurationError(f"{name} of a tier is {GONE[name]}")
        if name not in known:
            raise ConfigurationError(f"unknown key {name!r} in a tier; known keys are {', '.join(known)}")
        check_option(name, value, value is not None, "left out rather than null")
    for name in required:
        if name not in given:
            raise ConfigurationError(f"a tier needs {name}; its keys are {', '.join(required)}, and optional others")
    return {name: value for name, value in given.items() if name != "kind"}
