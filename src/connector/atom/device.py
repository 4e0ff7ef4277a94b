"""ATOM's BlockPool as a `Device`.

    in use     ref_count > 0, in `_used`
    waits      ref_count == 0, in `_free`; handed out first are those of `_vacant`, without a hash, the lowest number
               first; then those of `_cached`, in the order in which they were freed; then those of `_protected`: by its
               policy `slru` ATOM keeps apart what was used again, blocks that are in `_reused` when they are freed
    held       a hold adds a reference: ATOM then changes neither the block nor its hash

A block has a hash from when its tokens are computed, or loaded, until it is handed out again. ATOM's hash has 64 bits
and our keys at least 128, so what each block holds is remembered here under both: `remember` is told of a block and its
key, and the key counts for as long as the block keeps the hash that it had then.

A held block that waited keeps its entry in its queue. ATOM skips entries of blocks that are not free, and drops those
that it meets at the front. So held blocks come back to where they waited, or to the front if all before them is gone.

`touched.py` checks at start that ATOM's pool is as described here. Where its order is not known, `UnorderedDevice`
holds blocks by ATOM's public methods, which is enough for eager offload.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop
from itertools import chain, dropwhile
from typing import Any, NamedTuple

from cpu_prefix_cache import Device, MisuseError
from cpu_prefix_cache.offload.places import FRONT, Places
from cpu_prefix_cache.pool.notes import Notes

NO_HASH = -1  # ATOM's

QUEUES = ("_cached", "_protected")  # the blocks of the first are handed out first
REUSED = "_reused"

Place = tuple[int, bytes | None]  # a block, and the key of what it holds there


class _Hold(NamedTuple):
    in_use: list[int]  # blocks, the deepest chunk first
    waited: list[tuple[Places, Place]]
    reused: set[int]  # of those that waited, by ATOM's word
    parent: Sequence[int]


class _Queue(NamedTuple):
    """Waiting blocks with a hash, in the order in which they are handed out; and the places of those held."""

    blocks: OrderedDict[int, None]  # ATOM's
    places: Places


class AtomDevice(Device):
    """The blocks of one BlockPool. One block is one chunk."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._queues = [_Queue(vars(pool)[name], Places(self._is_place)) for name in QUEUES if name in vars(pool)]
        self._reused: set[int] = vars(pool).get(REUSED, set())
        self._held: dict[int, tuple[int, bytes]] = {}  # block -> ATOM's hash of its contents, and our key
        self._block_of: dict[bytes, int] = {}
        self._notes = Notes(self.num_blocks)

    def holds(self, block: int, tokens: Sequence[int]) -> bool:
        """Whether this block has a hash, and by ATOM's word holds these tokens."""
        contents = self._pool.block(block)
        return bool(contents.hash != NO_HASH and contents.token_ids == tokens)

    def is_settled(self, seq: Any, block: int) -> bool:
        """Whether it is decided what the device keeps of this request at the end of this block."""
        return True

    def remember(self, block: int, key: bytes) -> None:
        """This block has a hash and holds the chunk with this key."""
        before = self._held.get(block)
        if before is not None and self._block_of.get(before[1]) == block:
            del self._block_of[before[1]]
        self._held[block] = self._pool.block(block).hash, key
        if self.block(key) is None:
            self._block_of[key] = block

    def forget_all(self) -> None:
        """After a reset: ATOM leaves their hashes to blocks that are in use, and what they hold is from before."""
        self._held.clear()
        self._block_of.clear()

    def block(self, key: bytes) -> int | None:
        """A block that holds this chunk."""
        block = self._block_of.get(key)
        return block if block is not None and self.key(block) == key else None

    def key(self, block: int) -> bytes | None:
        """The key of the chunk in this block, if it still holds what was remembered."""
        hash, key = self._held.get(block, (NO_HASH, None))
        return key if hash != NO_HASH and self._pool.block(block).hash == hash else None

    @property
    def num_blocks(self) -> int:
        return int(self._pool.num_blocks)

    @property
    def num_waiting(self) -> int:
        return int(self._pool.num_free)

    def find(self, key: bytes) -> Sequence[int] | None:
        block = self.block(key)
        return None if block is None else (block,)

    def soonest_evicted(self) -> Iterator[Place]:
        for block in self._vacant():
            yield block, None
        yield from self._waiting(chain.from_iterable(queue.blocks for queue in self._queues))

    def evicted_after(self, block: int) -> Iterator[Place]:
        """An OrderedDict has no cursor: it is passed over up to the block, and those without a hash are not sorted."""
        behind = dropwhile(lambda queue: block not in queue.blocks, self._queues)
        order = chain.from_iterable(queue.blocks for queue in behind)
        if block not in order:  # reads up to it
            return self.soonest_evicted()
        return self._waiting(order)

    def _waiting(self, queued: Iterable[int]) -> Iterator[Place]:
        return ((block, self.key(block)) for block in queued if block in self._pool._free)

    def _vacant(self) -> Iterator[int]:
        """The waiting blocks without a hash. ATOM's heap also has blocks that wait no longer, or have got a hash."""
        heap, last = self._pool._vacant.copy(), None
        while heap:
            block = heappop(heap)
            if block != last and block in self._pool._free and self._pool.block(block).hash == NO_HASH:
                yield block
            last = block

    def handed_out(self) -> Mapping[bytes, Sequence[int]]:
        if not self._notes.are_taken:
            self._note_from_now_on()
        return self._notes.take(self.find_all)

    def _note_from_now_on(self) -> None:
        allocate = self._pool.allocate

        def noting(block: int) -> Any:
            if (key := self.key(block)) is not None and self.block(key) == block:
                self._notes.add(key, (block,))
            self._held.pop(block, None)  # or it counts again when the block gets the same hash again
            return allocate(block)

        self._pool.allocate = noting

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        return block in self._pool._free and self.key(block) == key

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Any:
        waited = list(self._leave({block for block in blocks if not self._pool.is_used(block)}))
        places = {block for _, (block, _) in waited}
        for block in blocks:  # not by `claim`, which drops the entry in the queue, and counts as a use
            self._pool.block(block).ref_count += 1
            self._pool._free.discard(block)
            self._pool._used.add(block)
        in_use = [block for block in reversed(blocks) if block not in places]
        return _Hold(in_use, waited, self._reused & places, parent)

    def _leave(self, left: set[int]) -> Iterator[tuple[Places, Place]]:
        """The places of blocks that will be held, front first. Each waits behind one that will not, or at the front."""
        for queue in self._queues:
            here = left.intersection(queue.blocks)
            before: Hashable = FRONT
            for block in queue.blocks if here else ():
                if block not in self._pool._free:
                    continue
                place = block, self.key(block)
                if block not in here:
                    before = place
                    continue
                queue.places.leave(place, before)
                yield queue.places, place
                here.remove(block)
                if not here:
                    break

    def release(self, hold: Any) -> None:
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

    def _was_used(self, place: Place, hold: _Hold) -> bool:
        """Whether a held block is used, or was used or written anew, since the hold began."""
        block, key = place
        is_used_again = block in self._reused and block not in hold.reused
        return self._pool.block(block).ref_count > 1 or is_used_again or self.key(block) != key

    def _put_before(self, parent: Iterable[int], freed: set[int]) -> None:
        """Blocks that were freed to the end of a queue now wait right before their parent, if it waits there."""
        for queue in (queue.blocks for queue in self._queues):
            after = next((block for block in parent if block in queue and block in self._pool._free), None)
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
        return isinstance(place, tuple) and self.is_waiting(*place)


class UnorderedDevice(AtomDevice):
    """A pool of which it is not known what it hands out next, so blocks that were held become the last in the order.

    Its order is not to be asked for.
    """

    def soonest_evicted(self) -> Iterator[Place]:
        raise MisuseError("the order in which ATOM hands out these blocks is not known")

    def evicted_after(self, block: int) -> Iterator[Place]:
        return self.soonest_evicted()

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Any:
        for block in blocks:
            self._pool.claim(block)
        return list(blocks)

    def release(self, hold: Any) -> None:
        for block in reversed(hold):
            self._pool.free(block)


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
