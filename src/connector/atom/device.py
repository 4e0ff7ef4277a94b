"""ATOM's BlockPool as a `Device`.

A block has a hash from when its tokens are computed, or loaded, until it is handed out again. ATOM's hash has 64 bits
and our keys at least 128, so the contents of each block are remembered here under both: `remember` takes a block and
its key, and the key counts for as long as the block keeps the hash that it had then.

Where blocks wait, and how they are held, is in `pool_view.py`. Where the pool's order is not known (`touched.py`),
`UnorderedDevice` holds blocks by ATOM's public methods, which is enough for eager offload.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from connector.atom.pool_view import NO_HASH, Place, PoolView
from cpu_prefix_cache import Device, MisuseError
from cpu_prefix_cache.deciding import Notes


class AtomDevice(Device):
    """The blocks of one BlockPool. One block is one chunk."""

    def __init__(self, pool: Any) -> None:
        self._pool = PoolView(pool, self.key)
        self._held: dict[int, tuple[int, bytes]] = {}  # block -> ATOM's hash of its contents, and our key
        self._block_of: dict[bytes, int] = {}
        self._notes = Notes(self.num_blocks)

    def holds(self, block: int, tokens: Sequence[int]) -> bool:
        """Whether this block has a hash, and by ATOM's word holds these tokens."""
        return self._pool.holds(block, tokens)

    def is_settled(self, seq: Any, block: int) -> bool:
        """Whether it is decided what the device keeps of this request at the end of this block."""
        return True

    def remember(self, block: int, key: bytes) -> None:
        """This block has a hash and holds the chunk with this key."""
        before = self._held.get(block)
        if before is not None and self._block_of.get(before[1]) == block:
            del self._block_of[before[1]]
        self._held[block] = self._pool.hash(block), key
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
        return key if hash != NO_HASH and self._pool.hash(block) == hash else None

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_waiting(self) -> int:
        return self._pool.num_waiting

    def find(self, key: bytes) -> Sequence[int] | None:
        block = self.block(key)
        return None if block is None else (block,)

    def soonest_evicted(self) -> Iterator[Place]:
        return ((block, self.key(block)) for block in self._pool.in_eviction_order())

    def evicted_after(self, block: int) -> Iterator[Place]:
        return ((behind, self.key(behind)) for behind in self._pool.evicted_after(block))

    def handed_out(self) -> Mapping[bytes, Sequence[int]]:
        if not self._notes.are_taken:
            self._pool.on_reuse(self._note)
        return self._notes.take(self.find_all)

    def _note(self, block: int) -> None:
        """This block is handed out."""
        if (key := self.key(block)) is not None and self.block(key) == block:
            self._notes.add(key, (block,))
        self._held.pop(block, None)  # or it counts again when the block gets the same hash again

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        return self._pool.is_waiting(block) and self.key(block) == key

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Any:
        return self._pool.hold(blocks, parent)

    def release(self, hold: Any) -> None:
        self._pool.release(hold)


class UnorderedDevice(AtomDevice):
    """A pool of which it is not known what it hands out next, so blocks that were held become the last in the order.

    Its order must not be read.
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
