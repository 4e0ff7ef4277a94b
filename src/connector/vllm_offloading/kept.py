"""Chunks that vLLM's manager keeps, and which of them leaves next.

vLLM's manager asks a policy for victims, and nothing else: it stores every chunk that it offers. Our policies know
prefixes and may decline. So a chunk is kept in one of two ways:

    placed    its boundary stands in the pool's forest, below the boundary before it; our policy gives its turn
    loose     it stands nowhere: a lookup may find it, and it leaves before anything else, the oldest first

and moves between them only here:

    insert         (none) -> placed     the policy has accepted it, and the boundary above it is placed
    insert         (none) -> loose      declined, or without the boundary above it
    offer          loose -> placed      a request has it again, and the policy accepts it now
    remove         placed -> loose      all that stands below a boundary whose store failed
    evict          placed -> loose      when there are too few loose ones
    evict          loose -> (none)

What vLLM stores against the policy's decision takes the room of loose chunks, and that of others only where there are
too few of these. So in the long run as many blocks are loose as a step has declined at most, and the policy disposes of
the others as `replay` shows it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, Protocol

from connector.vllm_offloading.chains import BoundaryChain
from cpu_prefix_cache.deciding import BlockPool, InternalError, Pin


class Chunk(Protocol):
    """vLLM's record of a chunk: `ref_cnt` is 0 while no transfer uses it."""

    ref_cnt: int


@dataclass(slots=True)
class PromptUse:
    """One request's use of the cache. The policy wants its boundaries before number `accepted`."""

    chain: BoundaryChain = field(default_factory=BoundaryChain)
    touch: Any = None
    accepted: int = 0


@dataclass(slots=True)
class Boundary:
    """A placed boundary: its chunks by key, how many of them a transfer uses, and the pin while there are any."""

    chunks: dict[bytes, Any] = field(default_factory=dict)
    busy: int = 0
    pin: Pin | None = None


