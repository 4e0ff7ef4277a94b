"""BlockPool: fixed blocks of memory, the chunk each one holds, and who is using it.

A block is always in one of four states (rule 1):

    FREE       waiting for an owner
    WRITING    its owner fills it; nobody finds it
    CACHED     holds a chunk under a key; found by lookup; evicted when childless and unpinned
    RETIRED    its key was withdrawn, or will never come, while somebody still uses the bytes; nobody finds it

and moves between them only here:

    grow       (none) -> FREE         a block becomes ready
    allocate   FREE -> WRITING        evicting CACHED chunks when FREE runs out
    commit     WRITING -> CACHED
    abort      WRITING -> FREE        or RETIRED, until its last pin ends
    retire     WRITING -> RETIRED     its writer goes on, and ends with abort
    withdraw   CACHED -> FREE         or RETIRED, until the last pin on it or below it ends
    unpin      RETIRED -> FREE        with the last pin
    evict      CACHED -> WRITING      inside allocate

What the rest of the library relies on: a pinned block keeps its bytes, and a CACHED one its key (rule 2).

The same class is the host pool of the cache and, in an engine that has none of its own, the device pool.
"""

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cpu_prefix_cache.errors import ConfigurationError, MisuseError, PoolExhausted
from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.forest import NONE, Forest
from cpu_prefix_cache.free_runs import FreeRuns
from cpu_prefix_cache.stats import PoolStatistics


class State(enum.IntEnum):
    FREE = 0
    WRITING = 1
    CACHED = 2
    RETIRED = 3


FREE, WRITING, CACHED, RETIRED = (int(state) for state in State)  # as the bytes that are kept: enums cost time


