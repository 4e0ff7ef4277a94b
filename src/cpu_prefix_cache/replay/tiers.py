"""What a trace is replayed on: a host, and perhaps a device before it. Capacities are blocks."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostTier:
    """`store_after` and `min_store_tokens` are admission options (admission.py), and off unless given."""

    capacity: int
    policy: str = "lru"
    store_after: int = 1
    min_store_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DeviceTier:
    """Its least recently used goes first, as in engines. `horizon` is how far lazy stores are asked to look ahead."""

    capacity: int
    offload: str = "lazy"
    horizon: int = 400

    @property
    def looks_ahead(self) -> int:
        """How far they do: at most over a quarter of the device."""
        return max(1, min(self.horizon, self.capacity // 4))
