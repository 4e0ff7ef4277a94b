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

A checkpoint (rule 9) is a node like a chunk: it is allocated, committed below the chunk that ends at its boundary,
pinned, evicted and withdrawn as one. It has pieces, which it shares with the checkpoints near it
(`shared_pieces.py`), and it never has children. Where boundaries need checkpoints, a childless chunk without one is of
no use: it is evicted before anything else, once whoever brought it is done.

The same class is the host pool of the cache and, in an engine that has none of its own, the device pool.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cpu_prefix_cache.eviction import POLICIES
from cpu_prefix_cache.index.boundary_log import BoundaryEvent, BoundaryLog
from cpu_prefix_cache.index.forest import NONE, Forest
from cpu_prefix_cache.index.nearest_checkpoint import NearestCheckpoints
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError, PoolExhausted
from cpu_prefix_cache.messages.stats import PoolStatistics
from cpu_prefix_cache.pool.admission import NO_THRESHOLDS, Admission, Thresholds
from cpu_prefix_cache.pool.free_runs import FreeRuns
from cpu_prefix_cache.pool.shared_pieces import Moved, PieceNeed, SharedPieces
from cpu_prefix_cache.pool.states import CACHED, FREE, RETIRED, WRITING, State
from cpu_prefix_cache.pool.useless import UselessChunks

# Keys that an admission remembers for each block of the pool.
REMEMBERED_PER_BLOCK = 8


