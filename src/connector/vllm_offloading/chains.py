"""Boundaries of one request, in the order of its prompt, as vLLM's keys show them.

A key of vLLM is a block's hash with the number of its KV cache group behind it, and the scheduler notes for each key of
a request where in the prompt it ends:

    tokens        0 .... 16 .... 32 .... 48 .... 64
    group 0       |  a0  |  b0   |  c0   |  d0   |      blocks of 16
    group 1       |      B1      |      D1       |      blocks of 32
    boundaries    |       0      |       1       |      those of the longest block; their hashes are b and d

The keys that end in a boundary's tokens are its chunks: a0, b0 and B1 are those of boundary 0.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

GROUP_BYTES = 4  # of a key, at its end


class BoundaryChain:
    """`hashes` are those of the boundaries, from the first one on. More come as the request goes on."""

    def __init__(self) -> None:
        self.hashes: list[bytes] = []
        self._grid = 0  # tokens between two boundaries, 0 before there are keys
        self._read = 0  # keys
        self._place: dict[bytes, int] = {}  # by key, the boundary whose chunk it is
        self._keys: list[list[bytes]] = []  # by boundary
        self._early: dict[int, bytes] = {}  # hashes of boundaries after one whose hash is still to come

    def extend(self, ends: Mapping[bytes, int]) -> None:
        """Read what is new in the ends of a request's keys, in tokens. O(new keys)."""
        new = list(islice(ends.items(), self._read, None))
        self._read += len(new)
        if not self._grid:
            self._grid = longest_block(new)
        for key, end in new:
            at = (end - 1) // self._grid
            self._place[key] = at
            while len(self._keys) <= at:
                self._keys.append([])
            self._keys[at].append(key)
            if end % self._grid == 0:
                self._early[at] = key[:-GROUP_BYTES]
        while (found := self._early.pop(len(self.hashes), None)) is not None:
            self.hashes.append(found)
        if self._early:
            self._early = {at: each for at, each in self._early.items() if at > len(self.hashes)}

    def place(self, key: bytes) -> int | None:
        """The boundary that a key is a chunk of. None for a key of another request, and for one after the last
        boundary.
        """
        at = self._place.get(key)
        return None if at is None or at >= len(self.hashes) else at

    def keys(self, at: int) -> Sequence[bytes]:
        """The chunks of a boundary."""
        return self._keys[at]


def longest_block(ends: Sequence[tuple[bytes, int]]) -> int:
    """Tokens of the longest block of all groups: the first key of each ends where its first block does. 0 for none."""
    first: dict[bytes, int] = {}
    for key, end in ends:
        group = key[-GROUP_BYTES:]
        first[group] = min(end, first.get(group, end))
    return max(first.values(), default=0)
