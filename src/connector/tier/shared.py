"""A tier in a store that machines share: each owner opens the store by its URL, and has values of its own in it.

After a reset in this process, values have names that no other process has, or those of the revision that the option
`revision_file` names (`revision.py`, `stores/keyed_slots.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from connector.tier.namespace import RankNamespace
from connector.tier.settings import RankPart, TierSettings
from cpu_prefix_cache.slab.namespace import Value
from cpu_prefix_cache.stores.settings import SharedTier

if TYPE_CHECKING:
    from cpu_prefix_cache.slab.opening import TierOfRank


@dataclass(frozen=True)
class SharedTierSettings(TierSettings):
    said: SharedTier

    def num_slots(self, slot_bytes: int, host_blocks: int) -> int:
        return self.said.num_remembered(host_blocks)

    def cache_options(self) -> Mapping[str, Any]:
        return {"below_offload": self.said.offload, "ask_seconds": self.said.ask_seconds}

    def open(self, own: Mapping[str, Value], part: RankPart) -> "TierOfRank":
        from connector.tier.owner import Owner
        from cpu_prefix_cache.stores.rank_tier import tier_of_store

        namespace = RankNamespace.of(self.namespace, own)
        owner = {"number": part.number, "owners": self.owners, "slots": part.slots}
        tier = tier_of_store(self.said.open(), namespace, part.region, part.pieces, rank=part.rank, **owner)
        return Owner(tier, part.region, part.absent)

    def __str__(self) -> str:
        return f"a tier in {self.said.address}"
