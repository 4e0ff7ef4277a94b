"""ATOM's BlockPool, and the one file that names what it is made of.

    in use     ref_count > 0, in `_used`
    waits      ref_count == 0, in `_free`; handed out first are those of `_vacant`, without a hash, the lowest number
               first; then those of `_cached`, in the order in which they were freed; then those of `_protected`: by its
               policy `slru` ATOM keeps apart what was used again, blocks that are in `_reused` when they are freed
    held       a hold adds a reference: ATOM then changes neither the block nor its hash
    unit       reserved for the state of a request, with an owner; it waits nowhere (states.py)

A held block that waited keeps its entry in its queue. ATOM skips entries of blocks that are not free, and drops those
that it meets at the front. So held blocks come back to where they waited, or to the front if all before them is gone.

ATOM promises none of it. `touched.py` checks at start that a pool has these names, and that it is ordered like this.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heappop
from itertools import chain, dropwhile
from typing import Any, NamedTuple

from cpu_prefix_cache.deciding import FRONT, Places

NO_HASH = -1  # ATOM's

POOL = (
    "_cached",
    "_free",
    "_raw_unit_owner",
    "_used",
    "_vacant",
    "blocks",
    "num_blocks",
    "num_free",
    "allocate",
    "block",
    "claim",
    "free",
    "is_used",
    "pop",
    "publish",
    "release_units",
    "reserve_units",
)
BLOCK = ("hash", "ref_count", "token_ids")
QUEUES = ("_cached", "_protected")  # the blocks of the first are handed out first
REUSED = "_reused"
# What the pool of ffdf3bb5d and that of its second queue consist of, beside numbers.
KNOWN_PARTS = {*POOL, *QUEUES, REUSED, "_hash_to_block_id", "_on_evict", "cache_policy"}

Place = tuple[int, bytes | None]  # a block, and the key of what it holds there


class Hold(NamedTuple):
    in_use: list[int]  # blocks, the deepest chunk first
    waited: list[tuple[Places, Place]]
    reused: set[int]  # of those that waited, by ATOM's word
    parent: Sequence[int]


class _Queue(NamedTuple):
    """Waiting blocks with a hash, in the order in which they are handed out; and the places of those held."""

    blocks: OrderedDict[int, None]  # ATOM's
    places: Places


class PoolView:
    """Blocks by their numbers; those that wait in the order in which ATOM hands them out; and holds on blocks.

    `key` is of what a block holds: it tells where a block waits from a later wait of it with other contents.
    """

    def __init__(self, pool: Any, key: Callable[[int], bytes | None]) -> None:
        self._pool = pool
        self._key = key
        self._queues = [_Queue(vars(pool)[name], Places(self._is_place)) for name in QUEUES if name in vars(pool)]
        self._reused: set[int] = vars(pool).get(REUSED, set())

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_blocks)

    @property
    def num_waiting(self) -> int:
        return int(self._pool.num_free)

    # One block

    def hash(self, block: int) -> int:
        return int(self._pool.block(block).hash)

    def holds(self, block: int, tokens: Sequence[int]) -> bool:
        """Whether this block has a hash, and by ATOM's word holds these tokens."""
        contents = self._pool.block(block)
        return bool(contents.hash != NO_HASH and contents.token_ids == tokens)

    def is_waiting(self, block: int) -> bool:
        return block in self._pool._free

    def claim(self, block: int) -> None:
        self._pool.claim(block)

    def free(self, block: int) -> None:
        self._pool.free(block)

    # The order

    def in_eviction_order(self) -> Iterator[int]:
        return chain(self._vacant(), self._waiting(chain.from_iterable(queue.blocks for queue in self._queues)))

    def evicted_after(self, block: int) -> Iterator[int]:
        """An OrderedDict has no cursor: it is passed over up to the block, and those without a hash are not sorted."""
        behind = dropwhile(lambda queue: block not in queue.blocks, self._queues)
        order = chain.from_iterable(queue.blocks for queue in behind)
        if block not in order:  # reads up to it
            return self.in_eviction_order()
        return self._waiting(order)

    def _waiting(self, queued: Iterable[int]) -> Iterator[int]:
        return (block for block in queued if block in self._pool._free)

    def _vacant(self) -> Iterator[int]:
        """The waiting blocks without a hash. ATOM's heap also has blocks that wait no longer, or have got a hash."""
        heap, last = self._pool._vacant.copy(), None
        while heap:
            block = heappop(heap)
            if block != last and self.is_waiting(block) and self.hash(block) == NO_HASH:
                yield block
            last = block

    def on_reuse(self, call: Callable[[int], None]) -> None:
        """Have blocks passed right before they are handed out."""
        allocate = self._pool.allocate

        def calling(block: int) -> Any:
            call(block)
            return allocate(block)

        self._pool.allocate = calling

    # Holds

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Hold:
        waited = list(self._leave({block for block in blocks if not self._pool.is_used(block)}))
        places = {block for _, (block, _) in waited}
        for block in blocks:  # not by `claim`, which drops the entry in the queue, and counts as a use
            self._pool.block(block).ref_count += 1
            self._pool._free.discard(block)
            self._pool._used.add(block)
        in_use = [block for block in reversed(blocks) if block not in places]
        return Hold(in_use, waited, self._reused & places, parent)

    def _leave(self, left: set[int]) -> Iterator[tuple[Places, Place]]:
        """The places of blocks that will be held, front first. Each waits behind one that will not, or at the front."""
        for queue in self._queues:
            here = left.intersection(queue.blocks)
            before: Hashable = FRONT
            for block in queue.blocks if here else ():
                if not self.is_waiting(block):
                    continue
                place = block, self._key(block)
                if block not in here:
                    before = place
                    continue
                queue.places.leave(place, before)
                yield queue.places, place
                here.remove(block)
                if not here:
                    break

    def release(self, hold: Hold) -> None:
        last, dropped = list(hold.in_use), []
        for places, place in hold.waited:
            block = place[0]
            if self._was_used(place, hold):
                places.forget(place)
                for queue in self._queues:
                    queue.blocks.pop(block, None)
                last.append(block)
                continue
            behind = places.back(place)
            self._pool.block(block).ref_count = 0
            self._pool._used.remove(block)
            self._pool._free.add(block)
            if not any(block in queue.blocks for queue in self._queues):
                dropped.append((block, behind[0] if isinstance(behind, tuple) else None))
        for queue in self._queues:
            _put_back(queue.blocks, [each for each in dropped if self._queue_of(each[0]) is queue])
        for block in last:
            self._pool.free(block)
        self._put_before(hold.parent, set(last))

    def _queue_of(self, block: int) -> _Queue:
        """Where ATOM puts this block when it is freed."""
        return self._queues[-1 if block in self._reused else 0]

    def _was_used(self, place: Place, hold: Hold) -> bool:
        """Whether a held block is used, or was used or written anew, since the hold began."""
        block, key = place
        is_used_again = block in self._reused and block not in hold.reused
        return self._pool.block(block).ref_count > 1 or is_used_again or self._key(block) != key

    def _put_before(self, parent: Iterable[int], freed: set[int]) -> None:
        """Blocks that were freed to the end of a queue now wait right before their parent, if it waits there."""
        for queue in (queue.blocks for queue in self._queues):
            after = next((block for block in parent if block in queue and self.is_waiting(block)), None)
            if after is None or freed.isdisjoint(queue):
                continue
            tail: list[int] = []
            for block in reversed(queue):
                if block not in freed:
                    tail.append(block)
                if block == after:
                    break
            for block in reversed(tail):
                queue.move_to_end(block)

    def _is_place(self, place: Hashable) -> bool:
        return isinstance(place, tuple) and self.is_waiting(place[0]) and self._key(place[0]) == place[1]


