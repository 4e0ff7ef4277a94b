"""A request's block hashes as keys of chunks.

vLLM hashes blocks of the length that divides all of its groups', each hash chained to the one before; so the hash at
the end of a chunk is the chunk's key, and vLLM itself knows a longer block by it.

    hashes   h0  h1  h2  h3  h4  h5  h6        of 16 tokens
    keys         h1      h3      h5            chunks of 32
"""

from collections.abc import Sequence
from typing import overload


class ChunkKeys(Sequence[bytes]):
    """Every `each`-th of `hashes`, as they are at the moment: the list grows as the request goes on."""

    def __init__(self, hashes: Sequence[bytes], each: int) -> None:
        self._hashes = hashes
        self._each = each

    @classmethod
    def of(cls, hashes: Sequence[bytes], each: int) -> Sequence[bytes]:
        """The list itself where a block is a chunk: it is read as it lies."""
        return hashes if each == 1 else cls(hashes, each)

    def __len__(self) -> int:
        return len(self._hashes) // self._each

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return self._hashes[range(len(self))[at] * self._each + self._each - 1]
