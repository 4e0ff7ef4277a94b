"""The tier of one rank over a store that several machines share."""

from collections.abc import Sequence

import torch

from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.stores.asker import Asker
from cpu_prefix_cache.stores.keyed_slots import KeyedSlots
from cpu_prefix_cache.stores.keyed_store import KeyedStore


def tier_of_store(
    store: KeyedStore,
    namespace: Namespace,
    region: torch.Tensor,
    pieces: Sequence[Piece],
    *,
    rank: int = 0,
    number: int = 0,
    owners: int = 1,
    slots: int,
) -> RankTier:
    """Of `rank`, number `number` of those that have bytes of their own. The first rank asks the store for all: what
    another one lacks is refused when it is read.
    """
    sizes = {"slots": slots, "slot_bytes": region.shape[1]}
    keyed = KeyedSlots(store, namespace, number=number, owners=owners, **sizes)
    return RankTier(keyed, region, pieces, rank, Asker(store, lambda: keyed.names, pieces) if rank == 0 else None)
