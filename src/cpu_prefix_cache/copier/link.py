"""Copies between device memory and the host region: the moves of one slice, by their addresses.

If the driver has batches and all moves are pinned, they are one call: 12 us of the host, and 0.4 us for each. Else each
is a call: 3 us (one H200), and with HIP 10 to 12, as its users report.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import partial

import torch

from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import Driver
from cpu_prefix_cache.memory.moves import SEAM_BYTES, Moves, Span, moves_of
from cpu_prefix_cache.memory.span_tables import SpanTable
from cpu_prefix_cache.messages.plan import Direction


class HostRegion:
    """The host region `blocks`, uint8 [host blocks, bytes]. `arena`, which it begins, has the number of bytes pinned by
    now; None: it is pinned. Without a `driver`, for tensors in host memory, a copy is done at once."""

    def __init__(
        self, blocks: torch.Tensor, driver: Driver | None, arena: HostArena | None, seam_bytes: int = SEAM_BYTES
    ) -> None:
        self.block_bytes = blocks.shape[1]
        self._begin, self._end = blocks.data_ptr(), blocks.data_ptr() + blocks.numel()
        self._driver, self._arena, self.seam_bytes = driver, arena, seam_bytes

    def crossing(self, direction: Direction, spans: Iterable[Span]) -> Callable[[int], object]:
        """Has a stream, given by its handle, copy these spans, which have addresses on the device."""
        if isinstance(spans, SpanTable):
            return partial(self.cross, direction, spans.moves(self._begin))
        return partial(self.cross, direction, moves_of(spans, self._begin, self.seam_bytes))

    def cross(self, direction: Direction, moves: Moves, stream: int) -> None:
        """Have a stream, given by its handle, carry out these moves."""
        stores = direction is Direction.STORE
        pinned = self._are_pinned(moves)
        if self._driver is not None and self._driver.has_batches and pinned:
            to, of = (moves.host, moves.device) if stores else (moves.device, moves.host)
            self._driver.copy_batch(to, of, moves.size, moves.count, stream)
            return
        for device, host, size in moves.listed():
            to, of = (host, device) if stores else (device, host)
            if self._driver is None:
                ctypes.memmove(to, of, size)
            else:
                self._driver.copy(to, of, size, stream, pinned)

    def _are_pinned(self, moves: Moves) -> bool:
        end = self._end if self._arena is None else self._begin + self._arena.pinned_bytes
        return end >= self._end or all(host + size <= end for _, host, size in moves.listed())
