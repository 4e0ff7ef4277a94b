"""Facts on the tier for both halves: whose bytes it holds, how many slots it has, and how a rank opens its own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cpu_prefix_cache.slab.namespace import Namespace, Value

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.model.planner import Piece
    from cpu_prefix_cache.slab.opening import OpeningTier, TierOfRank


class RankPart(NamedTuple):
    """Part of the tier that a rank has: `slots` slots as large as its host blocks, below `region`. It is owner
    `number`, and lacks `absent` of the groups whose `pieces` these are.
    """

    region: "torch.Tensor"
    pieces: "Sequence[Piece]"
    rank: int
    number: int
    slots: int
    absent: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TierSettings(ABC):
    """Settings of a tier in which `owners` ranks have bytes of their own: plain data, which goes to all ranks."""

    namespace: Namespace
    owners: int

    @abstractmethod
    def num_slots(self, slot_bytes: int, host_blocks: int) -> int:
        """Slots of each owner. Raises ConfigurationError."""

    @abstractmethod
    def cache_options(self) -> Mapping[str, Any]:
        """Options of a TieredCache for it, besides the slots."""

    def opening(self, own: Mapping[str, Value], part: RankPart) -> "OpeningTier":
        """The tier of a rank, which opens itself. `own` are the fields of its namespace that the engine's has not.

        Raises ConfigurationError for what only the operator can change.
        """
        from cpu_prefix_cache.slab.opening import OpeningTier

        return OpeningTier(part.rank, str(self), partial(self.open, own, part))

    @abstractmethod
    def open(self, own: Mapping[str, Value], part: RankPart) -> "TierOfRank":
        """The tier, open. Raises TierUnavailable where it cannot be opened now, and ConfigurationError."""
