"""PoolTier: files, or a shared store, below a keeper's pool. Threads of their own read and write; nobody waits for a
disk or a server.

All namespaces of a pool share one of the tier, which is that of its slots' size and of what a chunk and a checkpoint
take: one folder, or the values of all keepers of such pools. Which model and which revision a slot is of, its name says
(`names.py`). A slot is written whole, whatever the model has in it: another one of the pool may have more.
"""

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from cpu_prefix_cache.keeper.answers import Leased
from cpu_prefix_cache.keeper.shape import shared_planner, shared_shape
from cpu_prefix_cache.keeper.tiered_keeper import TieredKeeper
from cpu_prefix_cache.messages.request import Pending
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.model.planner import HybridChunkPlanner, Piece
from cpu_prefix_cache.node.region import Region
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.tier import RankPart, Tier

logger = logging.getLogger(__name__)

# How long the keeper may do nothing: while a question waits for the tier, while anything else moves, and while the tier
# is left alone.
READING_SECONDS, MOVING_SECONDS, PAUSED_SECONDS = 0.001, 0.01, 0.5


class PoolTier:
    """The tier that `below` describes, for the slots of a region and engines whose models are shaped as that of
    `planner`. Raises ConfigurationError for what only the operator can change.
    """

    def __init__(self, below: Tier, region: Region, planner: HybridChunkPlanner) -> None:
        planner = shared_planner(planner, region.block_bytes)
        slots = below.slots(region.block_bytes, region.num_slots)
        self.keeper = TieredKeeper(region.num_slots, region.records, planner, below.options(slots))
        pieces = [_whole(piece, region.block_bytes) for piece in planner.pieces]
        self._rank = below.opening(_namespace(planner, region), region.memory(), pieces, RankPart(slots))
        self._name, self._next = str(below), 0.0
        self._is_opening = True

    def step(self) -> Iterator[tuple[int, int, Leased | Pending | None]]:
        """Carry out what is to be done by now. Questions that are answered, as of TieredKeeper."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + READING_SECONDS
        self.keeper.passed(now)
        self.keeper.report_below(self._rank.report())
        if self._is_opening and not self.keeper.below.is_opening:
            self._is_opening = False
            found = self.keeper.below.tier_statistics().found
            logger.info("%s is open below the pool, with %d chunks", self._name, found)
        yield from self.keeper.step()
        self._rank.run(self.keeper.plan_below())

    def statistics(self) -> TierStatistics:
        return self._rank.statistics().added_to(self.keeper.tier_statistics())

    @property
    def wait_seconds(self) -> float | None:
        """How long to wait for engines before the next step. None: as long as nobody sends anything."""
        if self.keeper.is_awaited:
            return READING_SECONDS
        if self.keeper.below.has_transfers or self.keeper.below.is_opening:
            return MOVING_SECONDS
        return PAUSED_SECONDS if self.keeper.below.is_off else None

    def close(self) -> None:
        """Wait until what moves has ended, and let others have the tier."""
        self._rank.close()


def _whole(piece: Piece, block_bytes: int) -> Piece:
    return replace(piece, device_blocks=piece.host_blocks, num_bytes=piece.host_blocks * block_bytes, lanes=1)


def _namespace(planner: HybridChunkPlanner, region: Region) -> Namespace:
    shape = " ".join(map(str, shared_shape(planner)))
    fields = {"model": "all of a keeper's pool", "revision": "1", "shape": shape, "byte order": sys.byteorder}
    return Namespace((*fields.items(), ("block bytes", region.block_bytes)))