class Pin:
    """Blocks held in place. Give it back to `BlockPool.unpin`, exactly once (rule 2)."""

    __slots__ = ("blocks", "released")

    def __init__(self, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks
        self.released = False


class BlockPool:
    """`num_blocks` blocks under one eviction order. A chunk takes `blocks_per_chunk` of them and goes by its first.

    `ready` is how many blocks may be used for now, from block 0 up; `grow` raises it (a host region takes seconds to
    prepare). `root` is the parent of every first chunk.

    Raises ConfigurationError for an unknown policy or a pool that holds no chunk.
    """

    def __init__(
        self, num_blocks: int, policy: str = "lru", *, blocks_per_chunk: int = 1, ready: int | None = None
    ) -> None:
        if policy not in POLICIES:
            raise ConfigurationError(f"policy must be one of {', '.join(sorted(POLICIES))}; got {policy!r}")
        if num_blocks < blocks_per_chunk or blocks_per_chunk < 1:
            raise ConfigurationError(
                f"a pool needs at least the {max(1, blocks_per_chunk)} blocks of one chunk, got {num_blocks}"
            )
        self.capacity = num_blocks
        self.blocks_per_chunk = blocks_per_chunk
        self._forest = Forest(num_blocks)
        self._policy = POLICIES[policy](self._forest)
        self.root = self._forest.root
        self._free = FreeRuns()
        self._state = bytearray(num_blocks)
        self._count = [0, 0, 0, 0]  # blocks by State; those not ready yet are in none
        self._ready = 0
        self._evictions = 0
        self._unfinished: set[int] = set()  # RETIRED chunks whose writer is not done
        self._rest: dict[int, list[int]] = {}  # the further blocks of a chunk that takes several
        self.grow(num_blocks if ready is None else ready)

    # Looking: changes nothing (rule 5)

    def find(self, key: bytes) -> int | None:
        """The block that holds the chunk with this key."""
        block = self._forest.find(key)
        return None if block == NONE else block

    def resident_run(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """The end of the run of cached chunks in `keys[start:stop]`. O(log n), because prefixes are closed (rule 3)."""
        return self._forest.resident_run(keys, start, stop)

    def path(self, block: int, length: int) -> list[int]:
        """The blocks of the last `length` chunks of the prefix that ends at `block`, from its beginning on."""
        return self._forest.path(block, length)

    def blocks_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """All the blocks of chunks named by their first ones, chunk after chunk."""
        if self.blocks_per_chunk == 1:
            return tuple(blocks)
        return tuple(each for block in blocks for each in (block, *self._rest[block]))

    def state(self, block: int) -> State:
        return State(self._state[block])

    def key(self, block: int) -> bytes | None:
        return self._forest.key[block]

    def is_pinned(self, block: int) -> bool:
        return self._forest.pins[block] > 0

    def available(self, wanted: int) -> int:
        """How many of `wanted` chunks `allocate` could hand out now."""
        chunks = self.blocks_per_chunk
        free, cached = len(self._free) // chunks, self._count[CACHED] // chunks
        if wanted <= free or wanted <= free + cached - self._forest.pinned_depth:
            return wanted
        return min(wanted, free + cached - self._forest.held())

    def free_blocks(self) -> Iterator[int]:
        """The blocks that are handed out before anything is evicted. Changes nothing."""
        return iter(self._free)

    def soonest_evicted(self) -> Iterator[int]:
        """Cached, unpinned chunks in the order they would leave. Changes nothing."""
        return self._policy.soonest_evicted()

    def statistics(self) -> PoolStatistics:
        _, writing, cached, retired = self._count
        return PoolStatistics(
            capacity=self.capacity,
            ready=self._ready,
            free=len(self._free),
            writing=writing,
            cached=cached,
            retired=retired,
            pinned=len(self._forest.pinned),
            evictions=self._evictions,
        )

    # Using

    def touch(self, deepest: int | None) -> Any:
        """A request uses the prefix that ends at `deepest` (None: nothing). Its touch, to be given to `commit`."""
        return self._policy.admitted(NONE if deepest is None else deepest)

    def pin(self, *blocks: int) -> Pin:
        """Hold `blocks` in place; a chunk's pin holds the prefix above it too. Any state but FREE."""
        for block in blocks:
            if self._state[block] == FREE:
                raise MisuseError(f"block {block} is free and cannot be pinned")
        for block in blocks:
            self._forest.pin(block)
        return Pin(blocks)

    def unpin(self, pin: Pin) -> None:
        """End a pin. Raises MisuseError the second time."""
        if pin.released:
            raise MisuseError(f"the pin on blocks {pin.blocks} was released before")
        pin.released = True
        for block in pin.blocks:
            self._forest.unpin(block)
        self._prune(pin.blocks)

    def allocate(self, count: int, keys: Sequence[bytes] = ()) -> list[int]:
        """`count` chunks to write to, in ascending runs of neighbours, evicting what is needed.

        `keys`: what they will be committed under, in this order, if that is known now. A policy that remembers what
        it evicted learns from it.

        Raises PoolExhausted, and changes nothing, when pins and unfinished stores leave fewer (rule 4).
        """
        if count < 0:
            raise MisuseError(f"cannot allocate {count} chunks")
        if keys and len(keys) != count:
            raise MisuseError(f"{len(keys)} keys were given for {count} chunks")
        per_chunk = self.blocks_per_chunk
        short = count - len(self._free) // per_chunk
        victims: list[int] = []
        if short > 0:
            available = self.available(count)
            if available < count:
                raise PoolExhausted(count, available)
        if short > 0 or keys:
            victims = self._policy.evict(max(short, 0), keys)
        if victims:
            self._evictions += short
            self._count[CACHED] -= short * per_chunk
        blocks = self._free.take((count - len(victims)) * per_chunk)
        if victims:
            blocks += self._dissolve(victims)
            blocks.sort()
        self._count[WRITING] += len(blocks)
        chunks = blocks[::per_chunk]
        state = self._state
        for block in chunks:
            state[block] = WRITING
        if per_chunk > 1:
            self._rest.update(
                (block, blocks[at * per_chunk + 1 : (at + 1) * per_chunk]) for at, block in enumerate(chunks)
            )
        if keys:
            self._policy.announced(chunks)
        return chunks

    def commit(self, blocks: Sequence[int], keys: Sequence[bytes], parent: int, touch: Any) -> None:
        """Make written chunks findable: `blocks[0]` below `parent`, each further one below the one before it.

        Raises MisuseError when a block is not being written, a key is here already, or `parent` is not cached. The
        chunks before the one it fails at are committed then, and the pool is not to be used any more.
        """
        state = self._state
        for block, key in zip(blocks, keys, strict=True):
            if state[block] != WRITING:
                raise MisuseError(f"block {block} is {State(state[block]).name} and cannot be committed")
            self._forest.insert(block, key, parent)
            state[block] = CACHED
            parent = block
        if blocks:
            self._policy.inserted(blocks, touch)
        self._moved(WRITING, CACHED, len(blocks))

    def abort(self, blocks: Sequence[int]) -> None:
        """The writer gives chunks up: they are WRITING, or were until `retire`. Pinned ones are freed at unpin."""
        for block in blocks:
            if self._state[block] != WRITING and block not in self._unfinished:
                raise MisuseError(f"block {block} is {self.state(block).name} and cannot be aborted")
        self.retire([block for block in blocks if self._state[block] == WRITING])
        self._unfinished.difference_update(blocks)
        self._prune(blocks)

    def retire(self, blocks: Sequence[int]) -> None:
        """Decide that chunks being written will never be committed. The writer goes on, and ends with `abort`."""
        for block in blocks:
            if self._state[block] != WRITING:
                raise MisuseError(f"block {block} is {self.state(block).name} and cannot be retired")
            self._state[block] = RETIRED
        self._policy.abandoned(blocks)
        self._unfinished.update(blocks)
        self._moved(WRITING, RETIRED, len(blocks))

    def withdraw(self, block: int) -> None:
        """Take back the key of a cached chunk, and of all that hangs below it (rule 3)."""
        if self._state[block] != CACHED:
            raise MisuseError(f"block {block} is {self.state(block).name} and has no key to withdraw")
        self._withdraw_all(self._forest.subtree(block))

    def reset(self) -> None:
        """Withdraw every key. Never fails; pinned chunks keep their bytes until their pins end."""
        self._withdraw_all(self._forest.subtree(self.root)[1:])

    def grow(self, ready: int) -> None:
        """Make blocks usable up to `ready`. It never shrinks."""
        ready = min(ready, self.capacity)
        if ready > self._ready:
            self._free.put(range(self._ready, ready))
            self._ready = ready

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests: O(blocks)."""
        self._forest.check_valid()
        self._policy.check_valid()
        free = list(self._free)
        assert len(set(free)) == len(free) == len(self._free), "a block is free twice"
        assert all(self._state[block] == FREE for block in free), "a block in use is free"
        assert len(free) + sum(self._count[WRITING:]) == self._ready, "blocks were lost (rule 1)"
        for block, state in enumerate(self._state):
            assert (state == CACHED) == (self._forest.key[block] is not None), f"block {block} is {State(state).name}"
        for state in (WRITING, CACHED, RETIRED):
            found = sum(each == state for each in self._state) * self.blocks_per_chunk
            assert self._count[state] == found, f"{State(state).name} blocks are miscounted"
        for block in self._unfinished:
            assert self._state[block] == RETIRED, f"block {block} has a writer and is {self.state(block).name}"

    def _withdraw_all(self, subtree: Sequence[int]) -> None:
        """Withdraw chunks given parents first; those already withdrawn stay as they are."""
        for block in reversed(subtree):
            if self._state[block] == CACHED:
                self._policy.removed(block)
                self._forest.withdraw(block)
                self._state[block] = RETIRED
                self._moved(CACHED, RETIRED, 1)
        self._prune(reversed(subtree))

    def _prune(self, blocks: Iterable[int]) -> None:
        """Free those of `blocks`, and what waits above them, that are RETIRED and needed by nobody."""
        gone: list[int] = []
        for block in blocks:
            while block != self.root and self._state[block] == RETIRED and self._is_unneeded(block):
                gone.append(block)
                self._state[block] = FREE
                block = self._unlink(block)
        if gone:
            self._moved(RETIRED, FREE, len(gone))
            self._free.put(sorted(self._dissolve(gone)))

    def _unlink(self, block: int) -> int:
        """Take a freed chunk out of the forest. What it hung below, or the root."""
        parent = self._forest.prune(block)
        if parent != self.root and self._state[parent] == CACHED and not self._forest.children[parent]:
            self._policy.bared(parent)
        return parent

    def _is_unneeded(self, block: int) -> bool:
        return not (self._forest.pins[block] or self._forest.children[block] or block in self._unfinished)

    def _moved(self, before: int, after: int, chunks: int) -> None:
        self._count[before] -= chunks * self.blocks_per_chunk
        self._count[after] += chunks * self.blocks_per_chunk

    def _dissolve(self, chunks: Sequence[int]) -> list[int]:
        """All the blocks of chunks that end here, which from now on are blocks like any other."""
        if self.blocks_per_chunk == 1:
            return list(chunks)
        for chunk in chunks:
            self._state[chunk] = FREE
        return [each for chunk in chunks for each in (chunk, *self._rest.pop(chunk))]
