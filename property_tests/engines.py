"""Two small devices for the machine, spoken to in the same words, and the bytes of the device and of every rank.

`PoolSlots` is a device pool that is our own BlockPool. `QueueSlots` is a queue of free blocks like vLLM's: reference
counts, a null block, keys that outlive their use, the same key in two places, and several blocks to a chunk.

A *slot* is where one chunk lives on the device; `blocks_of(slot)` are its device blocks.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cpu_prefix_cache import BlockPool, HybridChunkPlanner, KVCacheCoordinator, PooledDevice, PoolExhausted, State
from cpu_prefix_cache.pool.coordinator import new_pool
from cpu_prefix_cache.pool.shared_pieces import PieceNeed


@dataclass
class Holding:
    """The slots of one request, in token order; `published` of them can be found by key."""

    slots: list[int]
    published: int
    touch: Any = None
    pin: Any = None


class PoolSlots:
    null_block = None

    def __init__(self, slots: int, policy: str = "lru") -> None:
        self.pool = BlockPool(slots, policy)
        self.device = PooledDevice(self.pool)
        self.now = 0.0

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        return (slot,)

    def match(self, keys: Sequence[bytes]) -> int:
        return self.pool.resident_run(keys, 0, len(keys))

    def take(self, keys: Sequence[bytes], matched: int, total: int) -> Holding | None:
        deepest = self.pool.find(keys[matched - 1]) if matched else None
        pin = None if deepest is None else self.pool.pin(deepest)
        try:
            new = self.pool.allocate(total - matched)
        except PoolExhausted:
            if pin is not None:
                self.pool.unpin(pin)
            return None
        path = [] if deepest is None else self.pool.path(deepest, matched)
        self.now += 1.0
        return Holding(path + new, matched, self.pool.touch(deepest, keys, self.now), pin)

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
            if before is not None:
                self.pool.unpin(before)
            holding.published += 1

    def let_go(self, holding: Holding) -> None:
        self.pool.abort(holding.slots[holding.published :])
        if holding.pin is not None:
            self.pool.unpin(holding.pin)

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


class WideDevice(PooledDevice):
    """A PooledDevice whose chunks may take several blocks: one hold on the first of them is enough."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.num_chunks = pool.capacity
        self.null_block = None

    def hold(self, blocks: Sequence[int]) -> Any:
        rest = {each for first in self._pool._rest for each in self._pool._rest[first]}
        return self._pool.pin(*(block for block in blocks if block not in rest))


class HybridSlots(PoolSlots):
    """A device pool of chunks and checkpoints. A request reads windows and states from memory of its own."""

    def __init__(self, planner: HybridChunkPlanner, blocks: int) -> None:
        self.pool = new_pool(planner, blocks, on_device=True)
        self.coordinator = KVCacheCoordinator(planner, self.pool, on_device=True)
        self._last: dict[int, tuple[int, ...]] = {}
        self.now = 0.0
        self.device = PooledDevice(self.pool) if planner.device_blocks_per_chunk <= 1 else WideDevice(self.pool)

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        """Also of a slot that was freed this moment, whose bytes somebody looks at once more."""
        if slot not in self._last or self.pool.state(slot) is not State.FREE:
            self._last[slot] = self.pool.blocks_of([slot])
        return self._last[slot]

    def take(self, keys: Sequence[bytes], matched: int, total: int) -> Holding | None:
        holding = super().take(keys, matched, total)
        if holding is not None:
            holding.touch = self.pool.touch(self.coordinator.resume_node(keys, matched) if matched else None)
        return holding

    def stage(self, name: str, widths: Sequence[int]) -> tuple[int, list[tuple[int, ...]]] | None:
        """Blocks to load pieces into: under a name of their own they are shared with no checkpoint."""
        try:
            node = self.pool.allocate_checkpoint([PieceNeed((name, at), width) for at, width in enumerate(widths)]).node
        except PoolExhausted:
            return None
        return node, self.pool.pieces(node)


