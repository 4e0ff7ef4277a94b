"""The slab of a rank that has a host region of its own.

After a reset a mark is left in the folder. Weights may have been replaced then, in place, and nothing says by which. So
after the next start nothing of before is served: what was written before the reset, nor after it.

A rank may lack some of the model's groups (a pipeline stage). Their host blocks hold nothing there, are zeroed, and are
written all the same: so the records of any rank say which chunks are whole.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from connector.tier.namespace import RankNamespace
from connector.tier.settings import TierSettings
from cpu_prefix_cache import ConfigurationError, Direction
from cpu_prefix_cache.messages.tier import TierPlan, TierReport
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.durable import write_durably
from cpu_prefix_cache.slab.folder import rank_folder
from cpu_prefix_cache.slab.manifest import read_manifest
from cpu_prefix_cache.slab.namespace import Namespace, Value
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.slab.slab_copier import SlabStatistics

MARK = "was-reset"


def open_slab(tier: TierSettings, own: Mapping[str, Value], *, number: int, slots: int, slot_bytes: int) -> Slab:
    """Slab `number` of the engine. `own` are the fields of the rank's namespace that the engine's has not.

    Raises ConfigurationError when the files cannot be made, or hold bytes that `own` does not describe.
    """
    tier.make_folder()
    namespace = RankNamespace.of(tier.namespace, own)
    _check_same(rank_folder(tier.said.path, namespace, number, tier.slabs), namespace)
    return Slab(
        tier.said.path,
        namespace,
        rank=number,
        ranks=tier.slabs,
        slots=slots,
        slot_bytes=slot_bytes,
        nbytes=tier.said.nbytes,
    )


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
        """Begin one step's transfers."""
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
        """Whether a transfer had not ended at the last plan or report."""
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
