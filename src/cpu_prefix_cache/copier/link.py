"""Copies between device memory and the host region: the moves of one slice, by their addresses.

    MemoryLink   memory to memory, at once: for tensors that are in host memory too
    SingleLink   one call of the driver for each move, pinned or not: 3 us of the host each
    BatchedLink  one call for all of them, if they are pinned (cuMemcpyBatchAsync): 12 us, and 0.4 us each (one H200)

The last two only ask for them: they are carried out by a stream, in its order.
"""

import ctypes
from typing import Protocol

from cpu_prefix_cache.memory.driver import Driver
from cpu_prefix_cache.memory.moves import Moves
from cpu_prefix_cache.messages.plan import Direction


class Link(Protocol):
    def cross(self, direction: Direction, moves: Moves, stream: int) -> None:
        """Copy what `moves` says. `stream` is a handle of CUDA's."""


class Pinned(Protocol):
    """How far a region is pinned, from its first byte on. It may grow at any time. `HostArena` is one."""

    @property
    def pinned_bytes(self) -> int: ...

    @property
    def is_pinned(self) -> bool:
        """As a whole."""


class MemoryLink:
    def cross(self, direction: Direction, moves: Moves, stream: int) -> None:
        for there, here, size in moves.listed():
            ctypes.memmove(*_to_and_of(direction, there, here), size)


class SingleLink:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def cross(self, direction: Direction, moves: Moves, stream: int) -> None:
        for there, here, size in moves.listed():
            self._driver.copy(*_to_and_of(direction, there, here), size, stream)


class BatchedLink:
    """Of a region from address `base` on. What is not pinned by now goes move by move."""

    def __init__(self, driver: Driver, base: int, pinned: Pinned) -> None:
        self._driver, self._base, self._pinned = driver, base, pinned
        self._single = SingleLink(driver)

    def cross(self, direction: Direction, moves: Moves, stream: int) -> None:
        if not self._pinned.is_pinned and not self._are_pinned(moves):
            self._single.cross(direction, moves, stream)
            return
        self._driver.copy_batch(*_to_and_of(direction, moves.device, moves.host), moves.size, moves.count, stream)

    def _are_pinned(self, moves: Moves) -> bool:
        end = self._base + self._pinned.pinned_bytes
        return all(here + size <= end for _, here, size in moves.listed())


def _to_and_of(direction: Direction, there: int, here: int) -> tuple[int, int]:
    return (here, there) if direction is Direction.STORE else (there, here)
