"""HostTier: the tier of files below a HostCache, in the process of the engine: what decides and what copies, together.

open      the files are made or found, and checked; a sentence says what is wrong
step      the plan of the tier is carried out, and its report is told
timed     how fast prompts are computed, without which nobody knows whether reading saves time
close     what only the host has is written, for some seconds at most
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.tiers.tiered_cache import TieredCache

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.kv_layout import KVGroup

NAP_SECONDS = 0.002


class HostTier:
    """`region` is the host region, uint8 [blocks, bytes], and `options` are those of TieredCache.

    Raises ConfigurationError when the files cannot be made, or belong to something else.
    """

    def __init__(
        self,
        said: FileTier,
        planner: HybridChunkPlanner,
        groups: "Sequence[KVGroup]",
        region: "torch.Tensor",
        device: Device,
        options: Mapping[str, Any],
    ) -> None:
        from cpu_prefix_cache.slab.namespace import namespace_of
        from cpu_prefix_cache.slab.rank_tier import RankTier
        from cpu_prefix_cache.slab.sizing import num_slots
        from cpu_prefix_cache.slab.slab import Slab

        layouts = {f"group {at} layout": each.spelled for at, each in enumerate(groups)}
        namespace = namespace_of(
            planner, model=said.model, revision=said.revision, dtype="", hash=said.hash, ranks=1, extra=layouts
        )
        sizes = {"slot_bytes": planner.host_block_bytes, "ranks": 1}
        slots = num_slots(said, namespace, host_blocks=region.shape[0], **sizes)
        self.cache = TieredCache(
            planner, device, slots=slots, below_offload=said.offload, below_policy=said.policy, **options
        )
        slab = Slab(said.path, namespace, rank=0, slots=slots, nbytes=said.nbytes, **sizes)
        self._rank = RankTier(slab, region, planner.pieces, 0)
        self._flush_seconds = said.flush_seconds
        self._computed: dict[Hashable, int] = {}  # tokens of running requests
        self._began = 0.0

    def run(self) -> None:
        """A step begins: what is to be read and written."""
        self._began = time.monotonic()
        self.cache.passed(self._began)
        self._rank.run(self.cache.plan_below())

    def reset(self) -> None:
        """The files hear of it at once, because the process may end before the next step."""
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
        return replace(self.cache.tier_statistics(), read_seconds=seen.read_seconds, write_seconds=seen.write_seconds)

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
