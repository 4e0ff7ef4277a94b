"""The pool and the lookup the slow, obvious way. Nothing here is shared with the code that it is compared to.

A chunk's key is all the letters of its prompt up to it, so its parent's key is that without the last letter, and no
links are needed to know its descendants.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any


@dataclass(eq=False)
class Chunk:
    """A chunk from `allocate` until its blocks are free again. `name` is its prompt, "" until it is committed."""

    block: int
    state: str = "writing"
    name: str = ""
    parent: "Chunk | None" = None
    touch: int = 0
    pins: int = 0
    has_writer: bool = True
    goes_to: str = ""  # ARC: "T1" or "T2", once that is known
    is_old: bool = False  # there was a reset since


class SlowPool:
    """Chunks in a list. Everything is a scan."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.stamp = 0

    def cached(self, name: str) -> Chunk | None:
        return next((chunk for chunk in self.chunks if chunk.state == "cached" and chunk.name == name), None)

    def names(self) -> set[str]:
        return {chunk.name for chunk in self.chunks if chunk.state == "cached"}

    def longest(self, prompt: str) -> str:
        """The longest beginning of a prompt that is cached."""
        return max((prompt[:end] for end in range(len(prompt) + 1) if self._has_all(prompt[:end])), key=len)

    def touch(self, name: str) -> int:
        """A request used the prefix `name`: its deepest chunk is as young as anything can be (rule 3)."""
        self.stamp += 1
        chunk = self.cached(name)
        if chunk is not None:
            chunk.touch = self.stamp
        return self.stamp

    def commit(self, chunks: Sequence[Chunk], names: Sequence[str], touch: int) -> None:
        for chunk, name in zip(chunks, names, strict=True):
            chunk.state = "cached"
            chunk.name = name
            chunk.touch = touch
            chunk.has_writer = False
            chunk.parent = self.cached(name[:-1])

    def withdraw(self, name: str) -> None:
        """`name`, and all that begins with it, deepest first: each parent inherits (rule 3)."""
        below = [chunk for chunk in self.chunks if chunk.state == "cached" and chunk.name.startswith(name)]
        for chunk in sorted(below, key=lambda each: -len(each.name)):
            self._bequeath(chunk)
            chunk.state = "retired"
        self.free_unneeded()

    def forget(self, chunk: Chunk) -> None:
        """Nothing will come of a chunk that was being written."""

    def free_unneeded(self) -> None:
        """A retired chunk goes when nobody pins it, nothing hangs below it and its writer is done."""
        while True:
            gone = [
                chunk
                for chunk in self.chunks
                if chunk.state == "retired" and not (chunk.pins or chunk.has_writer or self._children(chunk))
            ]
            if not gone:
                return
            self.chunks = [chunk for chunk in self.chunks if chunk not in gone]

    def eviction_order(self) -> list[str]:
        """Evicts the childless, unpinned chunk of the oldest touch, again and again."""
        saved = [(chunk, chunk.touch) for chunk in self.chunks]
        order = [chunk.name for chunk in self._evictions()]
        self.chunks = [chunk for chunk, _ in saved]
        for chunk, touch in saved:
            chunk.touch = touch
        return order

    def accepts(self, names: Sequence[str], count: int) -> int:
        """How many of the chunks that are to come are wanted, where `count` of them find no room."""
        return len(names)

    def evict(self, count: int, names: Sequence[str] = ()) -> list[str]:
        """Make room for `count` chunks more, as far as chunks can leave. `names`: all that are to come, if known."""
        return [chunk.name for chunk in islice(self._evictions(), count)]

    def announce(self, chunks: Sequence[Chunk]) -> None:
        """These are the chunks that were named to the last `evict`."""

    def _evictions(self) -> Iterator[Chunk]:
        while True:
            able = [
                chunk
                for chunk in self.chunks
                if chunk.state == "cached" and not chunk.pins and not self._children(chunk)
            ]
            if not able:
                return
            oldest = min(able, key=lambda chunk: chunk.touch)
            self._bequeath(oldest)
            self.chunks.remove(oldest)
            yield oldest

    def _bequeath(self, chunk: Chunk) -> None:
        if chunk.parent is not None:
            chunk.parent.touch = max(chunk.parent.touch, chunk.touch)

    def _children(self, chunk: Chunk) -> list[Chunk]:
        return [each for each in self.chunks if each.parent is chunk]

    def _has_all(self, prefix: str) -> bool:
        return all(self.cached(prefix[: end + 1]) for end in range(len(prefix)))


