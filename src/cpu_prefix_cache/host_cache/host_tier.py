"""HostCacheTier: the tier below a HostCache, in the process of the engine: what decides and what copies, together.

open      a thread makes or finds the files, or takes the store over, as soon as that can be (`slab/opening.py`)
step      the plan of the tier is carried out, and its report is passed on
timed     how fast prompts are computed, without which nobody knows whether reading saves time
close     what only the host has is written, for some seconds at most
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.engine_steps import EngineTraits
from cpu_prefix_cache.slab.tier import RankPart, Tier
from cpu_prefix_cache.tiers.tiered_cache import TieredCache

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.kv_layout import KVGroup
    from cpu_prefix_cache.slab.namespace import Namespace

NAP_SECONDS = 0.002


class HostCacheTier:
    """`region` is the host region, uint8 [blocks, bytes]; the rest is as in TieredCache.

    Raises ConfigurationError for what only the operator can change. Whatever else keeps the tier from being
    opened pauses it.
    """

    def __init__(
        self,
        below: Tier,
        planner: HybridChunkPlanner,
        groups: "Sequence[KVGroup]",
        region: "torch.Tensor",
        device: Device,
        *,
        ready_blocks: int,
        options: CacheOptions,
        engine: EngineTraits,
    ) -> None:
        if not isinstance(below, Tier):
            raise ConfigurationError(
                "below a HostCache is a FileTier(path, bytes, model=..., revision=...), or a SharedTier(store, "
                "model=..., revision=...), since neither files nor a store tell whose KV they hold; got "
                f"{type(below).__name__}"  # which may be a URL with a password
            )
        namespace = _namespace(below, planner, groups)
        slots = below.slots(planner.host_block_bytes, region.shape[0])
        self.cache = TieredCache(
            planner,
            device,
            host_blocks=region.shape[0],
            below=below.options(slots),
            ready_blocks=ready_blocks,
            options=options,
            engine=engine,
        )
        self._rank = below.opening(namespace, region, planner.pieces, RankPart(slots))
        self._flush_seconds = below.flush_seconds
        self._computed: dict[Hashable, int] = {}  # tokens of running requests
        self._began = 0.0
        self.report()  # the first request may need chunks from before

    def run(self) -> None:
        """A step begins: what is to be read and written."""
        self._began = time.monotonic()
        self.cache.passed(self._began)
        self._rank.run(self.cache.plan_below())

    def reset(self, revision: str | None) -> None:
        """It reaches the files at once, because the process may end before the next step."""
        self.cache.reset(revision)
        self._rank.run(self.cache.plan_below())

    def report(self) -> None:
        self.cache.report_below(self._rank.report())

    def started(self, id: Hashable, tokens: int) -> None:
        """A request has KV of so many tokens, without computing them."""
        self._computed[id] = tokens

    def timed(self, computed: Mapping[Any, int]) -> None:
        """A step has ended, after which each request has KV of so many tokens."""
        before, seconds = self._computed, time.monotonic() - self._began
        new = sum(tokens - before[id] for id, tokens in computed.items() if id in before)
        before.update((id, tokens) for id, tokens in computed.items() if id in before)
        self.cache.prefilled(new, seconds)

    def ended(self, id: Hashable) -> None:
        self._computed.pop(id, None)

    def statistics(self) -> TierStatistics:
        seen = self._rank.statistics()
        return replace(
            self.cache.tier_statistics(),
            read_seconds=seen.read_seconds,
            write_seconds=seen.write_seconds,
            kept=seen.kept,
        )

    def drain(self) -> None:
        self._rank.drain()

    def flush(self, step: Callable[[], object]) -> None:
        """Write what only the host has, hottest first, with the steps that `step` makes."""
        deadline = time.monotonic() + self._flush_seconds
        self.cache.flush()
        while not self.cache.is_flushed and time.monotonic() < deadline:
            step()
            time.sleep(NAP_SECONDS)

    def close(self) -> None:
        """End the threads, and let others have the files."""
        self._rank.close()


def _namespace(below: Tier, planner: HybridChunkPlanner, groups: "Sequence[KVGroup]") -> "Namespace":
    layouts = {f"group {at} layout": f"{each.spelled}; layers {each.layers}" for at, each in enumerate(groups)}
    return below.namespace(planner, dtype="in each group's layout", ranks=1, extra=layouts)
