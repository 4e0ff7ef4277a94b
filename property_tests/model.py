"""The pool and the lookup said the slow, obvious way. Nothing here is shared with what it is compared to.

A chunk's key is all the letters of its prompt up to it, so its parent's key is that without the last letter, and no
links are needed to know who hangs below whom.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice


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
            chunk.state, chunk.name, chunk.touch, chunk.has_writer = "cached", name, touch, False
            chunk.parent = self.cached(name[:-1])

    def withdraw(self, name: str) -> None:
        """`name`, and all that begins with it, deepest first: each parent inherits (rule 3)."""
        below = [chunk for chunk in self.chunks if chunk.state == "cached" and chunk.name.startswith(name)]
        for chunk in sorted(below, key=lambda each: -len(each.name)):
            self._bequeath(chunk)
            chunk.state = "retired"
        self.free_unneeded()

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
        """Of the childless, unpinned chunks the one of the oldest touch, again and again."""
        saved = [(chunk, chunk.touch) for chunk in self.chunks]
        order = [chunk.name for chunk in self._evictions()]
        self.chunks = [chunk for chunk, _ in saved]
        for chunk, touch in saved:
            chunk.touch = touch
        return order

    def evict(self, count: int) -> list[str]:
        return [chunk.name for chunk in islice(self._evictions(), count)]

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


def can_resume_at(boundary: int, grid: int, n0: int, num_tokens: int, prompt: str, on_host: set[str]) -> bool:
    """Rule 6, for prefix groups: on the grid, before the last token, and every chunk in [n0, boundary) on the host."""
    if boundary % grid or boundary > num_tokens - 1 or boundary > len(prompt) * grid:
        return False
    return all(prompt[: at // grid + 1] in on_host for at in range(n0, boundary, grid))


def longest_boundary(grid: int, n0: int, num_tokens: int, prompt: str, on_host: set[str]) -> int:
    """The largest boundary after n0 at which the request could resume; n0 when there is none, or n0 is off the grid."""
    if n0 % grid:
        return n0
    able = [b for b in range(n0 + 1, num_tokens) if can_resume_at(b, grid, n0, num_tokens, prompt, on_host)]
    return max(able, default=n0)
