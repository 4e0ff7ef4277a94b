"""What a trace is replayed on: a host, or a device and a host behind it. Capacities are blocks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostTier:
    """A host pool. `store_after` and `min_store_tokens` are admission thresholds (admission.py), off by default."""

    capacity: int
    policy: str = "lru"
    store_after: int = 1
    min_store_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTier:
    """A device pool with LRU, as in engines. `horizon` is how many blocks lazy stores are asked to look ahead."""

    capacity: int
    offload: str = "lazy"
    horizon: int = 400

    @property
    def looks_ahead(self) -> int:
        """How many blocks lazy stores look ahead: the horizon, but at most a quarter of the device."""
        return max(1, min(self.horizon, self.capacity // 4))
