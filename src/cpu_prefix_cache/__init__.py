"""A host-memory KV prefix cache that any LLM engine can import.

A store and a hit, with a device pool of four blocks and nobody copying any bytes:

>>> attention = PrefixGroup(name="attention", block_tokens=16, block_bytes=1024)
>>> planner = HybridChunkPlanner([attention], max_model_len=4096)
>>> gpu = BlockPool(num_blocks=4)
>>> cache = CPUPrefixCache(planner, PooledDevice(gpu), host_blocks=64, options=CacheOptions(offload="eager"))
>>> first = Request("first", ChainHasher(chunk_tokens=16).keys(range(50)), num_tokens=50)
>>> cache.lookup(first, n0=0, now=0.0)
Miss()
>>> cache.admit(first, n0=0)
>>> gpu.commit(gpu.allocate(3), first.keys, gpu.root, gpu.touch(None))  # the engine computed 50 tokens: 3 full blocks
>>> cache.finished("first", num_tokens=50)
>>> plan = cache.step()
>>> stored = cache.report(RankReport(rank=0, done=frozenset(transfer.id for transfer in plan.transfers)))
>>> cache.lookup(Request("second", first.keys, num_tokens=48), n0=0, now=0.1)
Hit(boundary=32, start=0)

Everything here decides; nothing here imports torch. The bytes are moved by `cpu_prefix_cache.copier`.
"""

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.host_cache import HostCache, HostStatistics, Loading, Run, Wait
from cpu_prefix_cache.index.boundary_log import BoundariesRemoved, BoundariesStored, BoundaryEvent
from cpu_prefix_cache.kv_layout import ChunkLocal, KVGroup, Prefix, State, Window, keys_and_values, latents, states
from cpu_prefix_cache.messages.errors import (
    ConfigurationError,
    MisuseError,
    PoolExhausted,
    PrefixCacheError,
    TierUnavailable,
)
from cpu_prefix_cache.messages.options import OFFLOAD_MODES, CacheOptions
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, RankReport, StepPlan, TransferPlan
from cpu_prefix_cache.messages.request import Hit, Miss, Pending, Request
from cpu_prefix_cache.messages.stats import CacheStatistics, PoolStatistics, TierStatistics
from cpu_prefix_cache.model.groups import ChunkLocalGroup, Group, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.model.hashing import ChainHasher, MultimodalItem
from cpu_prefix_cache.model.planner import HybridChunkPlanner, Piece
from cpu_prefix_cache.offload.device import Device, PooledDevice
from cpu_prefix_cache.offload.engine_steps import EngineSteps, EngineTraits
from cpu_prefix_cache.offload.queue_device import QueueDevice
from cpu_prefix_cache.offload.radix_device import RadixDevice
from cpu_prefix_cache.pool.admission import Thresholds
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator
from cpu_prefix_cache.prefix_cache import CPUPrefixCache, Lease, Resolved
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.stores.keyed_store import Got, KeyedStore
from cpu_prefix_cache.stores.settings import SharedTier
from cpu_prefix_cache.tiers.tiered_cache import TieredCache

__version__ = "0.1.0"  # pyproject.toml reads it here

__all__ = [
    "BlockPool",
    "BoundariesRemoved",
    "BoundariesStored",
    "BoundaryEvent",
    "CPUPrefixCache",
    "CacheOptions",
    "CacheStatistics",
    "ChainHasher",
    "ChunkLocal",
    "ChunkLocalGroup",
    "ConfigurationError",
    "Device",
    "Direction",
    "EngineSteps",
    "EngineTraits",
    "FileTier",
    "Got",
    "Group",
    "GroupCopy",
    "Hit",
    "HostCache",
    "HostStatistics",
    "HybridChunkPlanner",
    "KVCacheCoordinator",
    "KVGroup",
    "KeyedStore",
    "Lease",
    "Loading",
    "Miss",
    "MisuseError",
    "MultimodalItem",
    "OFFLOAD_MODES",
    "POLICIES",
    "Pending",
    "Piece",
    "Pin",
    "PoolExhausted",
    "PoolStatistics",
    "PooledDevice",
    "Prefix",
    "PrefixCacheError",
    "PrefixGroup",
    "QueueDevice",
    "RadixDevice",
    "RankReport",
    "Request",
    "Resolved",
    "Run",
    "SharedTier",
    "State",
    "StateGroup",
    "StepPlan",
    "Thresholds",
    "TierStatistics",
    "TierUnavailable",
    "TieredCache",
    "TransferPlan",
    "Wait",
    "Window",
    "WindowGroup",
    "__version__",
    "keys_and_values",
    "latents",
    "states",
]
