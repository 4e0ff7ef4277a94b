"""HostTier: the tier below a HostCache, in the process of the engine: what decides and what copies, together.

open      a thread makes or finds the files, or takes the store over, as soon as that can be (`slab/opening.py`)
step      the plan of the tier is carried out, and its report is told
timed     how fast prompts are computed, without which nobody knows whether reading saves time
close     what only the host has is written, for some seconds at most
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.stores.settings import SharedTier
from cpu_prefix_cache.tiers.tiered_cache import TieredCache

if TYPE_CHECKING:
    import torch

    from cpu_prefix_cache.kv_layout import KVGroup
    from cpu_prefix_cache.slab.namespace import Namespace
    from cpu_prefix_cache.slab.rank_tier import RankTier

NAP_SECONDS = 0.002


class _Below(NamedTuple):
    """The options of a TieredCache for its tier, which one that is, and how it is opened."""

    options: dict[str, Any]
    name: str
    open: "Callable[[], RankTier]"


class HostTier:
    """`region` is the host region, uint8 [blocks, bytes], and `options` are those of TieredCache.

    Raises ConfigurationError for what only the operator can change. Whatever else keeps the tier from being
    opened pauses it.
    """

    def __init__(
        self,
        said: FileTier | SharedTier,
        planner: HybridChunkPlanner,
        groups: "Sequence[KVGroup]",
        region: "torch.Tensor",
        device: Device,
        options: Mapping[str, Any],
    ) -> None:
        if not isinstance(said, FileTier | SharedTier):
            raise ConfigurationError(
                "below a HostCache is a FileTier(path, nbytes, model=..., revision=...), or a SharedTier(store, "
                "model=..., revision=...), since neither files nor a store tell whose KV they hold; got "
                f"{type(said).__name__}"  # which may be a URL with a password
            )
        from cpu_prefix_cache.slab.namespace import namespace_of
        from cpu_prefix_cache.slab.opening import OpeningTier

        layouts = {f"group {at} layout": f"{each.spelled}; layers {each.layers}" for at, each in enumerate(groups)}
        model, revision = said.identity
        dtype = "in each group's layout"
        namespace = namespace_of(
            planner, model=model, revision=revision, dtype=dtype, hash=said.hash, ranks=1, extra=layouts
        )
        parts = namespace, planner, region
        below = _files(said, *parts) if isinstance(said, FileTier) else _store(said, *parts)
        self.cache = TieredCache(planner, device, below_policy=said.policy, **below.options, **options)
        self._rank = OpeningTier(0, below.name, below.open)
        self._flush_seconds = said.flush_seconds
        self._computed: dict[Hashable, int] = {}  # tokens of running requests
        self._began = 0.0
        self.report()  # what is there may be asked for by the first request

    def run(self) -> None:
        """A step begins: what is to be read and written."""
        self._began = time.monotonic()
        self.cache.passed(self._began)
        self._rank.run(self.cache.plan_below())

    def reset(self, revision: str | None) -> None:
        """The files hear of it at once, because the process may end before the next step."""
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


def _files(said: FileTier, namespace: "Namespace", planner: HybridChunkPlanner, region: "torch.Tensor") -> _Below:
    from cpu_prefix_cache.slab.rank_tier import RankTier
    from cpu_prefix_cache.slab.sizing import num_slots
    from cpu_prefix_cache.slab.slab import Slab, unlocked_on_failure

    slots = num_slots(said, planner.host_block_bytes, ranks=1, host_blocks=region.shape[0])

    def open_slab() -> RankTier:
        slab = Slab.of(said, namespace, rank=0, ranks=1, slots=slots, slot_bytes=planner.host_block_bytes)
        with unlocked_on_failure(slab):
            return RankTier.of_slab(slab, region, planner.pieces, 0)

    return _Below({"slots": slots, "below_offload": said.offload}, f"the tier in {said.path}", open_slab)


def _store(said: SharedTier, namespace: "Namespace", planner: HybridChunkPlanner, region: "torch.Tensor") -> _Below:
    from cpu_prefix_cache.stores.rank_tier import tier_of_store

    slots = said.num_remembered(region.shape[0])
    options = {"slots": slots, "below_offload": said.offload, "ask_seconds": said.ask_seconds}

    def open_store() -> "RankTier":
        return tier_of_store(said.open(), namespace, region, planner.pieces, slots=slots)

    return _Below(options, f"the tier at {said.address}", open_store)
