"""`QueueSlots`: a queue of free blocks like vLLM's, beside the pool of `cpu_prefix_cache.testing` and in its words.

It has reference counts, a null block, keys that outlive their use, the same key in two places, and several blocks to a
chunk. It shares no code with the devices of the library.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cpu_prefix_cache.testing.slots import Holding


@dataclass
class QueueSlots:
    """Also the `Device` itself: block ids count from 1, `width` to a slot; block 0 is the null block.

    What the cache holds keeps its place in `order`, and is passed over: the slow way to come back there.

    An `unwritten` slot has its key before its bytes. It is not found (rule 11) if the cache may know the
    chunk from another request; a chunk that nobody has computed is found, and the cache must not store it.
    """

    slots: int
    width: int = 1
    references: dict[int, int] = field(default_factory=dict)  # block -> how many hold it
    keys: dict[int, bytes] = field(default_factory=dict)  # slot -> key
    order: OrderedDict[int, bool] = field(default_factory=OrderedDict)  # slots, next to be used first: who waits
    calls: int = 0
    null_block: int | None = 0
    num_promised = 0
    frees_after_use = False
    unwritten: set[int] = field(default_factory=set)
    computed: set[bytes] = field(default_factory=set)  # keys of chunks that had their bytes somewhere
    noted: dict[bytes, Sequence[int]] | None = None  # what was handed out, if that is noted

    def __post_init__(self) -> None:
        self.order.update(dict.fromkeys(range(self.slots), True))
        self.places: dict[bytes, list[int]] = {}

    @property
    def device(self) -> "QueueSlots":
        return self

    @property
    def waiting(self) -> list[int]:
        """Slots in the order in which they are used next."""
        return [slot for slot, waits in self.order.items() if waits]

    # called by the cache

    @property
    def blocks_per_chunk(self) -> int:
        return self.width

    @property
    def num_blocks(self) -> int:
        return self.slots * self.width

    @property
    def num_waiting(self) -> int:
        self.calls += 1
        return sum(self.order.values()) * self.width

    def find(self, key: bytes) -> Sequence[int] | None:
        self.calls += 1
        hidden = self.unwritten if key in self.computed else ()
        return next((self.blocks_of(slot) for slot in self.places.get(key, ()) if slot not in hidden), None)

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        return [self.find(key) for key in keys]

    def soonest_evicted(self) -> Iterator[tuple[int, bytes | None]]:
        """The first block of a slot brings the key."""
        self.calls += 1
        for slot in self.waiting:
            for at, block in enumerate(self.blocks_of(slot)):
                self.calls += 1
                yield block, None if at else self.keys.get(slot)

    def evicted_after(self, block: int) -> Iterator[tuple[int, bytes | None]]:
        order = self.soonest_evicted()
        if block not in (each for each, _ in order):
            raise AssertionError(f"block {block} does not wait")
        return order

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        self.calls += 1
        slot, at = divmod(block - 1, self.width)
        return self.order.get(slot, False) and key == (None if at else self.keys.get(slot))

    def handed_out(self) -> Mapping[bytes, Sequence[int]] | None:
        if self.noted is None:
            return None
        noted, self.noted = self.noted, {}
        return {key: blocks for key, blocks in noted.items() if self.find(key) is None}

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> tuple[Sequence[int], Sequence[int]]:
        self.calls += 1
        self._use(blocks)
        for block in blocks:
            if (block - 1) // self.width in self.order:
                self.order[(block - 1) // self.width] = False
        return blocks, parent

    def release(self, hold: tuple[Sequence[int], Sequence[int]]) -> None:
        """The slots that were in use at the end, or before their parent: the order is put together anew."""
        blocks, parent = hold
        last = self._release(blocks[::-1])
        at = next(((block - 1) // self.width for block in parent if (block - 1) // self.width in self.order), None)
        if at is not None and self.order[at]:
            rest = [(slot, waits) for slot, waits in self.order.items() if slot not in last]
            here = [slot for slot, _ in rest].index(at)
            self.order = OrderedDict([*rest[:here], *((slot, True) for slot in last), *rest[here:]])

    # called by the engine

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        return tuple(range(slot * self.width + 1, (slot + 1) * self.width + 1))

    def match(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.places), len(keys))

    def take(self, keys: Sequence[bytes], matched: int, total: int) -> Holding | None:
        found = [self.places[key][0] for key in keys[:matched]]
        free = [slot for slot in self.waiting if slot not in found]
        if len(free) < total - matched:
            return None
        new = free[: total - matched]
        for slot in found + new:
            self.order.pop(slot, None)
            self._use(self.blocks_of(slot))
        for slot in new:
            if self.noted is not None and slot in self.keys:
                self.noted[self.keys[slot]] = self.blocks_of(slot)
            self._forget(slot)
        return Holding(found + new, matched)

    def publish_early(self, holding: Holding, keys: Sequence[bytes], chunks: int) -> None:
        """Give the slots keys whose bytes will be written in this step."""
        self.unwritten.update(holding.slots[holding.published : chunks])
        self._name(holding, keys, chunks)

    def publish(self, holding: Holding, keys: Sequence[bytes], chunks: int) -> None:
        self._name(holding, keys, chunks)
        self.unwritten.difference_update(holding.slots[:chunks])
        self.computed.update(keys[:chunks])

    def _name(self, holding: Holding, keys: Sequence[bytes], chunks: int) -> None:
        for slot, key in list(zip(holding.slots, keys, strict=False))[holding.published : chunks]:
            self.keys[slot] = key
            self.places.setdefault(key, []).append(slot)
        holding.published = max(holding.published, chunks)

    def let_go(self, holding: Holding) -> None:
        self.unwritten.difference_update(holding.slots)
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
        return self.order.get(slot, False)

    def check_valid(self) -> None:
        for slot in range(self.slots):
            in_use = any(self.references.get(block) for block in self.blocks_of(slot))
            assert in_use != self.order.get(slot, False), f"slot {slot}"

    def _forget(self, slot: int) -> None:
        key = self.keys.pop(slot, None)
        if key is not None:
            self.places[key].remove(slot)
            if not self.places[key]:
                del self.places[key]

    def _use(self, blocks: Sequence[int]) -> None:
        assert self.null_block not in blocks
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1

    def _release(self, blocks: Sequence[int]) -> list[int]:
        """The slots that wait now and had no place of their own."""
        self.calls += 1
        slots = []
        for block in blocks:
            assert self.references[block] > 0, f"block {block} is released more often than held"
            self.references[block] -= 1
            slots.append((block - 1) // self.width)
        last = []
        for slot in dict.fromkeys(slots):
            if any(self.references.get(block) for block in self.blocks_of(slot)):
                continue
            if slot not in self.order:
                last.append(slot)
            self.order[slot] = True
        return last
