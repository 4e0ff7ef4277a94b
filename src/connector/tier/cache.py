"""The cache of an engine's scheduler, by the operator's options, with a tier below it or without."""

from collections.abc import Mapping
from typing import Any

from connector.tier.settings import TierSettings
from cpu_prefix_cache import CPUPrefixCache, Device, HybridChunkPlanner, Thresholds
from cpu_prefix_cache.tiers.tiered_cache import TieredCache

THRESHOLDS = ("store_after", "min_store_tokens")  # options that are not the cache's own


def build_cache(
    planner: HybridChunkPlanner,
    device: Device,
    tier: TierSettings | None,
    said: Mapping[str, Any],
    *,
    host_blocks: int,
    **options: Any,
) -> CPUPrefixCache:
    """A TieredCache if there is a tier. What the operator has `said` comes before `options`.

    Raises ConfigurationError.
    """
    thresholds = {name: value for name, value in said.items() if name in THRESHOLDS}
    rest = {name: value for name, value in said.items() if name not in THRESHOLDS}
    options |= {**rest, "host_blocks": host_blocks, "thresholds": Thresholds(**thresholds)}
    if tier is None:
        return CPUPrefixCache(planner, device, **options)
    slots = tier.num_slots(planner.host_block_bytes, host_blocks)
    return TieredCache(planner, device, slots=slots, **tier.cache_options(), **options)
