"""The tier of one rank: its slab, opened on all ranks of an engine or on none.

Each host region has one slab. Ranks that share a region (MLA under tensor parallelism) leave it to the first of them,
the owner: it reads and writes for all. The others report each transfer as done at once. A transfer is over when all
ranks have reported it, so it is over when the owner has done it.

Every owner carries out the whole plan. A pipeline stage may lack some of the model's groups. Their host blocks hold
nothing there, are zeroed, and are written all the same: so the records of any rank say which chunks are whole.

After a reset a mark is left in the folder. Weights may have been replaced then, in place, and nothing says by which. So
after the next start nothing of before is served: what was written before the reset, nor after it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from vllm.config import ParallelConfig

from connector.vllm import ranks
from connector.vllm.regions import Shapes, agree
from connector.vllm.settings import Settings
from connector.vllm.tier_namespace import RankNamespace
from connector.vllm.tier_settings import TierSettings
from cpu_prefix_cache import ConfigurationError, Direction, RankReport
from cpu_prefix_cache.messages.tier import TierPlan, TierReport
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.durable import write_durably
from cpu_prefix_cache.slab.folder import rank_folder
from cpu_prefix_cache.slab.manifest import read_manifest
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.slab.slab_copier import SlabStatistics

ORDER = "row order"  # a rank's own field in its namespace
MARK = "was-reset"


class TierOfRank(Protocol):
    def run(self, plan: TierPlan) -> None:
        """Begin one step's transfers."""

    def report(self) -> TierReport: ...

    @property
    def is_busy(self) -> bool:
        """Whether a transfer had not ended at the last plan or report."""

    def statistics(self) -> SlabStatistics | None: ...

    def close(self) -> None: ...


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


class Owner:
    """A rank with a slab. `region` is its host memory, `pieces` those of all groups, of which it lacks `absent`."""

    def __init__(
        self, slab: Slab, region: torch.Tensor, pieces: Sequence[Piece], rank: int, absent: frozenset[int] = frozenset()
    ) -> None:
        self._region, self._absent = region, absent
        self._mark = Path(slab.folder) / MARK
        self._first_generation = 0  # that no reset has raised in this process
        if self._mark.exists():
            slab.advance(slab.next_generation)
            self._mark.unlink()
        self._tier = RankTier(slab, region, pieces, rank)

    def run(self, plan: TierPlan) -> None:
        if plan.first_generation > self._first_generation:
            write_durably(self._mark, b"")
            self._first_generation = plan.first_generation
        if self._absent:
            self._zero(plan)
        self._tier.run(plan)

    def report(self) -> TierReport:
        return self._tier.report()

    @property
    def is_busy(self) -> bool:
        return self._tier.is_busy

    def statistics(self) -> SlabStatistics:
        return self._tier.statistics()

    def close(self) -> None:
        self._tier.close()

    def _zero(self, plan: TierPlan) -> None:
        """What is stored of groups that this rank lacks: bytes of others may have been left in their host blocks."""
        stores = (each for each in plan.step.transfers if each.direction is Direction.STORE)
        for copy in (copy for store in stores for copy in store.copies if copy.group in self._absent):
            self._region[list(copy.device_blocks)] = 0


def tier_of_rank(
    settings: Settings, parallel: ParallelConfig, shapes: Shapes, region: torch.Tensor, order: str
) -> TierOfRank | None:
    """The tier of this rank; None without one. Each rank calls this, and if one of them raises, all do.

    `shapes` are those of all groups, also of those without layers here; `order` says how this rank's rows lie.
    """
    tier = settings.tier
    if tier is None:
        return None
    namespace, slots = _agreed(tier, settings.host_blocks, parallel, shapes.host_block_bytes)
    sharers = parallel.tensor_parallel_size if settings.is_shared else 1
    rank: int = parallel.rank
    opened: TierOfRank | None = None
    problem: Exception | None = None
    try:
        if rank % sharers:
            opened = Onlooker(rank)
        else:
            slab = _slab(tier, RankNamespace.of(namespace, {ORDER: order}), rank // sharers, slots, shapes)
            absent = frozenset(at for at, piece in enumerate(shapes.pieces) if not piece.num_bytes)
            opened = Owner(slab, region, [_filled(each, slab.slot_bytes) for each in shapes.pieces], rank, absent)
    except Exception as error:
        problem = error
    try:
        agree(parallel, problem)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    return opened


def _agreed(tier: TierSettings, host_blocks: int, parallel: ParallelConfig, slot_bytes: int) -> tuple[Namespace, int]:
    """The namespace and the number of slots, as the first rank says: files have other times on other machines."""
    slots, problem = 0, None
    largest = slot_bytes if parallel.world_size == 1 else ranks.largest(slot_bytes)
    if not parallel.rank:
        try:
            slots = tier.num_slots(largest, host_blocks)
        except Exception as error:
            problem = error
    agree(parallel, problem)
    said: tuple[Namespace, int] = (tier.namespace, slots)
    return said if parallel.world_size == 1 else ranks.as_on_the_first(said)


def _slab(tier: TierSettings, namespace: Namespace, number: int, slots: int, shapes: Shapes) -> Slab:
    tier.make_folder()
    folder = rank_folder(tier.said.path, namespace, number, tier.slabs)
    _check_same(folder, namespace)
    return Slab(
        tier.said.path,
        namespace,
        rank=number,
        ranks=tier.slabs,
        slots=slots,
        slot_bytes=shapes.host_block_bytes,
        nbytes=tier.said.nbytes,
    )


def _check_same(folder: Path, namespace: Namespace) -> None:
    """Raise ConfigurationError if the folder's bytes lie in another order than this rank's."""
    there = read_manifest(folder)
    before = {} if there is None else there.get("namespace", {})
    for name, value in namespace.fields if there is not None else ():
        if before.get(name) != value:
            raise ConfigurationError(
                f"{folder} was written with {name} {before.get(name)!r}, and this rank has {value!r}; delete the "
                "folder, or give the tier another path"
            )


def _filled(piece: Piece, slot_bytes: int) -> Piece:
    """A piece of a group that this rank lacks takes all of its host blocks."""
    return piece if piece.num_bytes else replace(piece, num_bytes=piece.host_blocks * slot_bytes)
