"""A host-memory KV prefix cache that any LLM engine can import.

    cpu_prefix_cache             for an engine in one process: `HostCache`, its options, layouts, devices and errors
    cpu_prefix_cache.by_keys     for one that has its own index: put, look up and load blocks by keys
    cpu_prefix_cache.deciding    the deciding half, for an engine whose scheduler is a process of its own
    cpu_prefix_cache.copying     the copying half, for its ranks
    cpu_prefix_cache.tier        a tier below host memory, and stores of one's own
    cpu_prefix_cache.testing     checks of a device and of a store, for their authors; copiers with faults

These six are public, each as far as its `__all__`. All other modules are private: they change without notice.

Nothing here imports torch before a `HostCache` is made.
"""

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.host_cache import CopierWrapper, HostCache, HostOptions, HostStatistics, RadixHostCache
from cpu_prefix_cache.kv_layout import ChunkLocal, KVGroup, Prefix, State, Window, keys_and_values, latents, states
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError, PrefixCacheError
from cpu_prefix_cache.messages.options import OFFLOAD_MODES
from cpu_prefix_cache.messages.request import Hit, Miss, Pending
from cpu_prefix_cache.model.hashing import ChainHasher, MultimodalItem
from cpu_prefix_cache.node.settings import NodePool
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.queue_device import QueueDevice
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.stores.settings import SharedTier

__version__ = "0.2.0"  # pyproject.toml reads it here

__all__ = [
    "ChainHasher",
    "ChunkLocal",
    "ConfigurationError",
    "CopierWrapper",
    "Device",
    "FileTier",
    "Hit",
    "HostCache",
    "HostOptions",
    "HostStatistics",
    "KVGroup",
    "Miss",
    "MisuseError",
    "MultimodalItem",
    "NodePool",
    "OFFLOAD_MODES",
    "POLICIES",
    "Pending",
    "Prefix",
    "PrefixCacheError",
    "QueueDevice",
    "RadixHostCache",
    "SharedTier",
    "State",
    "Window",
    "__version__",
    "keys_and_values",
    "latents",
    "states",
]
