"""The deciding half, for an engine whose scheduler is a process of its own, and for who writes a `Device`.

A connector's scheduler imports it: `CPUPrefixCache` (with a tier `TieredCache`), what an engine's blocks are to it,
what passes between it and the ranks, and what it is made of. Nothing here imports torch.

A store and a hit, with a device pool of four blocks and nobody copying any bytes:

>>> from cpu_prefix_cache import ChainHasher
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
"""

from cpu_prefix_cache.eviction import policy_of
from cpu_prefix_cache.index.boundary_log import BoundariesRemoved, BoundariesStored, BoundaryEvent
from cpu_prefix_cache.keeper.kept_cache import KeptCache, check_takes
from cpu_prefix_cache.messages.errors import InternalError, PoolExhausted
from cpu_prefix_cache.messages.numbers import check_whole
from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, RankReport, StepPlan, TransferPlan
from cpu_prefix_cache.messages.request import MISS, Answer, CheckpointAt, Request
from cpu_prefix_cache.messages.sizes import num_bytes, parse_bytes
from cpu_prefix_cache.messages.stats import CacheStatistics, HintStatistics, PoolStatistics
from cpu_prefix_cache.messages.tier import BlockName
from cpu_prefix_cache.model.codec import CODECS, RAW, Codec, codec_of
from cpu_prefix_cache.model.groups import ChunkLocalGroup, Group, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import FAR_CHUNKS, HybridChunkPlanner, Piece, PieceAt
from cpu_prefix_cache.model.report import conversation_bytes, describe
from cpu_prefix_cache.offload.break_even import OVERHEAD_SECONDS, USUAL_BYTES_PER_SECOND
from cpu_prefix_cache.offload.device import PooledDevice
from cpu_prefix_cache.offload.engine_steps import EngineSteps, EngineTraits
from cpu_prefix_cache.offload.forgetting import Forgetting
from cpu_prefix_cache.offload.places import FRONT, Places
from cpu_prefix_cache.offload.prefill_rate import MIN_TIMED_TOKENS, PrefillRate
from cpu_prefix_cache.offload.radix_device import RadixDevice
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, new_pool
from cpu_prefix_cache.pool.notes import Notes
from cpu_prefix_cache.pool.placement import Placement
from cpu_prefix_cache.pool.taken import TakenCheckpoints
from cpu_prefix_cache.prefix_cache import CPUPrefixCache, Resolved
from cpu_prefix_cache.tiers.keyed_tier import JobEnded, KeyedTier
from cpu_prefix_cache.tiers.tier_cache import TierCache
from cpu_prefix_cache.tiers.tiered_cache import TieredCache
from cpu_prefix_cache.tiers.time_saved import seconds_saved

__all__ = [
    "Answer",
    "BlockName",
    "BlockPool",
    "BoundariesRemoved",
    "BoundariesStored",
    "BoundaryEvent",
    "CODECS",
    "CPUPrefixCache",
    "CacheOptions",
    "CacheStatistics",
    "CheckpointAt",
    "ChunkLocalGroup",
    "Codec",
    "Direction",
    "EngineSteps",
    "EngineTraits",
    "FAR_CHUNKS",
    "FRONT",
    "Forgetting",
    "Group",
    "GroupCopy",
    "HintStatistics",
    "HybridChunkPlanner",
    "InternalError",
    "JobEnded",
    "KVCacheCoordinator",
    "KeptCache",
    "KeyedTier",
    "MIN_TIMED_TOKENS",
    "MISS",
    "Notes",
    "OVERHEAD_SECONDS",
    "Piece",
    "PieceAt",
    "PieceNeed",
    "Pin",
    "Placement",
    "Places",
    "PoolExhausted",
    "PoolStatistics",
    "PooledDevice",
    "PrefillRate",
    "PrefixGroup",
    "RAW",
    "RadixDevice",
    "RankReport",
    "Request",
    "Resolved",
    "StateGroup",
    "StepPlan",
    "TakenCheckpoints",
    "TierCache",
    "TieredCache",
    "TransferPlan",
    "USUAL_BYTES_PER_SECOND",
    "WindowGroup",
    "check_takes",
    "check_whole",
    "checkpoint_key",
    "codec_of",
    "conversation_bytes",
    "describe",
    "new_pool",
    "num_bytes",
    "parse_bytes",
    "policy_of",
    "seconds_saved",
]
