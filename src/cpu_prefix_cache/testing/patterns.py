"""Memory of the device and of the host, on all ranks, with patterns for bytes.

A pattern names what a block should hold: the key of its chunk, the group, the piece and the place in it. A rank reads
what a transfer copies when the plan comes, and writes it when the transfer is reported. In between what it read must
stay, unless the plan says that it may be overwritten: holds and pins are missed here first.

    begin    a plan comes: what its transfers read is read
    end      a rank has done a transfer, or failed: it is written, or torn
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cpu_prefix_cache.messages.plan import CHUNK, Direction, StepPlan, TransferPlan
from cpu_prefix_cache.model.planner import HybridChunkPlanner

POISON, TORN = "poison", "torn"
Blocks = Sequence[int]
Memory = dict[int, Any]  # of one rank, by block


class _PieceBlocks(NamedTuple):
    host: Blocks
    device: Blocks


class _Copy(NamedTuple):
    """A transfer in flight on one rank. What it has read may change if somebody may overwrite it meanwhile."""

    is_store: bool
    pieces: list[_PieceBlocks]
    read: list[Any]
    may_change: bool


class Patterns:
    """All blocks of `ranks` ranks. What nobody has written is None."""

    def __init__(self, planner: HybridChunkPlanner, ranks: int) -> None:
        self._planner = planner
        self.device: list[Memory] = [{} for _ in range(ranks)]
        self.host: list[Memory] = [{} for _ in range(ranks)]
        self._moving: list[dict[int, _Copy]] = [{} for _ in range(ranks)]

    # Patterns

    def of_chunk(self, key: bytes) -> list[Any]:
        """Patterns of the device blocks of a chunk, in the order of the groups."""
        groups = [group for group, piece in enumerate(self._planner.pieces) if piece.in_chunk]
        return [pattern for group in groups for pattern in self.of_piece(key, group, CHUNK)]

    def of_piece(self, key: bytes, group: int, block: int) -> list[Any]:
        """Patterns of the device blocks of a piece of a chunk, or of a checkpoint: by its number in the chunk."""
        return [(key, group, block, part) for part in range(self._planner.pieces[group].device_blocks)]

    def on_host(self, patterns: Sequence[Any], host_blocks: int) -> list[Any]:
        """Patterns of the host blocks that keep a piece which has these on the device."""
        return [(tuple(patterns), part) for part in range(host_blocks)]

    def write(self, blocks: Blocks, patterns: Sequence[Any]) -> None:
        """Compute on all ranks."""
        for memory in self.device:
            memory.update(zip(blocks, patterns, strict=True))

    def keep(self, blocks: Blocks, patterns: Sequence[Any]) -> None:
        """Put a piece on the host of all ranks, as if it had been stored."""
        for memory in self.host:
            memory.update(zip(blocks, self.on_host(patterns, len(blocks)), strict=True))

    def holds(self, blocks: Blocks, patterns: Sequence[Any]) -> bool:
        """Whether all ranks have these patterns on the device."""
        return all([memory.get(block) for block in blocks] == list(patterns) for memory in self.device)

    # Transfers

    def begin(self, plan: StepPlan) -> None:
        """Read what the transfers of a plan copy. What it cancels, or a load waits for, may be overwritten then."""
        free = {id for transfer in plan.transfers for id in transfer.after} | set(plan.cancelled)
        for rank, moving in enumerate(self._moving):
            for transfer in plan.transfers:
                pieces = list(self._pieces(transfer))
                is_store = transfer.direction is Direction.STORE
                read = [self._read(rank, is_store, piece) for piece in pieces]
                moving[transfer.id] = _Copy(is_store, pieces, read, transfer.holds_compute or bool(transfer.after))
            for id in free & moving.keys():
                moving[id] = moving[id]._replace(may_change=True)

    def end(self, rank: int, done: Iterable[int], failed: Iterable[int] = (), torn: Iterable[int] = ()) -> None:
        """A rank reports transfers, some of them once more. The pieces that begin with `torn` host blocks did not fit.

        Raises AssertionError where one has lost what it reads before it has ended.
        """
        bad, moving = set(torn), self._moving[rank]
        for id in sorted({*done} & moving.keys()):
            copy = moving.pop(id)
            if not copy.may_change and copy.read != [self._read(rank, copy.is_store, piece) for piece in copy.pieces]:
                raise AssertionError(f"what transfer {id} reads was overwritten before it had ended")
            for piece, read in zip(copy.pieces, copy.read, strict=True):
                self._write(rank, copy.is_store, piece, None if piece.host[0] in bad else read)
        for id in sorted({*failed} & moving.keys()):
            copy = moving.pop(id)
            for piece in copy.pieces:
                self._write(rank, copy.is_store, piece, None)

    def _pieces(self, transfer: TransferPlan) -> Iterator[_PieceBlocks]:
        for copy in transfer.copies:
            h, d = self._planner.pieces[copy.group].host_blocks, self._planner.pieces[copy.group].device_blocks
            for at in range(len(copy.host_blocks) // h):
                yield _PieceBlocks(copy.host_blocks[at * h : (at + 1) * h], copy.device_blocks[at * d : (at + 1) * d])

    def _read(self, rank: int, is_store: bool, piece: _PieceBlocks) -> list[Any]:
        memory, blocks = (self.device, piece.device) if is_store else (self.host, piece.host)
        return [memory[rank].get(block) for block in blocks]

    def _write(self, rank: int, is_store: bool, piece: _PieceBlocks, read: list[Any] | None) -> None:
        if is_store:
            parts = self.on_host(read or (), len(piece.host)) if read is not None else [TORN] * len(piece.host)
            self.host[rank].update(zip(piece.host, parts, strict=True))
            return
        whole: Sequence[Any] = read[0][0] if read and isinstance(read[0], tuple) else ()
        if read != self.on_host(whole, len(piece.host)) or len(whole) != len(piece.device):
            whole = [TORN] * len(piece.device)
        self.device[rank].update(zip(piece.device, whole, strict=True))