class Foretold(SlowPool):
    """Evicts in the order that the pool foretells, having seen that it is lawful: childless ones first, all of them."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.pool = pool

    def accepts(self, names: Sequence[str], count: int) -> int:
        """The pool's answer, checked to leave out no more than find no room."""
        above = self.cached(names[0][:-1])
        parent = above.block if above else self.pool.root
        accepted: int = self.pool.choose(parent, [name.encode() for name in names])
        assert len(names) - count <= accepted <= len(names)
        return accepted

    def _evictions(self) -> Iterator[Chunk]:
        for block in list(self.pool.soonest_evicted()):
            chunk = next(each for each in self.chunks if each.block == block)
            assert chunk.state == "cached" and not chunk.pins and not self._children(chunk), f"{chunk.name} cannot go"
            self.chunks.remove(chunk)
            yield chunk
        left = [chunk for chunk in self.chunks if chunk.state == "cached" and not chunk.pins]
        assert all(self._children(chunk) for chunk in left), "somebody was forgotten"


class SlowArc(SlowPool):
    """ARC as in the paper, on lists of names, with two departures, marked where they are made.

    T1 and T2 hold the chunks that name them, those in writing included.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.p = 0.0
        self.ghosts: dict[str, list[str]] = {"B1": [], "B2": []}  # oldest first
        self.coming: list[str] = []  # where the chunks go that have been named, but are not announced yet

    def size(self, which: str) -> int:
        return sum(chunk.goes_to == which for chunk in self.chunks) + self.coming.count(which)

    def touch(self, name: str) -> int:
        stamp = super().touch(name)
        self._has_been_used_again(name)
        return stamp

    def commit(self, chunks: Sequence[Chunk], names: Sequence[str], touch: int) -> None:
        for chunk, name in zip(chunks, names, strict=True):
            if not chunk.goes_to:
                chunk.goes_to = self._learn(name)[0]
            for ghosts in self.ghosts.values():
                if name in ghosts:
                    ghosts.remove(name)
            super().commit([chunk], [name], touch)
            if chunk.goes_to == "T2":
                self._has_been_used_again(name)

    def announce(self, chunks: Sequence[Chunk]) -> None:
        for chunk, where in zip(chunks, self.coming if chunks else (), strict=True):
            chunk.goes_to = where
        self.coming = []

    def forget(self, chunk: Chunk) -> None:
        """Nothing will come of a chunk that was being written."""
        chunk.goes_to = ""

    def withdraw(self, name: str) -> None:
        for chunk in self.chunks:
            if chunk.state == "cached" and chunk.name.startswith(name):
                chunk.goes_to = ""
        super().withdraw(name)

    def eviction_order(self) -> list[str]:
        ghosts = {which: list(names) for which, names in self.ghosts.items()}
        lists = [(chunk, chunk.goes_to) for chunk in self.chunks]
        order = super().eviction_order()
        self.ghosts = ghosts
        for chunk, where in lists:
            chunk.goes_to = where
        return order

    def accepts(self, names: Sequence[str], count: int) -> int:
        """Strangers may take what is free, what T1 has here, and what T1 lacks of p or of a fifth of the pool."""
        lacking = max(int(self.p) + 1, self.capacity // 5) - self.size("T1")
        here = sum(chunk.goes_to == "T1" for chunk in self.chunks if chunk.state == "cached")
        room = len(names) - count + here + max(0, lacking)
        strangers = [at for at, name in enumerate(names) if name not in self.ghosts["B1"] + self.ghosts["B2"]]
        return strangers[room] if room < len(strangers) else len(names)

    def evict(self, count: int, names: Sequence[str] = ()) -> list[str]:
        """One name after the other, as the paper has it for one page. Those before the last `count` find room, and
        behind one that finds none none comes.
        """
        gone: list[str] = []
        for at, name in enumerate(names):
            if at >= len(names) - count and not self._can_replace():
                return gone
            no_ghost = self.size("T1") == self.capacity
            where, ghost = self._learn(name)
            if at >= len(names) - count:
                gone.append(self._replace(ghost == "B2", leaves_ghost=not no_ghost or where == "T2").name)
            self.coming.append(where)
        while len(gone) < count and self._can_replace():
            gone.append(self._replace().name)
        return gone

    def _learn(self, name: str) -> tuple[str, str]:
        """Where a new chunk goes, and the list of ghosts that had it."""
        b1, b2 = self.ghosts["B1"], self.ghosts["B2"]
        if name in b1:  # case II
            self.p = min(self.capacity, self.p + max(len(b2) / len(b1), 1))
            b1.remove(name)
            return "T2", "B1"
        if name in b2:  # case III
            self.p = max(0, self.p - max(len(b1) / len(b2), 1))
            b2.remove(name)
            return "T2", "B2"
        t1, t2 = self.size("T1"), self.size("T2")  # case IV
        if t1 + len(b1) == self.capacity:
            del b1[:1]
        elif t1 + len(b1) + t2 + len(b2) == 2 * self.capacity:
            del b2[0]
        return "T1", ""

    def _evictions(self) -> Iterator[Chunk]:
        while self._can_replace():
            yield self._replace()

    def _can_replace(self) -> bool:
        return any(not chunk.pins and not self._children(chunk) for chunk in self.chunks if chunk.state == "cached")

    def _replace(self, was_in_b2: bool = False, leaves_ghost: bool = True) -> Chunk:
        t1 = self.size("T1")
        victim = None
        if not (t1 > self.p or (was_in_b2 and t1 == int(self.p))):
            victim = self._oldest(
                chunk for chunk in self._cached("T2") if not any(c.goes_to == "T2" for c in self._children(chunk))
            )
            if victim is not None and self._children(victim):
                victim = None  # departure: it outlives its children in T1
        if victim is None:
            victim = self._oldest(chunk for chunk in self._cached("T1") if not self._children(chunk))
        if victim is None:
            victim = self._oldest(chunk for chunk in self._cached("T2") if not self._children(chunk))
        if leaves_ghost:
            self.ghosts["B" + victim.goes_to[1]].append(victim.name)
        self._bequeath(victim)
        self.chunks.remove(victim)
        return victim

    def _cached(self, where: str) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.state == "cached" and chunk.goes_to == where]

    def _oldest(self, chunks: Iterable[Chunk]) -> Chunk | None:
        return min((chunk for chunk in chunks if not chunk.pins), key=lambda chunk: chunk.touch, default=None)

    def _has_been_used_again(self, name: str) -> None:
        """A chunk goes to T2, and what it hangs below (departure: so T2 has no orphans)."""
        for end in range(1, len(name) + 1):
            self.cached(name[:end]).goes_to = "T2"


def can_resume_at(boundary: int, grid: int, n0: int, num_tokens: int, prompt: str, on_host: set[str]) -> bool:
    """Rule 6, for prefix groups: on the grid, before the last token, and every chunk in [n0, boundary) on the host."""
    if boundary % grid or boundary > num_tokens - 1 or boundary > len(prompt) * grid:
        return False
    return all(prompt[: at // grid + 1] in on_host for at in range(n0 - n0 % grid, boundary, grid))


def longest_boundary(grid: int, n0: int, num_tokens: int, prompt: str, on_host: set[str]) -> int:
    """The largest boundary after n0 at which the request could resume; n0 when there is none."""
    able = [b for b in range(n0 + 1, num_tokens) if can_resume_at(b, grid, n0, num_tokens, prompt, on_host)]
    return max(able, default=n0)
