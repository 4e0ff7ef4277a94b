"""A tier below host memory, for who describes one, who joins it to an engine of several processes, and who writes a
store that machines share.

A connector imports how a tier is given (`Tier`, `parse_tier`), what must be equal for its bytes to be served
(`Namespace`), and what passes between the halves; a store's author `KeyedStore` and `Got`. Nothing here imports what
copies. `FileTier` and `SharedTier` are in `cpu_prefix_cache`, `TieredCache` in `cpu_prefix_cache.deciding`.
"""

from cpu_prefix_cache.messages.errors import TierUnavailable
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.messages.texts import check_text
from cpu_prefix_cache.messages.tier import TierOptions, TierPlan, TierReport
from cpu_prefix_cache.slab.identity import CRYPTOGRAPHIC
from cpu_prefix_cache.slab.namespace import Namespace, Value
from cpu_prefix_cache.slab.tier import RankPart, Tier
from cpu_prefix_cache.slab.weights import weights_in
from cpu_prefix_cache.stores.dialect import parse_tier
from cpu_prefix_cache.stores.keyed_store import Got, KeyedStore

__all__ = [
    "CRYPTOGRAPHIC",
    "Got",
    "KeyedStore",
    "Namespace",
    "RankPart",
    "Tier",
    "TierOptions",
    "TierPlan",
    "TierReport",
    "TierStatistics",
    "TierUnavailable",
    "Value",
    "check_text",
    "parse_tier",
    "weights_in",
]
