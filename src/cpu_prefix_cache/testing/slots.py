"""A device of the engine that computes nothing: a pool of ours, in the words in which engines speak to a device.

A *slot* is where one chunk lives; `blocks_of(slot)` are its device blocks. A request has a `Holding`:

    take       the slots of the chunks that are found, and new ones
    publish    others can find its chunks by their keys
    let_go     what nobody can find is free, and the rest waits
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cpu_prefix_cache.messages.errors import PoolExhausted
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import Device, PooledDevice
from cpu_prefix_cache.pool.block_pool import Pin
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, new_pool
from cpu_prefix_cache.pool.states import BlockState


@dataclass
class Holding:
    """The slots of one request, in token order; `published` of them can be found by key."""

    slots: list[int]
    published: int
    touch: Any = None
    pin: Pin | None = None


class Slots(Protocol):
    """A device, as an engine's requests use it."""

    @property
    def device(self) -> Device: ...
    def blocks_of(self, slot: int) -> tuple[int, ...]: ...
    def match(self, keys: Sequence[bytes]) -> int: ...
    def take(self, keys: Sequence[bytes], matched: int, total: int) -> Holding | None: ...
    def publish(self, holding: Holding, keys: Sequence[bytes], chunks: int) -> None: ...
    def let_go(self, holding: Holding) -> None: ...


class PoolSlots:
    """A pool of chunks and checkpoints. A request has windows and states in working memory of its own."""

    null_block = None
    num_promised = 0

    def __init__(
        self, planner: HybridChunkPlanner, blocks: int, policy: str = "lru", *, hands_out_first: bool = True
    ) -> None:
        self.pool = new_pool(planner, blocks, policy, on_device=True)
        self.coordinator = KVCacheCoordinator(planner, self.pool, on_device=True)
        self.device = PooledDevice(self.pool, hands_out_first=hands_out_first)
        self.now = 0.0
        self._last: dict[int, tuple[int, ...]] = {}

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        """Also of a slot that was freed this moment, whose bytes somebody looks at once more."""
        if slot not in self._last or self.pool.state(slot) is not BlockState.FREE:
            self._last[slot] = self.pool.blocks_of([slot])
        return self._last[slot]

    def match(self, keys: Sequence[bytes]) -> int:
        return self.pool.resident_run(keys, 0, len(keys))

    def take(self, keys: Sequence[bytes], matched: int, total: int) -> Holding | None:
        deepest = self.pool.find(keys[matched - 1]) if matched else None
        pin = None if deepest is None else self.pool.pin(deepest)
        try:
            new = self.pool.allocate(total - matched)
        except PoolExhausted:
            self.pool.unpin(pin)
            return None
        path = [] if deepest is None else self.pool.path(deepest, matched)
        self.now += 1.0
        used = self.coordinator.resume_node(keys, matched) if matched else None
        return Holding(path + new, matched, self.pool.touch(used, keys, self.now), pin)

    def publish(self, holding: Holding, keys: Sequence[bytes], chunks: int) -> None:
        """Chunk by chunk. A chunk that another request published first is that one's: ours is given up for it."""
        while holding.published < chunks:
            at = holding.published
            there = self.pool.find(keys[at])
            if there is None:
                parent = holding.slots[at - 1] if at else self.pool.root
                self.pool.commit([holding.slots[at]], [keys[at]], parent, holding.touch)
            else:
                self.pool.abort([holding.slots[at]])
                holding.slots[at] = there
            before, holding.pin = holding.pin, self.pool.pin(holding.slots[at])
            self.pool.unpin(before)
            holding.published += 1

    def let_go(self, holding: Holding) -> None:
        self.pool.abort(holding.slots[holding.published :])
        self.pool.unpin(holding.pin)

    def stage(self, name: object, widths: Sequence[int]) -> tuple[int, list[tuple[int, ...]]] | None:
        """A node with blocks to load pieces into: under a name of its own it shares them with no checkpoint."""
        try:
            [node] = self.pool.allocate(0, needs=[PieceNeed((name, at), width) for at, width in enumerate(widths)])
        except PoolExhausted:
            return None
        return node, self.pool.checkpoints.pieces(node)

    # Events, and what a test looks at

    def bad(self, slot: int) -> None:
        self.pool.withdraw(slot)

    def reset(self) -> None:
        self.pool.reset()

    def cached(self) -> Iterator[tuple[int, bytes]]:
        for slot in range(self.pool.capacity):
            key = self.pool.key(slot)
            if key is not None:
                yield slot, key

    def is_free(self, slot: int) -> bool:
        return not self.pool.is_pinned(slot) and self.pool.key(slot) is not None

    def check_valid(self) -> None:
        self.pool.check_valid()
