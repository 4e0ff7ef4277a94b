"""The option `tier`: what the operator says of the tier below host memory, checked when the engine starts.

"tier": {"kind": "file", "path": "/nvme/kv", "bytes": 1099511627776}
"tier": {"kind": "redis", "url": "redis://cache:6379"}
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from connector.tier.files import FileTierSettings
from connector.tier.revision import REVISION_FILE, read_revision
from connector.tier.settings import TierSettings
from connector.tier.shared import SharedTierSettings
from cpu_prefix_cache import OFFLOAD_MODES, ConfigurationError, FileTier, SharedTier
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.stores.opening import check_kind


class Keys(NamedTuple):
    required: tuple[str, ...]
    optional: tuple[str, ...]


TIER, FILE = "tier", "file"
ALL = "offload", "model", "revision"
FILES = Keys(("kind", "path", "bytes"), (*ALL, "keep_others"))
STORE = Keys(("kind", "url"), (*ALL, REVISION_FILE, "ask_milliseconds"))
TEXTS = ("kind", "path", "url", "offload", "model", "revision", REVISION_FILE)


def check_options(said: Any) -> None:
    """Raises ConfigurationError for a key that is missing, unknown or of another type."""
    if not isinstance(said, Mapping):
        raise ConfigurationError(f"{TIER} is a dictionary with {', '.join(FILES.required)}; got {type(said).__name__}")
    if "kind" in said and type(said["kind"]) is str and said["kind"] != FILE:
        check_kind(said["kind"], said.get("url"))
    required, optional = FILES if said.get("kind", FILE) == FILE else STORE
    known = (*required, *optional)
    unknown = sorted(set(said) - set(known))
    if unknown:
        raise ConfigurationError(f"unknown key {unknown[0]!r} in {TIER}; known keys are {', '.join(known)}")
    missing = [name for name in required if name not in said]
    if missing:
        raise ConfigurationError(f"{TIER} needs {missing[0]}; its keys are {', '.join(required)}, and optional others")
    for name in TEXTS:
        if name in said and (type(said[name]) is not str or not said[name]):
            got = type(said[name]).__name__ if name == "url" else repr(said[name])  # a URL may have a password
            raise ConfigurationError(f"{name} of the tier is a text, got {got}")
    if "revision" in said and REVISION_FILE in said:
        raise ConfigurationError(f"the tier has a revision and a {REVISION_FILE}: leave one of them out")
    for name in ("bytes", "ask_milliseconds"):
        if name in said and (type(said[name]) is not int or said[name] < 1):
            raise ConfigurationError(f"{name} of the tier is a whole number, at least 1; got {said[name]!r}")
    if type(said.get("keep_others", False)) is not bool:
        raise ConfigurationError(f"keep_others of the tier is true or false, got {said['keep_others']!r}")
    if said.get("offload", OFFLOAD_MODES[0]) not in OFFLOAD_MODES:
        raise ConfigurationError(f"offload of the tier is one of {', '.join(OFFLOAD_MODES)}; got {said['offload']!r}")


def said_tier(
    said: Mapping[str, Any], *, engine: int, model: str, weights: Callable[[], str], hash: str
) -> FileTier | SharedTier:
    """The tier of one engine of those that the operator has started with these options, which are checked.

    `weights` says what identifies them. It is asked if the operator has given no revision.
    """
    whose = {"model": said.get("model", model), "revision": _revision(said) or weights(), "hash": hash}
    if "offload" in said:
        whose["offload"] = said["offload"]
    if said["kind"] == FILE:
        keep_others = said.get("keep_others", False)
        return FileTier(said["path"], said["bytes"], keep_others=keep_others, engine=engine, **whose)
    if "ask_milliseconds" in said:
        whose["ask_seconds"] = said["ask_milliseconds"] / 1000
    return SharedTier(said["url"], **whose)


def _revision(said: Mapping[str, Any]) -> str | None:
    return read_revision(said[REVISION_FILE]) if REVISION_FILE in said else said.get("revision")


def settings_of(tier: FileTier | SharedTier, namespace: Namespace, owners: int) -> TierSettings:
    if isinstance(tier, FileTier):
        return FileTierSettings(namespace, owners, tier)
    return SharedTierSettings(namespace, owners, tier)
