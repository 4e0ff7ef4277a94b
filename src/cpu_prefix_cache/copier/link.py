"""Copies between device memory and the host region: the moves of one slice, by their addresses.

MemoryLink   copies memory at once: for tensors in host memory
DriverLink   copies in the order of a stream: by one call if the driver has batches and all moves are pinned (12 us of
             the host, and 0.4 us each), else by a call each (3 us; one H200)
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import partial

import torch

from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import Driver, cuda_driver
from cpu_prefix_cache.memory.moves import SEAM_BYTES, Moves, Span, moves_of
from cpu_prefix_cache.messages.plan import Direction


class MemoryLink:
    def cross(self, direction: Direction, moves: Moves, stream: int) -> None:
        for there, here, size in moves.listed():
            ctypes.memmove(*_to_and_of(direction, there, here), size)


class DriverLink:
    """`blocks` is the host region, or begins it. `arena` says how far it is pinned by now; None: it is pinned."""

    def __init__(self, driver: Driver, blocks: torch.Tensor, arena: HostArena | None) -> None:
        self._driver, self._arena = driver, arena
        self._begin, self._end = blocks.data_ptr(), blocks.data_ptr() + blocks.numel()

    def cross(self, direction: Direction, moves: Moves, stream: int) -> None:
        if self._driver.has_batches and self._are_pinned(moves):
            addresses = _to_and_of(direction, moves.device, moves.host)
            self._driver.copy_batch(*addresses, moves.size, moves.count, stream)
            return
        for there, here, size in moves.listed():
            self._driver.copy(*_to_and_of(direction, there, here), size, stream)

    def _are_pinned(self, moves: Moves) -> bool:
        end = self._end if self._arena is None else self._begin + self._arena.pinned_bytes
        return end >= self._end or all(here + size <= end for _, here, size in moves.listed())


class Region:
    """The host region `blocks`, uint8 [host blocks, bytes]: its `link` to a device, and its seams."""

    def __init__(
        self, blocks: torch.Tensor, device: torch.device, arena: HostArena | None, seam_bytes: int = SEAM_BYTES
    ) -> None:
        self.block_bytes = blocks.shape[1]
        self._base, self._seam_bytes = blocks.data_ptr(), seam_bytes
        self.link = DriverLink(cuda_driver(), blocks, arena) if device.type == "cuda" else MemoryLink()

    def crossing(self, direction: Direction, spans: Iterable[Span]) -> Callable[[int], object]:
        """Has a stream, given by its handle, copy these spans, which have addresses on the device."""
        return partial(self.link.cross, direction, moves_of(spans, self._base, self._seam_bytes))


def _to_and_of(direction: Direction, there: int, here: int) -> tuple[int, int]:
    return (here, there) if direction is Direction.STORE else (there, here)
