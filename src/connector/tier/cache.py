"""The cache of an engine's scheduler, by the operator's options, with a tier below it or without."""

from dataclasses import dataclass

from cpu_prefix_cache import Device
from cpu_prefix_cache.deciding import CacheOptions, CPUPrefixCache, EngineTraits, HybridChunkPlanner, TieredCache
from cpu_prefix_cache.tier import Namespace, Tier


@dataclass(frozen=True)
class EngineTier:
    """The tier of an engine of which `owners` ranks have bytes of their own: plain data, which goes to all ranks."""

    tier: Tier
    namespace: Namespace
    owners: int

    def slots(self, slot_bytes: int, host_blocks: int) -> int:
        """Slots of each owner. Raises ConfigurationError."""
        return self.tier.slots(slot_bytes, host_blocks, self.owners)

    def __str__(self) -> str:
        return str(self.tier)


def build_cache(
    planner: HybridChunkPlanner,
    device: Device,
    below: EngineTier | None,
    *,
    host_blocks: int,
    options: CacheOptions,
    engine: EngineTraits,
) -> CPUPrefixCache:
    """A TieredCache if there is a tier. No block is ready until every rank has reported that some are.

    Raises ConfigurationError.
    """
    if below is None:
        return CPUPrefixCache(planner, device, host_blocks=host_blocks, ready_blocks=0, options=options, engine=engine)
    return TieredCache(
        planner,
        device,
        host_blocks=host_blocks,
        below=below.tier.options(below.slots(planner.host_block_bytes, host_blocks)),
        ready_blocks=0,
        options=options,
        engine=engine,
    )
