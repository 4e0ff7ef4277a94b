"""A tier in files: each owner has a slab in the engine's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connector.tier.namespace import RankNamespace
from connector.tier.settings import RankPart, TierSettings
from cpu_prefix_cache.slab.namespace import Value
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.sizing import num_slots

if TYPE_CHECKING:
    from cpu_prefix_cache.slab.opening import TierOfRank


@dataclass(frozen=True)
class FileTierSettings(TierSettings):
    said: FileTier

    def num_slots(self, slot_bytes: int, host_blocks: int) -> int:
        return num_slots(self.said, slot_bytes, self.owners, host_blocks)

    def cache_options(self) -> Mapping[str, Any]:
        return {"below_offload": self.said.offload}

    def open(self, own: Mapping[str, Value], part: RankPart) -> "TierOfRank":
        from connector.tier.owner import Owner
        from cpu_prefix_cache.slab.rank_tier import RankTier
        from cpu_prefix_cache.slab.slab import Slab, unlocked_on_failure

        sizes = {"ranks": self.owners, "slots": part.slots, "slot_bytes": part.region.shape[1]}
        slab = Slab.of(self.said, RankNamespace.of(self.namespace, own), rank=part.number, **sizes)
        with unlocked_on_failure(slab):
            tier = RankTier.of_slab(slab, part.region, part.pieces, part.rank)
            return Owner(tier, part.region, part.absent)

    def __str__(self) -> str:
        return f"a tier of {self.said.nbytes / 2**30:,.1f} GiB in {self.said.folder}"
