"""TierBelow: the tier below a HostCache or a KeyedHostCache, in the process of the engine: both of its halves.

open      a thread makes or finds the files, or takes the store over, as soon as that can be (`slab/opening.py`)
step      the plan of the tier is carried out, and its report is passed on
close     what only the host has is written, for some seconds at most
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cpu_prefix_cache.keyed.tiered_keyed_cache import TieredKeyedCache
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.messages.tier import TierOptions
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.slab.tier import RankPart, Tier
from cpu_prefix_cache.tiers.tiered_cache import TieredCache

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.kv_layout import KVGroup
    from cpu_prefix_cache.slab.namespace import Namespace, Value
    from cpu_prefix_cache.slab.tier_copier import SlotStatistics

NAP_SECONDS = 0.002


class TierBelow:
    """The tier `below` that `cache` has. `region` is the host region, uint8 [blocks, bytes].

    Raises ConfigurationError for what only the operator can change. Whatever else keeps the tier from being
    opened pauses it.
    """

    def __init__(
        self,
        below: Tier,
        cache: TieredCache | TieredKeyedCache,
        groups: "Sequence[KVGroup]",
        region: "torch.Tensor",
    ) -> None:
        namespace = _namespace(below, cache.planner, groups)
        self._above = cache
        self._rank = below.opening(namespace, region, cache.planner.pieces, RankPart(cache.below.pool.capacity))
        self._flush_seconds = below.flush_seconds
        self._last: SlotStatistics | None = None  # of a rank that was let go
        self.report()  # the first request may need chunks from before

    def run(self) -> None:
        """A step begins: what is to be read and written."""
        self._above.passed(time.monotonic())
        self._rank.run(self._above.below.plan())

    def reset(self, revision: str | None) -> None:
        """It reaches the files at once, because the process may end before the next step."""
        self._above.reset(revision)
        self._rank.run(self._above.below.plan())

    def report(self) -> None:
        self._above.report_below(self._rank.report())

    def statistics(self) -> TierStatistics:
        of_rank = self._rank.statistics() if self._last is None else self._last
        return of_rank.added_to(self._above.tier_statistics())

    def drain(self) -> None:
        self._rank.drain()

    def flush(self, step: Callable[[], object]) -> None:
        """Write what only the host has, hottest first, with the steps that `step` makes."""
        deadline = time.monotonic() + self._flush_seconds
        self._above.below.flush()
        while not self._above.below.is_flushed and time.monotonic() < deadline:
            step()
            time.sleep(NAP_SECONDS)

    def close(self) -> None:
        """End the threads, and let others have the files. May be called again."""
        self._rank.close()

    def let_go(self) -> None:
        """Drop all views of the region, behind `close`."""
        self._last = self._rank.statistics()
        del self._rank


def options_below(below: Tier, planner: HybridChunkPlanner, host_blocks: int) -> TierOptions:
    """Options of a tier below so many host blocks. Raises ConfigurationError for what is no tier, or too small."""
    if not isinstance(below, Tier):
        raise ConfigurationError(
            "below a HostCache or a KeyedHostCache is a FileTier(path, bytes, model=..., revision=...), or a "
            "SharedTier(store, model=..., revision=...), since neither files nor a store tell whose KV they hold; got "
            f"{type(below).__name__}"  # which may be a URL with a password
        )
    return below.options(below.slots(planner.host_block_bytes, host_blocks))


def _namespace(below: Tier, planner: HybridChunkPlanner, groups: "Sequence[KVGroup]") -> "Namespace":
    return below.namespace(planner, dtype="in each group's layout", ranks=1, extra=layouts_of(groups))


def layouts_of(groups: "Sequence[KVGroup]") -> "dict[str, Value]":
    """How each group lies in its host blocks, for a namespace."""
    return {f"group {at} layout": f"{each.spelled}; layers {each.layers}" for at, each in enumerate(groups)}
