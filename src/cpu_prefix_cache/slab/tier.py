"""Tier: a tier below host memory as a user describes it. It opens itself, for an engine in one process and for ranks.

    slots      how many slots each owner has: a rank whose host memory, and so whose part of the tier, is its own
    options    what the cache above it is to know
    namespace  what must be equal for its KV to be served by another engine
    opening    the tier of one rank, which a thread of its own opens (opening.py)

Knows no torch, so that the process that decides can read it, too.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.texts import check_text
from cpu_prefix_cache.messages.tier import TierOptions
from cpu_prefix_cache.slab.identity import Identified

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.model.planner import Piece
    from cpu_prefix_cache.slab.namespace import Namespace
    from cpu_prefix_cache.slab.opening import OpeningTier
    from cpu_prefix_cache.slab.rank_tier import RankTier


class RankPart(NamedTuple):
    """The part of a tier that `rank` has: `slots` slots, as number `number` of the `owners`.

    A load is given up when reads of files stall for `stall_seconds` (TierCopier); None: never. Those of a store end by
    themselves.
    """

    slots: int
    rank: int = 0
    number: int = 0
    owners: int = 1
    stall_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier(Identified, ABC):
    """Options that every tier has, beside those that identify its KV. Some connectors know all of these.

    `offload` is "lazy", "eager" or None: the decider chooses. `flush_seconds` are spent at most at the end of the
    process on KV that is not in the tier yet.

    Raises ConfigurationError.
    """

    offload: str | None = None
    policy: str = "lru"
    flush_seconds: float = 10.0

    MODES: ClassVar[tuple[str | None, ...]] = ("lazy", "eager", None)

    def __post_init__(self) -> None:
        check_option("offload", self.offload, self.offload in self.MODES, " or ".join(map(str, self.MODES)))
        check_text("policy of a tier", self.policy)
        is_right = is_seconds(self.flush_seconds) and self.flush_seconds >= 0
        check_option("flush_seconds", self.flush_seconds, is_right, "a number of seconds, at least 0")
        Identified.__post_init__(self)

    def of_engine(self, number: int) -> Self:
        """The tier of one of several engines that were started with the same options, numbered from 0."""
        return self

    @abstractmethod
    def slots(self, slot_bytes: int, host_blocks: int, owners: int = 1) -> int:
        """Slots of each owner below so many host blocks. Raises ConfigurationError where they are too few."""

    def options(self, slots: int) -> TierOptions:
        """Options of a TieredCache above so many of its slots."""
        return TierOptions(slots, self.offload, self.policy)

    def opening(
        self, namespace: "Namespace", region: "torch.Tensor | memoryview", pieces: "Sequence[Piece]", part: RankPart
    ) -> "OpeningTier":
        """The tier of a rank with the host memory `region`, uint8 [blocks, bytes], a tensor or a view, in which
        `pieces` lie.

        Raises ConfigurationError for what only the operator can change. Whatever else keeps it from being opened pauses
        it.
        """
        from cpu_prefix_cache.slab.opening import OpeningTier

        return OpeningTier(part.rank, str(self), partial(self.open, namespace, region, pieces, part))

    @abstractmethod
    def open(
        self, namespace: "Namespace", region: "torch.Tensor | memoryview", pieces: "Sequence[Piece]", part: RankPart
    ) -> "RankTier":
        """The same, open. Raises TierUnavailable where it cannot be opened now, and ConfigurationError."""


def check_option(name: str, value: object, is_right: bool, words: str, *, place: str = "tier") -> None:
    """Raise ConfigurationError unless this option of a `place` is right, with the words for one that is."""
    if not is_right:
        raise ConfigurationError(f"{name} of a {place} is {words}; got {value!r}")


def is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
