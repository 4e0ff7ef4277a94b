"""The tier of one rank: refused on all ranks of an engine, or on none.

Each host region has its own part of the tier. Ranks that share a region (MLA under tensor parallelism) leave it to the
first of them, the owner: it reads and writes for all. The others report each transfer as done at once. A transfer is
over when all ranks have reported it, so it is over when the owner has done it.

Every owner carries out the whole plan, also a pipeline stage that lacks some of the model's groups.
"""

import math

import torch
from vllm.config import ParallelConfig

from connector.tier.cache import EngineTier
from connector.tier.namespace import RankNamespace
from connector.vllm import ranks
from connector.vllm.regions import RankShapes, agree
from connector.vllm.settings import Settings
from cpu_prefix_cache.copying import OpeningTier
from cpu_prefix_cache.deciding import RankReport
from cpu_prefix_cache.tier import Namespace, RankPart, TierPlan, TierReport

ORDER = "row order"  # a rank's own field in its namespace


class Onlooker:
    """A rank whose host region is read and written by another one."""

    is_busy = False

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._done: set[int] = set()

    def run(self, plan: TierPlan) -> None:
        step = plan.step
        self._done = {id for id in self._done if id >= step.resolved_below}.difference(step.resolved)
        self._done.update(transfer.id for transfer in step.transfers)

    def report(self) -> TierReport:
        return TierReport(
            RankReport(self._rank, frozenset(self._done), load_bytes_per_second=math.inf), is_scanned=True
        )

    def statistics(self) -> None:
        return None

    def close(self) -> None:
        pass


TierHere = OpeningTier | Onlooker


def tier_of_rank(
    settings: Settings, parallel: ParallelConfig, shapes: RankShapes, region: torch.Tensor, order: str
) -> TierHere | None:
    """The tier of this rank; None without one. Each rank calls this, and if one of them raises, all do.

    `shapes` are those of all groups, also of those without layers here; `order` is the order of this rank's rows.
    """
    tier = settings.tier
    if tier is None:
        return None
    namespace, slots = _agreed(tier, settings.host_blocks, parallel, shapes.host_block_bytes)
    sharers = settings.sharers
    rank: int = parallel.rank
    opened: TierHere | None = None
    problem: Exception | None = None
    try:
        if rank % sharers:
            opened = Onlooker(rank)
        else:
            part = RankPart(slots, rank, rank // sharers, tier.owners)
            opened = tier.tier.opening(RankNamespace.of(namespace, {ORDER: order}), region, shapes.pieces, part)
    except Exception as error:
        problem = error
    try:
        agree(parallel, problem)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    return opened


def _agreed(tier: EngineTier, host_blocks: int, parallel: ParallelConfig, slot_bytes: int) -> tuple[Namespace, int]:
    """The namespace and the number of slots, from the first rank: files have other times on other machines."""
    slots, problem = 0, None
    largest = slot_bytes if parallel.world_size == 1 else ranks.largest(slot_bytes)
    if not parallel.rank:
        try:
            slots = tier.slots(largest, host_blocks)
        except Exception as error:
            problem = error
    agree(parallel, problem)
    said: tuple[Namespace, int] = (tier.namespace, slots)
    return said if parallel.world_size == 1 else ranks.as_on_the_first(said)
