"""Both halves of the host cache in one object, for an engine in one process; and the tier below it, if there is one."""

from cpu_prefix_cache.host_cache.halves import HostStatistics
from cpu_prefix_cache.host_cache.handles import CopyHandle, LoadHandle, PutHandle
from cpu_prefix_cache.host_cache.host_cache import HostCache
from cpu_prefix_cache.host_cache.keyed_host_cache import KeyedHostCache, KeyedStatistics
from cpu_prefix_cache.host_cache.options import CopierWrapper, HostOptions
from cpu_prefix_cache.host_cache.radix_host_cache import RadixHostCache

__all__ = [
    "CopierWrapper",
    "CopyHandle",
    "HostCache",
    "HostOptions",
    "HostStatistics",
    "KeyedHostCache",
    "KeyedStatistics",
    "LoadHandle",
    "PutHandle",
    "RadixHostCache",
]