def _put_back(queue: OrderedDict[int, None], blocks: Sequence[tuple[int, int | None]]) -> None:
    """Each of these blocks waits right behind another, if that waits in this queue, or at its front."""
    queue.update((block, None) for block, _ in blocks)
    followers: dict[int | None, list[int]] = {}  # block, or None for the front -> those that wait right behind it
    for block, behind in blocks:
        followers.setdefault(behind if behind in queue else None, []).insert(0, block)
    left = len(blocks)
    order = [*_with_followers(None, followers)]
    left -= len(order)
    for block in queue if left else ():
        found = _with_followers(block, followers)
        order += (block, *found)
        left -= len(found)
        if not left:
            break
    for block in reversed(order):
        queue.move_to_end(block, last=False)


def _with_followers(block: int | None, followers: dict[int | None, list[int]]) -> list[int]:
    """All blocks that are to wait right behind this one: its followers, each with its own."""
    found: list[int] = []
    todo = list(reversed(followers.get(block, ())))
    while todo:
        found.append(todo.pop())
        todo += reversed(followers.get(found[-1], ()))
    return found


class Units:
    """Blocks that are reserved for states, each state with an owner: `(kind, number)`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def is_unit(self, block: int) -> bool:
        return block in self._pool._raw_unit_owner

    def owner(self, unit: int) -> tuple[str, int]:
        owner: tuple[str, int] = self._pool._raw_unit_owner[unit][0]
        return owner

    def reserve(self, count: int, owner: tuple[str, int]) -> tuple[int, ...]:
        return tuple(self._pool.reserve_units(count, owner))

    def give_back(self, units: Sequence[int], owner: tuple[str, int]) -> None:
        self._pool.release_units(units, owner)

    def hold(self, unit: int) -> None:
        self._pool.claim(unit)

    def release(self, block: int) -> None:
        """The end of a hold, of what is a unit or has been one."""
        if self.is_unit(block):
            self._pool.block(block).ref_count -= 1  # `free` refuses what is reserved
        else:
            self._pool.free(block)

    def hash(self, block: int) -> int:
        return int(self._pool.block(block).hash)
