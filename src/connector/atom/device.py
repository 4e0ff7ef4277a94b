"""ATOM's BlockPool as a `Device`.

    in use     ref_count > 0, in `_used`
    waits      ref_count == 0, in `_free`; handed out first are those of `_vacant`, without a hash, the lowest number
               first; then those of `_cached`, in the order in which they were freed
    held       a hold adds a reference, by `claim`: ATOM then changes neither the block nor its hash

A block has a hash from when its tokens are computed, or loaded, until it is handed out again. ATOM's hash has 64 bits
and our keys at least 128, so what each block holds is remembered here under both: `remember` is told of a block and its
key, and the key counts for as long as the block keeps the hash that it had then.

Held blocks come back to where they waited. ATOM frees a block to the end of `_cached`, so those before it are moved to
the front again, in one pass over them: lazy offload holds what is next to be handed out, near the front.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from heapq import heappop
from typing import Any, NamedTuple

from cpu_prefix_cache import Device
from cpu_prefix_cache.offload.places import FRONT, Places

NO_HASH = -1  # ATOM's

Place = tuple[int, bytes | None]  # a block, and the key of what it holds there


class _Hold(NamedTuple):
    in_use: list[int]  # blocks, the deepest chunk first
    waited: list[Place]
    parent: Sequence[int]


class AtomDevice(Device):
    """The blocks of one BlockPool. One block is one chunk."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: dict[int, tuple[int, bytes]] = {}  # block -> ATOM's hash of its contents, and our key
        self._block_of: dict[bytes, int] = {}
        self._places = Places(self._is_place)

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
        for block in self._pool._cached:
            yield block, self.key(block)

    def _vacant(self) -> Iterator[int]:
        """The waiting blocks without a hash. ATOM's heap also has blocks that wait no longer, or have got a hash."""
        heap, last = self._pool._vacant.copy(), None
        while heap:
            block = heappop(heap)
            if block != last and block in self._pool._free and self._pool.block(block).hash == NO_HASH:
                yield block
            last = block

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        return block in self._pool._free and self.key(block) == key

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> _Hold:
        waited = list(self._leave({block for block in blocks if not self._pool.is_used(block)}))
        places = {block for block, _ in waited}
        for block in blocks:
            self._pool.claim(block)
        return _Hold([block for block in reversed(blocks) if block not in places], waited, parent)

    def _leave(self, left: set[int]) -> Iterator[Place]:
        """The places of blocks that will be held, front first. Each waits behind one that will not, or at the front."""
        before: Hashable = FRONT
        for block in self._pool._cached if left else ():
            place = block, self.key(block)
            if block not in left:
                before = place
                continue
            self._places.leave(place, before)
            yield place
            left.remove(block)
            if not left:
                return

    def release(self, hold: _Hold) -> None:
        last = list(hold.in_use)
        followers: dict[int | None, list[int]] = {}  # block, or None for the front -> those that wait right behind it
        for place in hold.waited:
            block = place[0]
            if self._pool.block(block).ref_count > 1 or self.key(block) != place[1]:  # used or written anew meanwhile
                self._places.forget(place)
                last.append(block)
                continue
            behind = self._places.back(place)
            self._pool.free(block)
            followers.setdefault(behind[0] if isinstance(behind, tuple) else None, []).insert(0, block)
        self._put_behind(followers)
        for block in last:
            self._pool.free(block)
        self._put_before(hold.parent, set(last))

    def _put_behind(self, followers: dict[int | None, list[int]]) -> None:
        """Blocks that were freed to the end of `_cached` now wait behind others."""
        cached = self._pool._cached
        left = sum(map(len, followers.values()))
        order = [*_with_followers(None, followers)]
        left -= len(order)
        for block in cached if left else ():
            found = _with_followers(block, followers)
            order += (block, *found)
            left -= len(found)
            if not left:
                break
        for block in reversed(order):
            cached.move_to_end(block, last=False)

    def _put_before(self, parent: Iterable[int], freed: set[int]) -> None:
        """Blocks that were freed to the end of `_cached` now wait right before their parent, if it waits."""
        cached = self._pool._cached
        after = next((block for block in parent if block in cached), None)
        if after is None or not any(block in cached for block in freed):
            return
        tail: list[int] = []
        for block in reversed(cached):
            if block not in freed:
                tail.append(block)
            if block == after:
                break
        for block in reversed(tail):
            cached.move_to_end(block)

    def _is_place(self, place: Hashable) -> bool:
        return isinstance(place, tuple) and self.is_waiting(*place)


def _with_followers(block: int | None, followers: dict[int | None, list[int]]) -> list[int]:
    """All blocks that are to wait right behind this one: its followers, each with its own."""
    found: list[int] = []
    todo = list(reversed(followers.get(block, ())))
    while todo:
        found.append(todo.pop())
        todo += reversed(followers.get(found[-1], ()))
    return found
