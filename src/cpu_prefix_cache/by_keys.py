"""Blocks by keys, for an engine that has its own index: it puts, looks up and loads what it names by keys.

`KeyedHostCache` has the calls, on the layouts and errors of `cpu_prefix_cache`; docs/keys.md is the guide.

Nothing here imports torch before a `KeyedHostCache` is made.
"""

from cpu_prefix_cache.host_cache import CopyHandle, KeyedHostCache, KeyedStatistics, LoadHandle, PutHandle
from cpu_prefix_cache.keyed.found_keys import FoundKeys
from cpu_prefix_cache.messages.errors import CopyFailed

__all__ = ["CopyFailed", "CopyHandle", "FoundKeys", "KeyedHostCache", "KeyedStatistics", "LoadHandle", "PutHandle"]