class Pin:
    """Blocks held in place. Give it back to `BlockPool.unpin`, exactly once (rule 2)."""

    __slots__ = ("blocks", "released")

    def __init__(self, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks
        self.released = False


class NewCheckpoint(NamedTuple):
    """A checkpoint that is to be written: its node, and the blocks of each piece, or None where it is there already.

    `chunks` are those above it that were allocated with it.
    """

    node: int
    blocks: tuple[tuple[int, ...] | None, ...]
    chunks: list[int]


class BlockPool:
    """`num_blocks` blocks under one eviction order. A chunk takes `blocks_per_chunk` of them and goes by its first.

    `ready` is how many blocks may be used for now, from block 0 up; `grow` raises it (a host region takes seconds to
    prepare). `root` is the parent of every first chunk.

    `needs_checkpoint` says of a depth, in chunks, whether resuming there takes a checkpoint; without it none does. A
    chunk may then take no blocks at all: only checkpoints do in a model without prefix groups.

    `thresholds` hold chunks back that too few or too short prompts had (admission.py): what `accepted` answers then is
    less.

    With `log_boundaries` it keeps a log of what can be hit, which somebody takes now and then (`take_events`).

    Raises ConfigurationError for an unknown policy and for a pool that holds no chunk.
    """

    def __init__(
        self,
        num_blocks: int,
        policy: str = "lru",
        *,
        blocks_per_chunk: int = 1,
        ready: int | None = None,
        needs_checkpoint: Callable[[int], bool] | None = None,
        thresholds: Thresholds = NO_THRESHOLDS,
        log_boundaries: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigurationError(f"policy must be one of {', '.join(sorted(POLICIES))}; got {policy!r}")
        least = 1 if needs_checkpoint is None else 0
        if num_blocks < max(1, blocks_per_chunk) or blocks_per_chunk < least:
            raise ConfigurationError(
                f"a pool needs at least the {max(1, blocks_per_chunk)} blocks of one chunk, got {num_blocks}"
            )
        self._admission: Admission | None = None
        if not thresholds.admit_everything:
            self._admission = Admission(thresholds, REMEMBERED_PER_BLOCK * num_blocks)
        self.capacity = num_blocks
        self.blocks_per_chunk = blocks_per_chunk
        self._forest = Forest(num_blocks)
        self._policy = POLICIES[policy](self._forest)
        self.root = self._forest.root
        self._free = FreeRuns()
        self._state = bytearray(num_blocks + 1)
        self._count = [0, 0, 0, 0]  # blocks by State; those not ready yet are in none
        self._ready = 0
        self._evictions = 0
        self._unfinished: set[int] = set()  # RETIRED chunks whose writer is not done
        self._rest: dict[int, list[int]] = {}  # the further blocks of a chunk that takes several
        self.has_checkpoints = needs_checkpoint is not None
        self.needs_checkpoint = needs_checkpoint or (lambda depth: False)
        self._pieces = SharedPieces()
        self._log = BoundaryLog(self._forest) if log_boundaries else None
        self._resume = NearestCheckpoints(self._forest, self._log)
        self._useless = UselessChunks(self._forest, self._is_cached_chunk, self._resume.here)
        self._numbers: list[int] = []  # of nodes that are gone
        self._pinned_pieces = 0  # blocks of pinned checkpoints together: an upper bound on what they hold
        if needs_checkpoint is not None:
            self._forest.on_bared = self._useless.may_be
        self.grow(num_blocks if ready is None else ready)

    # Looking: changes nothing (rule 5)

    def find(self, key: bytes) -> int | None:
        """The block that holds the chunk with this key."""
        block = self._forest.find(key)
        return None if block == NONE else block

    def absent(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of `keys` that no block holds the chunk of."""
        return self._forest.absent(keys)

    def resident_run(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """The end of the run of cached chunks in `keys[start:stop]`. O(log n), because prefixes are closed (rule 3)."""
        return self._forest.resident_run(keys, start, stop)

    def path(self, block: int, length: int) -> list[int]:
        """The blocks of the last `length` chunks of the prefix that ends at `block`, from its beginning on."""
        return self._forest.path(block, length)

    def blocks_of(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """All the blocks of chunks named by their first ones, chunk after chunk."""
        if self.blocks_per_chunk <= 1:
            return tuple(blocks) if self.blocks_per_chunk else ()
        return tuple(each for block in blocks for each in (block, *self._rest[block]))

    def nearest_resumable(self, block: int) -> int:
        """The deepest chunk, at or above a cached one, from which a request can resume; the root if there is none.

        That is one whose checkpoint is cached, or whose boundary needs none.
        """
        return block if not self.has_checkpoints else self._resume.nearest(block)

    def depth(self, block: int) -> int:
        """How many chunks end at or above this one."""
        return self._forest.depth[block]

    def is_checkpoint(self, node: int) -> bool:
        return node in self._pieces

    def pieces(self, checkpoint: int) -> list[tuple[int, ...]]:
        """The blocks of each piece of a checkpoint, in the order they were asked for."""
        return [piece.blocks for piece in self._pieces.of(checkpoint)]

    def needs(self, checkpoint: int) -> list[PieceNeed]:
        """What another checkpoint asks for to share the pieces of this one."""
        return [PieceNeed(piece.key, len(piece.blocks)) for piece in self._pieces.of(checkpoint)]

    def missing(self, needs: Sequence[PieceNeed]) -> list[PieceNeed]:
        """Those of `needs` that no checkpoint has: `allocate_checkpoint` would give blocks for them."""
        return self._pieces.missing(needs)

    def state(self, block: int) -> State:
        return State(self._state[block])

    def key(self, block: int) -> bytes | None:
        return self._forest.key[block]

    def is_pinned(self, block: int) -> bool:
        return self._forest.pins[block] > 0

    def available(self, wanted: int) -> int:
        """How many of `wanted` chunks `allocate` could hand out now."""
        if not self.blocks_per_chunk:
            return wanted
        return min(wanted, self.available_blocks(wanted * self.blocks_per_chunk) // self.blocks_per_chunk)

    def available_blocks(self, wanted: int) -> int:
        """How many of `wanted` blocks could be handed out now: free ones, and what eviction frees."""
        free = len(self._free)
        evictable = free + self._count[CACHED] - self._pinned_pieces
        per_chunk = self.blocks_per_chunk
        # The quickest bound first. It counts what pins share for each of them, the second once, the third is exact.
        if wanted <= free or wanted <= evictable - self._forest.pinned_depth * per_chunk:
            return wanted
        if wanted <= evictable - self._forest.protected_at_most() * per_chunk:
            return wanted
        return min(wanted, free + self._count[CACHED] - self._protected_blocks())

    def has_room(self, chunks: int, needs: Sequence[PieceNeed]) -> bool:
        """Whether `allocate_checkpoint` would find room for them. What is there already and stays takes none."""
        node, wanted = self._begin_checkpoint(needs, chunks)
        fits = self.available_blocks(wanted) >= wanted
        self._dissolve([node], WRITING)
        return fits

    def accepted(self, parent: int | None, keys: Sequence[bytes], needs: Sequence[PieceNeed] | None = None) -> int:
        """How many of the chunks with these keys, from the first on, are wanted here. Changes nothing.

        The policy may decline what is worth less to it than what would have to leave, and with a chunk all that hangs
        below it. They are to hang below `parent` (None: it is being written). With `needs`, the last key is that of a
        checkpoint that has them. The admission may hold chunks back before that, and the checkpoint with them.
        `allocate` itself declines nothing.
        """
        if self._admission is not None:
            chunks = keys if needs is None else keys[:-1]
            admitted = self._admission.admitted(chunks)
            if admitted < len(chunks):
                keys, needs = chunks[:admitted], None
        wanted = len(keys) * self.blocks_per_chunk
        if needs is not None:
            wanted += sum(need.num_blocks for need in self._pieces.missing(needs)) - self.blocks_per_chunk
        short = wanted - len(self._free)
        if short <= 0:
            return len(keys)
        return self._policy.accepts(NONE if parent is None else parent, keys, self._victims_for(short))

    def free_blocks(self) -> Iterator[int]:
        """The blocks that are handed out before anything is evicted. Changes nothing."""
        return iter(self._free)

    def soonest_evicted(self) -> Iterator[int]:
        """Cached, unpinned nodes in the order they would leave. Changes nothing.

        Where there are checkpoints it is their order that is exact, and a chunk may come later than it would leave.
        """
        if not self.has_checkpoints:
            yield from self._policy.soonest_evicted()
            return
        useless = self._useless.in_order()
        yield from useless
        first = set(useless)
        yield from (block for block in self._policy.soonest_evicted() if block not in first)

    @property
    def ready(self) -> int:
        """Blocks that may be used for now, of `capacity`."""
        return self._ready

    @property
    def num_free(self) -> int:
        """Blocks that are handed out before anything is evicted."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether this block waits for an owner. `state` speaks of nodes, and a block of a piece is none."""
        return block in self._free

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
            protected=min(cached, self._protected_at_most()),
            evictions=self._evictions,
        )

    # Using

    def touch(
        self,
        deepest: int | None,
        keys: Sequence[bytes] = (),
        now: float | None = None,
        num_tokens: int | None = None,
    ) -> Any:
        """A request uses the prefix that ends at `deepest` (None: nothing). Its touch, to be given to `commit`.

        `keys`: of all chunks of its prompt, here or not; `now`: seconds, 0 or more, on a clock that does not run
        backwards. A policy that learns from requests needs both; a touch without keys is that of no request.
        `num_tokens`: of the prompt; raises MisuseError without it where `min_store_tokens` asks for a number.
        """
        if self._admission is not None and keys:
            self._admission.told(keys, num_tokens)
        return self._policy.admitted(NONE if deepest is None else deepest, keys, now)

    def pin(self, *blocks: int) -> Pin:
        """Hold `blocks` in place: nodes in any state but FREE, or blocks of pieces of checkpoints.

        The pin of a node holds the prefix above it too, that of a block its bytes and nothing else.
        """
        for block in blocks:
            if self._state[block] == FREE and self._pieces.at(block) is None:
                raise MisuseError(f"block {block} is free and cannot be pinned")
        for block in blocks:
            piece = self._pieces.at(block)
            if piece is not None:
                self._account(self._pieces.pin(piece, +1))
                continue
            self._forest.pin(block)
            if self._forest.pins[block] == 1 and block in self._pieces:
                self._pinned_pieces += self._pieces.num_blocks(block)
        return Pin(blocks)

    def unpin(self, pin: Pin) -> None:
        """End a pin. Raises MisuseError the second time."""
        if pin.released:
            raise MisuseError(f"the pin on blocks {pin.blocks} was released before")
        pin.released = True
        nodes = [block for block in pin.blocks if not self._unpin_piece(block)]
        for block in nodes:
            self._forest.unpin(block)
            if not self._forest.pins[block] and block in self._pieces:
                self._pinned_pieces -= self._pieces.num_blocks(block)
        self.ended(*nodes)
        self._prune(nodes)

    def ended(self, *blocks: int) -> None:
        """Whoever brought or held these chunks is done with them: without a checkpoint they are the first to go."""
        if self.has_checkpoints:
            for block in blocks:
                self._useless.may_be(block)

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
        wanted = count * per_chunk
        if self.available_blocks(wanted) < wanted:
            raise PoolExhausted(count, self.available(count))
        blocks = self._take(wanted, keys)
        self._count[WRITING] += len(blocks)
        chunks = blocks[::per_chunk] if per_chunk else self._number(count)
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

    def allocate_checkpoint(
        self, needs: Sequence[PieceNeed], keys: Sequence[bytes] = (), *, chunks: int = 0
    ) -> NewCheckpoint:
        """A checkpoint to write to, with the last `chunks` chunks above it: both or none, evicting what is needed.

        Of the pieces it needs, in order, those are new that are not there yet. The others may still be written by
        another. Whoever builds on them waits for that one, and gives up if it fails. `keys`: of the chunks, in order,
        and then of the checkpoint, if they are known now.

        Raises PoolExhausted, and changes nothing, when pins and unfinished stores leave fewer blocks (rule 4).
        """
        if not self.has_checkpoints:
            raise MisuseError("this pool has no checkpoints: it was built without needs_checkpoint")
        if keys and len(keys) != chunks + 1:
            raise MisuseError(f"{len(keys)} keys were given for {chunks} chunks and a checkpoint")
        missing = self._pieces.missing(needs)
        node, wanted = self._begin_checkpoint(needs, chunks)
        available = self.available_blocks(wanted)
        if available < wanted:
            self._dissolve([node], WRITING)
            raise PoolExhausted(wanted, available)
        above = self.allocate(chunks, keys[:chunks]) if chunks else []
        count = sum(need.num_blocks for need in missing)
        blocks = self._take(count, keys[chunks:])
        self._pieces.fill(node, needs, blocks)
        self._count[WRITING] += count
        if keys:
            self._policy.announced([node])
        fresh = {need.key for need in missing}
        pieces = zip(needs, self._pieces.of(node), strict=True)
        return NewCheckpoint(node, tuple(piece.blocks if need.key in fresh else None for need, piece in pieces), above)

    def _begin_checkpoint(self, needs: Sequence[PieceNeed], chunks: int) -> tuple[int, int]:
        """A node that holds what is there of its pieces, which might be evicted for the others; and the blocks to take.

        The chunks are allocated before the pieces: a policy learns of a prefix from its beginning.
        """
        missing = sum(need.num_blocks for need in self._pieces.missing(needs))
        [node] = self._number(1)
        self._account(self._pieces.join(node, needs))
        return node, chunks * self.blocks_per_chunk + missing

    def commit(self, blocks: Sequence[int], keys: Sequence[bytes], parent: int, touch: Any) -> None:
        """Make written nodes findable: `blocks[0]` below `parent`, each further one below the one before it.

        Raises MisuseError when a block is not being written or `parent` is not cached; and when a key is here already:
        then the pool is not to be used any more.
        """
        if not blocks:
            return
        different = len(set(blocks))
        if different < len(blocks) or len(blocks) != len(keys):
            raise MisuseError(f"{different} different blocks were given for {len(keys)} keys")
        state = self._state
        for block in blocks:
            if state[block] != WRITING:
                raise MisuseError(f"block {block} is {State(state[block]).name} and cannot be committed")
        self._forest.insert_run(blocks, keys, parent)
        for block in blocks:
            state[block] = CACHED
        if self.has_checkpoints:
            for block in blocks:
                self._can_resume(block, parent)
                parent = block
        elif self._log is not None:
            self._log.stored(blocks)
        self._policy.inserted(blocks, touch)
        self._moved(WRITING, CACHED, blocks)

    def abort(self, blocks: Sequence[int]) -> None:
        """The writer gives nodes up: they are WRITING, or were until `retire`. Pinned ones are freed at unpin."""
        for block in blocks:
            if self._state[block] != WRITING and block not in self._unfinished:
                raise MisuseError(f"block {block} is {self.state(block).name} and cannot be aborted")
        self.retire([block for block in blocks if self._state[block] == WRITING])
        self._unfinished.difference_update(blocks)
        self._prune(blocks)

    def retire(self, blocks: Sequence[int]) -> None:
        """Decide that nodes being written will never be committed. The writer goes on, and ends with `abort`."""
        for block in blocks:
            if self._state[block] != WRITING:
                raise MisuseError(f"block {block} is {self.state(block).name} and cannot be retired")
            self._state[block] = RETIRED
        self._policy.retired(blocks)
        self._unfinished.update(blocks)
        self._moved(WRITING, RETIRED, blocks)

    def withdraw(self, block: int) -> None:
        """Take back the key of a cached chunk, and of all that hangs below it (rule 3)."""
        if self._state[block] != CACHED:
            raise MisuseError(f"block {block} is {self.state(block).name} and has no key to withdraw")
        self._withdraw_all(self._forest.subtree(block))

    def reset(self) -> None:
        """Withdraw every key. Never fails; pinned chunks keep their bytes until their pins end."""
        self._withdraw_all(self._forest.subtree(self.root)[1:])

    def take_events(self) -> list[BoundaryEvent]:
        """What can be hit now and could not before, and what no longer can, since this was asked last; see the log."""
        return [] if self._log is None else self._log.take()

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
        self._pieces.check_valid(self._state)
        free = list(self._free)
        assert len(set(free)) == len(free) == len(self._free), "a block is free twice"
        assert len(free) + sum(self._count[WRITING:]) == self._ready, "blocks were lost (rule 1)"
        for node, state in enumerate(self._state):
            assert (state == CACHED) == (self._forest.key[node] is not None), f"block {node} is {State(state).name}"
        used = list(self._pieces.blocks())
        for node, state in enumerate(self._state):
            if state != FREE and node not in self._pieces and self.blocks_per_chunk:
                used += ((block, state) for block in (node, *self._rest.get(node, ())))
        everywhere = free + [block for block, _ in used]
        assert sorted(everywhere) == list(range(self._ready)), "a block is in two places, or in none"
        for state in (WRITING, CACHED, RETIRED):
            found = sum(each == state for _, each in used)
            assert self._count[state] == found, f"{State(state).name} blocks are miscounted"
        for block in self._unfinished:
            assert self._state[block] == RETIRED, f"block {block} has a writer and is {self.state(block).name}"
        if self.has_checkpoints:
            self._check_resumable()

    def _check_resumable(self) -> None:
        self._resume.check_valid()
        checkpoints = [node for node, state in enumerate(self._state) if state == CACHED and node in self._pieces]
        with_checkpoint = {self._forest.parent[node] for node in checkpoints}
        for chunk in self._forest.subtree(self.root)[1:]:
            if self._state[chunk] == CACHED and chunk not in self._pieces:
                resumable = chunk in with_checkpoint or not self.needs_checkpoint(self.depth(chunk))
                assert (self._resume.nearest(chunk) == chunk) == resumable, f"chunk {chunk} can be resumed from, or not"
        for chunk in with_checkpoint:
            assert self._state[chunk] == CACHED, f"a checkpoint stands below chunk {chunk}, which is not cached"

    # Room

    def _protected_at_most(self) -> int:
        return self._forest.protected_at_most() * self.blocks_per_chunk + self._pinned_pieces

    def _protected_blocks(self) -> int:
        """How many CACHED blocks pins protect. O(their number) if a pin has ended since."""
        protected = self._forest.protected()
        checkpoints = [node for node in protected if node in self._pieces]
        pieces = {piece for node in checkpoints for piece in self._pieces.of(node) if piece.state == CACHED}
        chunks = len(protected) - len(checkpoints)
        return chunks * self.blocks_per_chunk + sum(len(piece.blocks) for piece in pieces)

    def _take(self, count: int, keys: Sequence[bytes]) -> list[int]:
        """`count` blocks, ascending, evicting what is needed. The caller has made sure that they can be had."""
        short = count - len(self._free)
        if short <= 0:
            if keys:
                self._policy.evict(0, keys)
            return self._free.take(count)
        blocks = self._evict(short, keys)
        if short < count:
            blocks += self._free.take(count - short)
        blocks.sort()
        if len(blocks) > count:
            self._free.put(blocks[count:])
            del blocks[count:]
        return blocks

    def _evict(self, short: int, keys: Sequence[bytes]) -> list[int]:
        """At least `short` blocks of nodes that are evicted for them."""
        freed: list[int] = []
        while keys or len(freed) < short:
            if self._useless:
                freed += self._evict_useless(short - len(freed))
            left = short - len(freed)
            widest = max(self.blocks_per_chunk, self._pieces.widest)  # never more victims than are needed
            victims = self._policy.evict(-(-left // widest) if left > 0 else 0, keys)
            self._evictions += len(victims)
            freed += self._dissolve(victims, CACHED)
            keys = ()
        return freed

    def _victims_for(self, blocks: int) -> int:
        """How many nodes would leave for so many blocks, by what they take on average where that differs."""
        if not self.has_checkpoints or not self._count[CACHED]:
            return -(-blocks // max(1, self.blocks_per_chunk))
        return -(-blocks * len(self._forest) // self._count[CACHED])

    def _evict_useless(self, short: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < short and (block := self._useless.take()) is not None:
            self._policy.removed(block)
            self._forest.withdraw(block)
            self._unlink(block)
            self._evictions += 1
            freed += self._dissolve([block], CACHED)
        return freed

    def _unpin_piece(self, block: int) -> bool:
        """End the pin on a block of a piece. False if it is no such block."""
        piece = self._pieces.at(block)
        if piece is None:
            return False
        moved = self._pieces.pin(piece, -1)
        self._account(moved)
        for each in moved:
            if each.after == FREE:
                self._free.put(sorted(each.piece.blocks))
        return True

    def _is_cached_chunk(self, node: int) -> bool:
        return node != self.root and self._state[node] == CACHED and node not in self._pieces

    # From state to state

    def _can_resume(self, node: int, parent: int) -> None:
        """A node is cached now: from which chunk can be resumed because of it?"""
        if node in self._pieces:
            self._resume.set(parent, True)
        else:
            self._resume.enter(node)
            self._resume.set(node, not self.needs_checkpoint(self._forest.depth[node]))

    def _cannot_resume(self, node: int) -> None:
        """A node is not cached any more."""
        if node in self._pieces:
            self._resume.set(self._forest.parent[node], False)
        else:
            self._resume.set(node, False)

    def _withdraw_all(self, subtree: Sequence[int]) -> None:
        """Withdraw nodes given parents first; those already withdrawn stay as they are."""
        for block in reversed(subtree):
            if self._state[block] == CACHED:
                self._policy.removed(block)
                self._forest.withdraw(block)
                self._state[block] = RETIRED
                if self.has_checkpoints:
                    self._cannot_resume(block)
                elif self._log is not None:
                    self._log.removed((block,))
                self._moved(CACHED, RETIRED, (block,))
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
            self._free.put(sorted(self._dissolve(gone, RETIRED)))

    def _unlink(self, block: int) -> int:
        """Take a node without a key out of the forest. What it hung below, or the root."""
        parent = self._forest.prune(block)
        if parent != self.root and self._state[parent] == CACHED and not self._forest.children[parent]:
            self._policy.bared(parent)
        return parent

    def _is_unneeded(self, block: int) -> bool:
        return not (self._forest.pins[block] or self._forest.children[block] or block in self._unfinished)

    def _moved(self, before: int, after: int, nodes: Sequence[int]) -> None:
        """Account for nodes that went from one state to another and keep their blocks."""
        chunks = len(nodes)
        if self.has_checkpoints:
            for node in nodes:
                if node in self._pieces:
                    chunks -= 1
                    self._account(self._pieces.move(node, before, after))
        self._count[before] -= chunks * self.blocks_per_chunk
        self._count[after] += chunks * self.blocks_per_chunk

    def _account(self, moved: Iterable[Moved]) -> None:
        for piece, before, after in moved:
            self._count[before] -= len(piece.blocks)
            self._count[after] += len(piece.blocks)

    def _dissolve(self, nodes: Sequence[int], before: int) -> list[int]:
        """Nodes end here. The blocks that nobody has any more: they are to be taken or put back at once."""
        if self.has_checkpoints:
            return [block for node in nodes for block in self._end(node, before)]
        if self._log is not None and before == CACHED:
            self._log.removed(nodes)
        self._count[before] -= len(nodes) * self.blocks_per_chunk
        if self.blocks_per_chunk == 1:
            return list(nodes)
        for node in nodes:
            self._state[node] = FREE
        return [each for node in nodes for each in (node, *self._rest.pop(node))]

    def _end(self, node: int, before: int) -> Sequence[int]:
        """One node ends here. Its blocks, but for those of pieces that others use."""
        if before == CACHED:
            self._cannot_resume(node)
        self._state[node] = FREE
        self._useless.forget(node)
        if node in self._pieces:
            moved = self._pieces.move(node, before, FREE)
            self._account(moved)
            self._numbers.append(node)
            return [block for piece, _, after in moved if after == FREE for block in piece.blocks]
        self._count[before] -= self.blocks_per_chunk
        if not self.blocks_per_chunk:
            self._numbers.append(node)
            return ()
        return (node, *self._rest.pop(node, ()))

    def _number(self, count: int) -> list[int]:
        """Numbers for nodes that begin to be written and are not named by a block of their own."""
        numbers = [self._numbers.pop() for _ in range(min(count, len(self._numbers)))]
        while len(numbers) < count:
            numbers.append(self._forest.add_number())
            self._state.append(FREE)
        for number in numbers:
            self._state[number] = WRITING
        return numbers