class KeptChunks:
    """`capacity` chunks under a policy of this name."""

    def __init__(self, capacity: int, policy: str) -> None:
        self._capacity = capacity
        self.chunks: dict[bytes, Any] = {}
        self._loose: dict[bytes, None] = {}
        self._boundaries: dict[int, Boundary] = {}  # placed ones, by node
        self._node: dict[bytes, int] = {}  # of placed chunks, by key
        self._pool = BlockPool(max(1, capacity), policy)
        self._pool.log_departures()
        self._widest = 1  # the most chunks that a boundary had
        self._above: bytes | None = None  # the boundary below which the chunks offered last are to stand
        self._wanted: list[bytes] = []  # boundaries of those, as far as the policy wants them
        self._taken: dict[bytes, int] = {}  # taken for them when room was made

    # A request

    def begin(self, use: PromptUse, now: float) -> None:
        """A request uses what it finds here."""
        hashes = use.chain.hashes
        found = self._pool.resident_run(hashes, 0, len(hashes))
        use.touch = self._pool.touch(self._pool.find(hashes[found - 1]) if found else None, hashes, now)
        self.offer(use, ())

    def offer(self, use: PromptUse, keys: Collection[bytes]) -> None:
        """vLLM is about to store these, of one request: let the policy decide which of them it wants.

        With them it decides about what is loose and stands between them.
        """
        hashes = use.chain.hashes
        start = self._pool.resident_run(hashes, 0, len(hashes))
        coming = {use.chain.place(key) for key in keys}
        wanted = list(takewhile(lambda at: at in coming or self._is_loose(use, at), range(start, len(hashes))))
        self._above = hashes[start - 1] if start else None
        self._wanted.clear()
        self._give_back()
        if wanted:
            parent = self._pool.find(self._above) if self._above is not None else self._pool.root
            run = hashes[start : start + len(wanted)]
            use.accepted = start + self._pool.choose(parent, run)
            self.place_loose(use, start)
            self._wanted = [hashes[at] for at in wanted if at < use.accepted and not self._is_here(use, at)]

    def place_loose(self, use: PromptUse, at: int) -> None:
        """Place the loose chunks of accepted boundaries, from this one on."""
        while at < use.accepted and self._is_loose(use, at) and self._place(use, at):
            at += 1

    def _is_loose(self, use: PromptUse, at: int) -> bool:
        return any(key in self._loose for key in use.chain.keys(at))

    def _is_here(self, use: PromptUse, at: int) -> bool:
        return any(key in self.chunks for key in use.chain.keys(at))

    def _give_back(self) -> None:
        """Nothing more comes for the nodes that were taken."""
        self._pool.abort([*self._taken.values()])
        self._taken.clear()

    def _place(self, use: PromptUse, at: int) -> bool:
        """Place a boundary with those of its chunks that are loose, if the one above it is placed."""
        hashes = use.chain.hashes
        parent = self._pool.find(hashes[at - 1]) if at else self._pool.root
        if parent is None:
            return False
        node = self._taken.pop(hashes[at], None)
        if node is None:
            (node,) = self._pool.take(1, hashes[at : at + 1])
        self._pool.commit([node], hashes[at : at + 1], parent, use.touch)
        self._boundaries[node] = Boundary()
        for key in use.chain.keys(at):
            if key in self._loose:
                del self._loose[key]
                self._join(node, key)
        return True

    # Chunks

    def insert(self, key: bytes, chunk: Chunk, use: PromptUse | None) -> None:
        """vLLM stores a chunk, for a request if it is known which."""
        self.chunks[key] = chunk
        self._loose[key] = None
        at = None if use is None else use.chain.place(key)
        if use is None or at is None:
            return
        node = self._pool.find(use.chain.hashes[at])
        if node is not None:
            del self._loose[key]
            self._join(node, key)
        else:
            self.place_loose(use, at)

    def remove(self, key: bytes) -> None:
        """The store of a chunk has failed."""
        chunk = self.chunks.pop(key)
        if key in self._loose:
            del self._loose[key]
            return
        node = self._node.pop(key)
        boundary = self._boundaries[node]
        del boundary.chunks[key]
        if chunk.ref_cnt:
            self._used(node, -1)
        if not boundary.chunks:
            self._loosen(node)

    def used(self, key: bytes, change: int) -> None:
        """A transfer begins (+1) or ends (-1) to use a chunk that no other uses."""
        node = self._node.get(key)
        if node is not None:
            self._used(node, change)

    def _join(self, node: int, key: bytes) -> None:
        boundary = self._boundaries[node]
        boundary.chunks[key] = self.chunks[key]
        self._node[key] = node
        self._widest = max(self._widest, len(boundary.chunks))
        if self.chunks[key].ref_cnt:
            self._used(node, +1)

    def _used(self, node: int, change: int) -> None:
        boundary = self._boundaries[node]
        boundary.busy += change
        if boundary.busy and boundary.pin is None:
            boundary.pin = self._pool.pin(node)
        elif not boundary.busy and boundary.pin is not None:
            self._pool.unpin(boundary.pin)
            boundary.pin = None

    def _loosen(self, node: int) -> None:
        """A boundary has no chunks any more: nothing resumes below it until it is stored again."""
        for below in self._pool.withdraw(node):
            boundary = self._boundaries.pop(below)
            self._pool.unpin(boundary.pin)
            for key in boundary.chunks:
                del self._node[key]
                self._loose[key] = None

    # Eviction

    def evict(self, count: int, protected: Collection[bytes]) -> list[tuple[bytes, Any]] | None:
        """Let exactly so many chunks leave, none of them protected or in use. None, and no change, for fewer."""
        self._give_back()
        idle = (key for key in self._loose if not self.chunks[key].ref_cnt and key not in protected)
        victims = list(islice(idle, count))
        short = count - len(victims)
        if short and not self._make_loose(short, protected, victims):
            return None
        for key in victims:
            del self._loose[key]
        return [(key, self.chunks.pop(key)) for key in victims]

    def _make_loose(self, short: int, protected: Collection[bytes], victims: list[bytes]) -> bool:
        """Let placed chunks become loose, and the first `short` of them victims. Whether there are so many."""
        pin = self._pool.pin(*self._ends(protected))
        try:
            if not self._has(short):
                return False
            wanted = [each for each in self._wanted if self._pool.find(each) is None]
            self._taken = dict(zip(wanted, self._pool.take(len(wanted), wanted), strict=False))
            short -= self._left(short, victims)
            while short > 0:
                self._pool.abort(self._pool.take(len(self._pool.free) + -(-short // self._widest)))
                left = self._left(short, victims)
                if not left:
                    raise InternalError(f"{short} chunks that could leave did not")
                short -= left
        finally:
            self._pool.unpin(pin)
        return True

    def _ends(self, protected: Collection[bytes]) -> list[int]:
        """Nodes that hold, by pins, those of these chunks that are placed, and what the next chunks stand below."""
        nodes = {self._node[key] for key in protected if key in self._node}
        above = None if self._above is None else self._pool.find(self._above)
        if above is not None:
            nodes.add(above)
        if not nodes:
            return []
        deepest = max(nodes, key=self._pool.depth)
        held = {*self._pool.path(deepest, self._pool.depth(deepest))}
        return [deepest, *(nodes - held)]

    def _has(self, count: int) -> bool:
        """Whether so many placed chunks could leave now."""
        if self._pool.least_available - len(self._pool.free) >= count:
            return True
        for node in self._pool.soonest_evicted():
            count -= len(self._boundaries[node].chunks)
            if count <= 0:
                return True
        return False

    def _left(self, short: int, victims: list[bytes]) -> int:
        """Boundaries have left the pool: their chunks are loose, the first `short` of them victims. Their number."""
        left = [key for node in self._pool.take_departed().values() for key in self._boundaries.pop(node).chunks]
        for key in left:
            del self._node[key]
            self._loose[key] = None
        victims += left[: max(0, short)]
        return len(left)

    # Everything

    def clear(self) -> None:
        """Begin without chunks. The policy remembers what it has learned of requests."""
        for boundary in self._boundaries.values():
            self._pool.unpin(boundary.pin)
        self.chunks.clear()
        self._loose.clear()
        self._boundaries.clear()
        self._node.clear()
        self._above = None
        self._wanted.clear()
        self._give_back()
        self._pool.reset()

    @property
    def num_loose(self) -> int:
        return len(self._loose)

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests: O(chunks)."""
        self._pool.check_valid()
        assert not self._pool.take_departed(), "a boundary left unnoticed"
        placed = {key: node for node, boundary in self._boundaries.items() for key in boundary.chunks}
        assert placed == self._node, "placed chunks are in the wrong place"
        assert self._loose.keys() | placed.keys() == self.chunks.keys(), "a chunk is neither placed nor loose"
        assert not self._loose.keys() & placed.keys(), "a chunk is placed and loose"
        assert len(self.chunks) <= self._capacity, "there are too many chunks"
        for node, boundary in self._boundaries.items():
            assert boundary.chunks, "a boundary without chunks"
            assert self._pool.key(node) is not None, "a boundary stands nowhere"
            assert boundary.busy == sum(chunk.ref_cnt != 0 for chunk in boundary.chunks.values()), "uses are miscounted"
            assert (boundary.pin is None) == (not boundary.busy), "a pin is there without a use, or is not"
