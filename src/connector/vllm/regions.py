"""The host region of one rank: the size of its blocks, and its allocation, on all ranks of an engine or on none.

    shapes_of   host blocks have the same numbers on every rank, but their size in bytes depends on the rank's layers
    arena_of    all ranks check, and agree; all ranks allocate, and agree again

Otherwise a rank that raises would leave the others waiting (`together`).
"""

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.vllm import ranks
from connector.vllm.groups import own_block_bytes
from connector.vllm.settings import Settings
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copying import (
    ALIGNMENT,
    PAGE_BYTES,
    HostArena,
    OfferedFile,
    check_fits,
    make_shared,
    map_shared,
    take_file,
)
from cpu_prefix_cache.deciding import HybridChunkPlanner, Piece


@dataclass(frozen=True, slots=True)
class RankShapes:
    """The pieces of this rank: as many host blocks each as on every rank, but this rank's bytes. `lanes` are those of a
    host block."""

    pieces: tuple[Piece, ...]
    host_block_bytes: int
    lanes: int = 1

    def by_lane(self) -> "RankShapes":
        """The same for a copier, to which each lane is a host block (`shares.py`)."""
        pieces = (
            replace(piece, host_blocks=piece.host_blocks * self.lanes // piece.lanes, lanes=1) for piece in self.pieces
        )
        return RankShapes(tuple(pieces), self.host_block_bytes // self.lanes)


def shapes_of(
    planner: HybridChunkPlanner, parallel: ParallelConfig, kv_cache_config: KVCacheConfig, *, in_pages: bool = False
) -> RankShapes:
    """The shapes of this rank. With `in_pages` the lanes of its host blocks are whole pages, too.

    The number of host blocks of a piece is the scheduler's, which sees the first pipeline stage; its bytes are those of
    this rank's layers; and host blocks are as large as the pieces require.
    """
    counts, planned = [piece.host_blocks for piece in planner.pieces], planner.lane_bytes
    if parallel.pipeline_parallel_size > 1:
        counts, planned = ranks.as_on_the_first_stage(counts), 0
    pieces = tuple(
        replace(piece, host_blocks=n, num_bytes=piece.device_blocks * piece.group.form.kept_bytes(own))
        for piece, n, own in zip(planner.pieces, counts, own_block_bytes(kv_cache_config), strict=True)
    )
    lanes = planner.ranks
    needed = max(-(-piece.num_bytes * piece.lanes // (piece.host_blocks * lanes)) for piece in pieces)
    unit = PAGE_BYTES if in_pages else ALIGNMENT
    lane_bytes = planned if needed <= planned else -(-needed // unit) * unit
    return RankShapes(pieces, lanes * lane_bytes, lanes)


def arena_of(settings: Settings, vllm_config: VllmConfig, shapes: RankShapes, device: torch.device) -> HostArena:
    """This rank's region. Each rank calls this, and if one of them raises ConfigurationError, all do."""
    parallel = vllm_config.parallel_config
    num_blocks = settings.host_bytes // shapes.host_block_bytes
    num_bytes = num_blocks * shapes.host_block_bytes
    agree(parallel, _problem(settings, parallel))
    with ExitStack() as undo:
        with together(parallel):
            arena = HostArena(
                num_blocks,
                shapes.host_block_bytes,
                pinned_for=device,
                region=_shared_region(num_bytes, taken_ahead=device.type == "cuda") if settings.is_shared else None,
            )
            undo.callback(arena.close)
        undo.pop_all()
    return arena


def _problem(settings: Settings, parallel: ParallelConfig) -> ConfigurationError | None:
    """Why this machine cannot hold the regions of this engine; None if it can."""
    if settings.is_shared and not ranks.share_memory():
        return ConfigurationError(
            "KV of this model that is the same on all ranks of a tensor-parallel group is kept once, in memory they "
            "share, but these ranks are on several machines or in containers without a common /dev/shm; start one "
            "tensor-parallel group on each machine"
        )
    regions = max(1, parallel.local_world_size // settings.sharers)
    try:
        check_fits(settings.host_bytes * regions)
    except ConfigurationError as error:
        return error
    return None


def agree(parallel: ParallelConfig, problem: Exception | None) -> None:
    """Continue on all ranks of an engine or on none, also if it has only one."""
    if parallel.world_size > 1:
        ranks.agree(problem)
    elif problem is not None:
        raise problem


@contextmanager
def together(parallel: ParallelConfig) -> Iterator[None]:
    """Go on behind this on all ranks of an engine, or raise on all."""
    try:
        yield
    except Exception as error:
        agree(parallel, error)
        raise
    agree(parallel, None)


def _shared_region(num_bytes: int, *, taken_ahead: bool) -> mmap.mmap:
    """Region of this rank's tensor-parallel group. Raises ConfigurationError."""
    number, count = ranks.place_in_the_group()
    return _taken(num_bytes) if number else _made(num_bytes, count - 1, taken_ahead)


def _made(num_bytes: int, others: int, taken_ahead: bool) -> mmap.mmap:
    """Make the region on the first rank, for so many others, which are notified also if it cannot be made."""
    with ExitStack() as ends:
        address = None
        try:
            file, region = make_shared(num_bytes, taken_ahead=taken_ahead)
            ends.callback(os.close, file)
            offer = OfferedFile(file)
            ends.callback(offer.close)
            address = offer.address
        finally:
            ranks.as_on_the_first_of_the_group(address)
        offer.give(others)
        return region


def _taken(num_bytes: int) -> mmap.mmap:
    address = ranks.as_on_the_first_of_the_group(None)
    if address is None:
        raise ConfigurationError("the first rank of this tensor-parallel group could not make the shared region")
    file = take_file(address)
    try:
        return map_shared(file, num_bytes)
    finally:
        os.close(file)
