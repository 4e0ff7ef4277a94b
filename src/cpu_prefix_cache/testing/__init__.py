"""Checks of devices and stores that others write for this library, copiers with faults, a store in memory, and an
engine that computes nothing, for their authors' tests.

A name is imported when it is used: `check_device` and `Trial` need Hypothesis (extra `testing`), copiers need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpu_prefix_cache.testing.copiers import CorruptingCopier, FailingCopier, LateCopier, MeddlingCopier
    from cpu_prefix_cache.testing.device import Trial, check_device
    from cpu_prefix_cache.testing.engine import Engine
    from cpu_prefix_cache.testing.memory_store import MemoryStore
    from cpu_prefix_cache.testing.store import check_store

_HOMES = {
    "CorruptingCopier": "copiers",
    "Engine": "engine",
    "FailingCopier": "copiers",
    "LateCopier": "copiers",
    "MeddlingCopier": "copiers",
    "MemoryStore": "memory_store",
    "Trial": "device",
    "check_device": "device",
    "check_store": "store",
}

__all__ = [
    "CorruptingCopier",
    "Engine",
    "FailingCopier",
    "LateCopier",
    "MeddlingCopier",
    "MemoryStore",
    "Trial",
    "check_device",
    "check_store",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
