"""Tiers that a trace is replayed on: a host, a device before it, a tier below it. Capacities are blocks."""

from dataclasses import dataclass

from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.tiers.tier_cache import EAGER_FROM


@dataclass(frozen=True, slots=True)
class HostTier:
    """A host pool. `store_after` and `min_store_tokens` are admission thresholds (admission.py), off by default.

    With a tier below, the thresholds hold back what is written to that.
    """

    capacity: int
    policy: str = "lru"
    store_after: int = 1
    min_store_tokens: int = 0

    def options(self, offload: str) -> CacheOptions:
        return CacheOptions(
            offload=offload,
            policy=self.policy,
            store_after=self.store_after,
            min_store_tokens=self.min_store_tokens,
        )


@dataclass(frozen=True, slots=True)
class DeviceTier:
    """A device pool, with LRU in engines. `horizon` is the number of blocks that lazy stores look ahead: by default
    what two steps of 8,192 tokens compute, in blocks of 512.
    """

    capacity: int
    offload: str = "lazy"
    horizon: int = 32
    policy: str = "lru"

    @property
    def looks_ahead(self) -> int:
        """How many blocks lazy stores look ahead: the horizon, but at most a quarter of the device."""
        return max(1, min(self.horizon, self.capacity // 4))


@dataclass(frozen=True, slots=True)
class BelowTier:
    """A tier below the host, with LRU. `offload` is when the host's blocks are written to it; None: see `mode`."""

    capacity: int
    offload: str | None = None

    def mode(self, host: HostTier) -> str:
        """Lazy or eager: as `TieredCache` chooses."""
        if self.offload is not None:
            return self.offload
        return "eager" if self.capacity >= EAGER_FROM * host.capacity or host.policy != "lru" else "lazy"
