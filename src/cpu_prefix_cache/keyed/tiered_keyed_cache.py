"""TieredKeyedCache: a KeyedCache with a tier below it.

    lookup    finds what the host has and what the tier has; a lease keeps both
    load      what the host lacks is read into it, in slices; the load begins when all of it is here
    report    of the tier: what was read is committed to the host
    put       and what the host has is written below, as in every tier

A load whose keys are gone, find no room on the host or are not read by its deadline ends as one that has failed. While
the host grows, it waits for room until its deadline, which each part of the host that becomes ready puts off.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from cpu_prefix_cache.keyed.given import Given
from cpu_prefix_cache.keyed.key_planner import KeyPlanner
from cpu_prefix_cache.keyed.keyed_cache import KeyedCache
from cpu_prefix_cache.keyed.keyed_load import KeyedLoad
from cpu_prefix_cache.keyed.stretches import Nodes, ends, holders, presence
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.messages.plan import RankReport
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.messages.tier import TierOptions, TierReport
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.edge import Ended
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.offload.transfers import Promotion
from cpu_prefix_cache.tiers.tier_cache import TierCache

GRACE_SECONDS = 1.0  # beyond twice the time that reading takes: a disk that is busy


class TieredKeyedCache(KeyedCache):
    """A KeyedCache with a tier that has the options `below`. Its planner is `in_pages`.

    Raises ConfigurationError for a tier smaller than twice the host, for one that others write, too, and for more than
    one group beside the prefix groups.
    """

    def __init__(
        self,
        planner: KeyPlanner,
        *,
        host_blocks: int,
        below: TierOptions,
        ready_blocks: int | None = None,
        policy: str = "lru",
    ) -> None:
        _check(planner, below)
        super().__init__(
            planner,
            host_blocks=host_blocks,
            ready_blocks=ready_blocks,
            policy=policy,
            is_above_tier=True,
        )
        self.below = TierCache(planner, self.pool, below, CacheOptions(policy=policy), ranks=1)
        self._pools.append(self.below.pool)
        self._reads: dict[Hashable, Promotion] = {}  # by id
        self._waiting: list[KeyedLoad] = []
        self._ready: list[KeyedLoad] = []
        self._read_tokens = 0
        self._now = 0.0

    # Lookups and loads

    def _find(self, keys: Sequence[bytes]) -> list[Nodes]:
        host, below = self.pool.find_all(keys), self.below.pool
        slots = below.find_all(keys) if self.below.can_be_read else [None] * len(keys)
        return [host, [slot if node is None else None for node, slot in zip(host, slots, strict=True)]]

    def load(self, keys: Sequence[bytes], blocks: Given, now: float) -> KeyedLoad:
        load = super().load(keys, blocks, now)
        if load.is_gone and self._is_below(load):
            load.is_gone, load.waits = False, True
            self._hold(load)
            self._read(load)
            self._waiting.append(load)
        return load

    def take_ready(self) -> list[KeyedLoad]:
        ready, self._ready = self._ready, []
        return ready

    def _topmost(self, load: KeyedLoad) -> int:
        """Which of the keys is the first whose chunk the host has to have: a side hangs below its chunk, which need not
        be loaded with it.
        """
        return len(load.keys) - max(load.blocks.chunks, *map(len, load.blocks.sides.values()), 0)

    def _names(self, load: KeyedLoad) -> list[bytes]:
        """The keys of all nodes that the host has to have for a load."""
        sides = self._wanted_sides(load.keys, load.blocks)
        names = [*load.keys[self._topmost(load) :]]
        return names + [name for at, last in sides for name in self.planner.side_keys(last, at)]

    def _is_below(self, load: KeyedLoad) -> bool:
        """Whether host and tier together have all of it, or will."""
        names = self._names(load)
        return self._has_or_reads(names, self._find(names))

    def _has_or_reads(self, names: Sequence[bytes], found: Sequence[Nodes]) -> bool:
        """Whether what none of these pools has is being written to the host."""
        writing = self.edge.ledger.writing
        here = zip(names, presence(found), strict=True)
        return not self.is_off and all(is_here or name in writing for name, is_here in here)

    def _hold(self, load: KeyedLoad) -> None:
        """Keep what the host has of it by now."""
        before, nodes, chunks = load.pin, self.pool.find_all(self._names(load)), len(load.keys) - self._topmost(load)
        kept = holders(self.pool, nodes[:chunks], nodes[chunks:])
        load.pin = self.pool.pin(*kept) if kept else None
        self.pool.unpin(before)

    def _read(self, load: KeyedLoad) -> None:
        """Begin to read what the host lacks, as far as there is room."""
        load.host_blocks, queue = self.pool.ready, self.below.queue_bytes
        for chain in self._missing(load.keys, self._topmost(load)):
            self._promote(self._stores, chain)
        for at, keys in self._wanted_sides(load.keys, load.blocks):
            for chain in self._missing_sides(at, keys):
                self._promote(self._side_stores[at], chain)
        load.deadline = self._now + 2 * self.below.seconds_to_read(queue + self.below.queue_bytes) + GRACE_SECONDS

    def _promote(self, stores: StorePlanner, chain: Chain) -> None:
        for part in self._slices(chain):
            store = stores.receive(part, self.pool.touch(None), "load")
            if store is None:
                return
            self._reads[store.id] = store
            self.below.read(store.id, part.first(len(store.nodes)), store.nodes)
            self._read_tokens += min(len(store.nodes), len(part.keys)) * self.planner.grid_tokens

    def _slices(self, chain: Chain) -> Iterator[Chain]:
        """The parts of a chain that hang together in the tier, too, each no longer than one read."""
        if chain.checkpoint is not None:
            yield chain
            return
        above, begin = chain.parent_key, 0
        for end, _ in reversed([*ends(self.below.pool, self.below.pool.find_all(chain.keys))]):
            while begin < end:
                part = chain.keys[begin : min(end, begin + self.below.slice_chunks)]
                yield Chain(above, part)
                above, begin = part[-1], begin + len(part)

    def _advance(self) -> None:
        """Begin the loads that have all they need, and end those that will not."""
        for load in list(self._waiting):
            if not self._begin(load, self._now):
                if self._now < load.deadline and self._goes_on(load):
                    self._hold(load)
                    continue
                load.is_gone = True
            load.waits = False
            self._waiting.remove(load)
            self._ready.append(load)
            self.pool.unpin(load.pin)
            load.pin = None

    def _goes_on(self, load: KeyedLoad) -> bool:
        """Whether what a load lacks is on its way, or may find room when more of the host is ready."""
        if load.host_blocks < self.pool.ready:
            self._hold(load)
            self._read(load)
        names = self._names(load)
        found = self._find(names) if self.pool.ready < self.pool.capacity else [self.pool.find_all(names)]
        return self._has_or_reads(names, found)

    # Events

    def passed(self, now: float) -> None:
        """Time has come to `now`."""
        self._now = now
        self.below.passed(now)
        self._advance()

    def report(self, report: RankReport) -> list[Ended]:
        ended = super().report(report)
        for each in ended:
            self.below.arrived(each.committed)
        return ended

    def report_below(self, report: TierReport) -> None:
        """The tier has finished transfers."""
        for ended, load in self.below.report(report):
            store = self._reads.pop(load.owner)
            self.below.arrived(self.edge.promoted(store, ended.ok, load.good))
        self._advance()

    def reset(self, revision: str | None = None) -> None:
        """As of any cache. Who names the same `revision` finds in the tier what was stored under it."""
        super().reset()
        self.below.reset(revision)
        self._advance()

    def tier_statistics(self) -> TierStatistics:
        return replace(self.below.tier_statistics(), hit_tokens=self._read_tokens)

    def check_valid(self) -> None:
        super().check_valid()
        self.below.edge.check_valid()


def _check(planner: KeyPlanner, below: TierOptions) -> None:
    if below.ask_seconds is not None:
        raise ConfigurationError(
            "lookups by keys are answered at once, and a store that machines share takes time: take a FileTier"
        )
    if len(planner.side_groups) > 1:
        names = ", ".join(repr(planner.groups[at].name) for at in planner.side_groups)
        raise ConfigurationError(
            f"a tier below blocks by keys keeps one group beside the prefix groups, and {names} are more: leave out "
            "below, or the groups that are computed again at little cost"
        )
