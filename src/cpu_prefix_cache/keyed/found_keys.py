"""FoundKeys: the answer to a lookup, which is a lease on what it names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cpu_prefix_cache.pool.block_pool import BlockPool, Pin


@dataclass(slots=True, eq=False)
class FoundKeys:
    """The beginning of some keys that is here. A lease on it, until it is released.

    `lengths` are the numbers of keys after which a request can resume, ascending: all groups have what that takes.
    `by_group` has the same for each group alone, as far as the prefix groups reach. `cache` has answered.
    """

    lengths: Sequence[int]
    by_group: Mapping[str, Sequence[int]]
    cache: object = field(default=None, repr=False)
    pins: list[tuple[BlockPool, Pin]] = field(default_factory=list, repr=False)
    is_released: bool = field(default=False, repr=False)

    @property
    def longest(self) -> int:
        return self.lengths[-1] if self.lengths else 0

    def end(self) -> None:
        """Let go of what it names."""
        while self.pins:
            pool, pin = self.pins.pop()
            pool.unpin(pin)