@dataclass
class QueueSlots:
    """Also the `Device` itself: block ids count from 1, `width` to a slot; block 0 is the null block."""

    slots: int
    width: int = 1
    references: dict[int, int] = field(default_factory=dict)  # block -> how many hold it
    keys: dict[int, bytes] = field(default_factory=dict)  # slot -> key
    queue: OrderedDict[int, None] = field(default_factory=OrderedDict)  # free slots, next to be used first
    calls: int = 0
    null_block: int | None = 0

    def __post_init__(self) -> None:
        self.queue.update(dict.fromkeys(range(self.slots)))
        self.places: dict[bytes, list[int]] = {}
        self.released_as: list[str] = []  # how the cache gave back what it held

    @property
    def device(self) -> "QueueSlots":
        return self

    @property
    def num_chunks(self) -> int:
        return self.slots

    # what the cache calls

    def find(self, key: bytes) -> Sequence[int] | None:
        self.calls += 1
        return self.blocks_of(self.places[key][0]) if key in self.places else None

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        return [self.find(key) for key in keys]

    def soonest_evicted(self, after: int | None) -> Iterator[tuple[int, bytes | None]]:
        self.calls += 1
        order = iter(list(self.queue))
        if after is not None:
            for slot in order:
                if self.blocks_of(slot)[0] == after:
                    break
        for slot in order:
            yield self.blocks_of(slot)[0], self.keys.get(slot)

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        self.calls += 1
        slot = (block - 1) // self.width
        return slot in self.queue and self.keys.get(slot) == key

    def are_waiting(self, blocks: Sequence[int]) -> list[bool]:
        self.calls += 1
        return [(block - 1) // self.width in self.queue for block in blocks]

    def has_waiting(self, blocks: int) -> bool:
        self.calls += 1
        return len(self.queue) * self.width >= blocks

    def hold(self, blocks: Sequence[int]) -> list[int]:
        self.calls += 1
        assert self.null_block not in blocks
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1
            self.queue.pop((block - 1) // self.width, None)
        return list(blocks)

    def release(self, hold: list[int], before: int | None) -> None:
        if before is None:
            self._release(hold[::-1])
        else:
            self._release_at(hold, list(self.queue).index((before - 1) // self.width))
        self.released_as += ["end"] * len(hold)

    def release_in_place(self, hold: list[int], behind: int | None) -> None:
        free = list(self.queue)
        at = 0 if behind is None else free.index((behind - 1) // self.width) + 1
        while at < len(free) and free[at] not in self.keys:
            at += 1
        self._release_at(hold, at)
        self.released_as += ["place"] * len(hold)

    def _release_at(self, hold: list[int], at: int) -> None:
        free = list(self.queue)
        self._release(hold)
        back = [slot for slot in self.queue if slot not in free]
        self.queue = OrderedDict.fromkeys([*free[:at], *reversed(back), *free[at:]])

    # what the engine calls

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        return tuple(range(slot * self.width + 1, (slot + 1) * self.width + 1))

    def match(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.places), len(keys))

    def take(self, keys: Sequence[bytes], matched: int, total: int) -> Holding | None:
        found = [self.places[key][0] for key in keys[:matched]]
        if len(self.queue) - sum(slot in self.queue for slot in found) < total - matched:
            return None
        for slot in found:
            self.hold(self.blocks_of(slot))
        new = [self.queue.popitem(last=False)[0] for _ in range(total - matched)]
        for slot in new:
            self._forget(slot)
            self.hold(self.blocks_of(slot))
        return Holding(found + new, matched)

    def publish(self, holding: Holding, keys: Sequence[bytes], chunks: int) -> None:
        for slot, key in list(zip(holding.slots, keys, strict=False))[holding.published : chunks]:
            self.keys[slot] = key
            self.places.setdefault(key, []).append(slot)
        holding.published = max(holding.published, chunks)

    def let_go(self, holding: Holding) -> None:
        for slot in reversed(holding.slots):
            self._release(list(self.blocks_of(slot)))

    def bad(self, slot: int) -> None:
        self._forget(slot)

    def reset(self) -> None:
        self.keys.clear()
        self.places.clear()

    def cached(self) -> Iterator[tuple[int, bytes]]:
        return iter(list(self.keys.items()))

    def is_free(self, slot: int) -> bool:
        return slot in self.queue

    def check_valid(self) -> None:
        for slot in range(self.slots):
            in_use = any(self.references.get(block) for block in self.blocks_of(slot))
            assert in_use != (slot in self.queue), f"slot {slot}"

    def _forget(self, slot: int) -> None:
        key = self.keys.pop(slot, None)
        if key is not None:
            self.places[key].remove(slot)
            if not self.places[key]:
                del self.places[key]

    def _release(self, hold: list[int]) -> None:
        self.calls += 1
        slots = []
        for block in hold:
            assert self.references[block] > 0, f"block {block} is released more often than held"
            self.references[block] -= 1
            slot = (block - 1) // self.width
            if slot not in slots and slot not in self.queue:
                slots.append(slot)
        for slot in slots:
            if not any(self.references.get(block) for block in self.blocks_of(slot)):
                self.queue[slot] = None
