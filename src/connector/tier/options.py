"""The option `tier`: what the operator says of the tier below host memory, checked when the engine starts.

"tier": {"kind": "file", "path": "/nvme/kv", "bytes": 1099511627776}
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cpu_prefix_cache import OFFLOAD_MODES, ConfigurationError
from cpu_prefix_cache.slab.settings import KINDS, FileTier

TIER = "tier"
REQUIRED = ("kind", "path", "bytes")
TEXTS = ("kind", "path", "offload", "model", "revision")
KNOWN = (*REQUIRED, *(name for name in TEXTS if name not in REQUIRED))


def check_options(said: Any) -> None:
    """Raises ConfigurationError for a key that is missing, unknown or of another type."""
    if not isinstance(said, Mapping):
        raise ConfigurationError(f"{TIER} is a dictionary with {', '.join(REQUIRED)}; got {said!r}")
    unknown = sorted(set(said) - set(KNOWN))
    if unknown:
        raise ConfigurationError(f"unknown key {unknown[0]!r} in {TIER}; known keys are {', '.join(KNOWN)}")
    if "kind" in said and said["kind"] not in KINDS:
        raise ConfigurationError(f"unknown kind of tier {said['kind']!r}; known is {', '.join(KINDS)}")
    missing = [name for name in REQUIRED if name not in said]
    if missing:
        raise ConfigurationError(f"{TIER} needs {missing[0]}; its keys are {', '.join(REQUIRED)}, and optional others")
    for name in TEXTS:
        if name in said and (type(said[name]) is not str or not said[name]):
            raise ConfigurationError(f"{name} of the tier is a text, got {said[name]!r}")
    if type(said["bytes"]) is not int or said["bytes"] < 1:
        raise ConfigurationError(f"bytes of the tier is a whole number, at least 1; got {said['bytes']!r}")
    if said.get("offload", OFFLOAD_MODES[0]) not in OFFLOAD_MODES:
        raise ConfigurationError(f"offload of the tier is one of {', '.join(OFFLOAD_MODES)}; got {said['offload']!r}")


def file_tier(said: Mapping[str, Any], *, engine: int, model: str, weights: Callable[[], str], hash: str) -> FileTier:
    """The tier of one engine of those that the operator has started with these options, which are checked.

    `weights` says what identifies them. It is asked if the operator has not said a revision.
    """
    return FileTier(
        str(engine_folder(said["path"], engine)),
        said["bytes"],
        model=said.get("model", model),
        revision=said["revision"] if "revision" in said else weights(),
        hash=hash,
        offload=said.get("offload"),
    )


def engine_folder(path: str, engine: int) -> Path:
    """Engines under data parallelism have the same options, and each needs files of its own."""
    return Path(path) / f"engine-{engine}" if engine else Path(path)
