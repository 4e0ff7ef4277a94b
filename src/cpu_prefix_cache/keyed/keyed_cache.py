"""KeyedCache: a host cache of blocks by keys, for an engine that decides by itself what is kept and what is loaded.

    put       the engine has blocks of these keys: what the host lacks is stored
    lookup    which of these keys are here, and where a request could resume: a lease keeps them
    load      into these device blocks
    release   a lease ends

Its edge is that of every host cache: planned, moving, landed, committed. A put is stored as chunks that hang one below
the other, and below the key before them where the host has that, else apart. So lookups here go by each key, and not by
the forest, which decides what is evicted and what a pin holds.

    put k0 k1 k2       root --- k0 --- k1 --- k2
    put k3 k4             `---- k3 --- k4           the engine gave k3 and k4 alone: nobody knows that k2 comes before
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice

from cpu_prefix_cache.keyed.found_keys import FoundKeys
from cpu_prefix_cache.keyed.given import Given, GivenBlocks
from cpu_prefix_cache.keyed.key_planner import KeyPlanner
from cpu_prefix_cache.keyed.keyed_load import KeyedLoad
from cpu_prefix_cache.keyed.stretches import Nodes, ends, holders, presence, whole
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.options import USUAL_OPTIONS
from cpu_prefix_cache.messages.plan import GroupCopy, RankReport, StepPlan
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.messages.stats import CacheStatistics
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.offload.edge import Edge, Ended
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.offload.transfers import LoadTransfer, StoreTransfer, TransferLedger
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, new_pool

logger = logging.getLogger(__name__)


class KeyedCache:
    """`host_blocks` blocks of `planner.host_block_bytes` bytes on each rank, of which `ready_blocks` may be used at
    once. With `is_above_tier` the host declines nothing.

    Raises ConfigurationError for an unknown policy, and for `arc`: its ghosts are found from the beginning of a prompt
    on, and keys that begin anywhere would be in the middle of what it remembers.
    """

    def __init__(
        self,
        planner: KeyPlanner,
        *,
        host_blocks: int,
        ready_blocks: int | None = None,
        policy: str = "lru",
        is_above_tier: bool = False,
    ) -> None:
        if policy == "arc":
            raise ConfigurationError(
                "the policy 'arc' takes prompts from their first token on, and blocks by keys may begin anywhere: take "
                "'lru' or 'adaptive'"
            )
        self.planner = planner
        thresholds = None if is_above_tier else USUAL_OPTIONS
        self.pool = new_pool(planner, host_blocks, policy, ready=ready_blocks, thresholds=thresholds)
        self._pools = [self.pool]
        self._given = GivenBlocks(planner)
        self._coordinator, ledger = KVCacheCoordinator(planner, self.pool), TransferLedger(ranks=1)
        self._stores = StorePlanner(self._coordinator, self._given, ledger)
        self._side_stores = {
            at: StorePlanner(KVCacheCoordinator(planner.of_side(at), self.pool), self._given, ledger)
            for at in planner.side_groups
        }
        self.edge = Edge(self._stores, Offload(self._stores))
        self._leases = set[FoundKeys]()
        self.leases_left = 0  # that were not released

    @property
    def is_off(self) -> bool:
        """Whether nothing is found nor stored any more, since copies have failed again and again."""
        return self.edge.is_off

    # Puts

    def put(self, keys: Sequence[bytes], blocks: Given, now: float) -> list[StoreTransfer]:
        """Plan stores of what the host lacks of these keys."""
        if self.is_off:
            return []
        self._given.give(keys, blocks)
        start, wanted = len(keys) - blocks.chunks, self._wanted_sides(keys, blocks)
        found = [side for at, last in wanted for side in self.pool.find_all(self.planner.side_keys(last, at))]
        given = max([keys[start:], *(last for _, last in wanted)], key=len)
        here = [side for side in found if side is not None]
        self._use(ends(self.pool, self.pool.find_all(given)), here, now)  # so that no store of these evicts them
        touch = self.pool.touch(None)
        planned = [self._stores.plan(chain, touch)[0] for chain in self._missing(keys, start)]
        for at, last in wanted:
            planned += [self._side_stores[at].plan(chain, touch)[0] for chain in self._missing_sides(at, last)]
        return [each for each in planned if each is not None]

    def keeps(self, keys: Sequence[bytes], blocks: Given) -> bool:
        """Whether all that was put with these blocks is here."""
        names = [*keys[len(keys) - blocks.chunks :]]
        for at, last in self._wanted_sides(keys, blocks):
            names += self.planner.side_keys(last, at)
        return not self.is_off and all(presence(self._find(names)))

    def _missing(self, keys: Sequence[bytes], start: int) -> Iterator[Chain]:
        """The stretches of `keys[start:]` that the host lacks and nobody writes, each when those before are planned."""
        is_covered, begin = self._stores.is_covered, start
        for at in range(start, len(keys) + 1):
            if at == len(keys) or is_covered(keys[at]):
                if begin < at:
                    above = keys[begin - 1] if begin and is_covered(keys[begin - 1]) else None
                    yield Chain(above, keys[begin:at])
                begin = at + 1

    def _missing_sides(self, at: int, keys: Sequence[bytes]) -> Iterator[Chain]:
        """The sides of a group that the host lacks, and could hang below their chunks."""
        is_covered = self._stores.is_covered
        for key, side in zip(keys, self.planner.side_keys(keys, at), strict=True):
            if is_covered(key) and not is_covered(side):
                yield Chain(key, (), CheckpointAt(1, (self.planner.side_name(key, at),)))

    # Lookups

    def lookup(self, keys: Sequence[bytes], before: int = 0) -> FoundKeys:
        """Look up these keys; `before` more come before the first. What is found is kept until `release`."""
        planner = self.planner
        if self.is_off:
            return FoundKeys((), {group.name: () for group in planner.groups}, self)
        chunks = self._find(keys)
        here = presence(chunks)
        end = here.index(False) if planner.chunk_groups and False in here else len(keys)
        sides = {at: self._find(planner.side_keys(keys[:end], at)) for at in planner.side_groups}
        by_side = {at: self._lengths(at, presence(found), before) for at, found in sides.items()}
        lengths: Sequence[int] = range(1, end + 1)
        for each in map(set, by_side.values()):
            lengths = [length for length in lengths if length in each]
        names = {group.name: by_side.get(at, range(1, end + 1)) for at, group in enumerate(planner.groups)}
        found = FoundKeys(lengths, names, self)
        self._keep(found, chunks, list(sides.values()))
        return found

    def release(self, found: FoundKeys) -> None:
        """End a lease, if a reset has not. Raises MisuseError the second time, and for one of another cache."""
        if not isinstance(found, FoundKeys) or found.cache is not self:
            raise MisuseError(f"a cache releases what its own lookups have answered, got {found!r}")
        if found.is_released:
            raise MisuseError("this lease was released before")
        found.is_released = True
        self._leases.discard(found)
        found.end()

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def end_leases(self) -> None:
        """End those that nobody has released. They are counted."""
        self.leases_left += len(self._leases)
        while self._leases:
            self._leases.pop().end()

    def _find(self, keys: Sequence[bytes]) -> list[Nodes]:
        """The nodes that have these keys, of the host."""
        return [self.pool.find_all(keys)]

    def _keep(self, found: FoundKeys, chunks: Sequence[Nodes], sides: Sequence[Sequence[Nodes]]) -> None:
        for number, pool in enumerate(self._pools):
            beside = [node for each in sides for node in each[number][: found.longest]]
            kept = holders(pool, chunks[number][: found.longest], beside)
            if kept:
                found.pins.append((pool, pool.pin(*kept)))
                self._leases.add(found)

    def _lengths(self, at: int, here: Sequence[bool], before: int) -> list[int]:
        """After how many keys a group has the sides that resuming takes; `here`: which it has. Those before the first
        key are the engine's.
        """
        gaps = [*accumulate((-1 if is_here else chunk for chunk, is_here in enumerate(here, before)), max)]
        lengths, needs_last = [], self.planner.groups[at].needs_last
        for length in range(1, len(here) + 1):
            if needs_last and not here[length - 1]:
                continue
            needed = self.planner.needed(at, before + length)
            if isinstance(needed, range):
                needed = range(max(before, needed.start), needed.stop)
                is_enough = not needed or gaps[needed[-1] - before] < needed[0]
            else:
                is_enough = all(here[chunk - before] for chunk in needed if chunk >= before)
            if is_enough:
                lengths.append(length)
        return lengths

    # Loads

    def load(self, keys: Sequence[bytes], blocks: Given, now: float) -> KeyedLoad:
        """Plan a load into these blocks. It is gone if some of it is not here any more."""
        load = KeyedLoad([*keys], blocks)
        load.is_gone = not self._begin(load, now)
        return load

    def take_ready(self) -> list[KeyedLoad]:
        """The loads that have waited until now, and are begun or gone."""
        return []

    def _begin(self, load: KeyedLoad, now: float) -> bool:
        """Plan the transfers of a load, if the host has all of it."""
        keys, first = load.keys, self._first(load.keys, load.blocks)
        wanted = self._wanted_sides(keys, load.blocks)
        chunks = whole(self.pool.find_all(keys[first:]))
        sides = whole([side for at, last in wanted for side in self.pool.find_all(self.planner.side_keys(last, at))])
        if self.is_off or chunks is None or sides is None:
            return False
        of_sides = max((last for _, last in wanted), key=len, default=keys[:0])
        stretches = [*ends(self.pool, chunks)]
        self._use(stretches or ends(self.pool, self.pool.find_all(of_sides)), sides, now)
        rest, begin = iter(sides), 0
        copies = [self._side_copy(at, [*islice(rest, len(last))], load.blocks) for at, last in wanted]
        for end, deepest in reversed(stretches):
            copies += self._chunk_copies(chunks[begin:end], begin, load.blocks)
            above = keys[first + begin - 1] if first + begin else None
            chain = Chain(above, keys[first + begin : first + end])
            load.transfers.append(self._load(chain, [deepest, *sides], copies, now))
            copies, sides, begin = [], [], end
        if sides:
            load.transfers.append(self._load(Chain(None, ()), sides, copies, now))
        return True

    def _first(self, keys: Sequence[bytes], blocks: Given) -> int:
        """Which of the keys is the first whose chunk is loaded."""
        return len(keys) - blocks.chunks if self.planner.chunk_groups else len(keys)

    def _wanted_sides(self, keys: Sequence[bytes], blocks: Given) -> list[tuple[int, Sequence[bytes]]]:
        """The groups whose sides are given, each with the keys."""
        return [(at, keys[len(keys) - len(each) :]) for at, each in blocks.sides.items() if each]

    def _load(self, chain: Chain, nodes: Sequence[int], copies: Sequence[GroupCopy], now: float) -> LoadTransfer:
        device_blocks = [block for copy in copies for block in copy.device_blocks]
        return self.edge.load(None, chain, nodes, copies, device_blocks, now, holds_compute=True)

    def _chunk_copies(self, chunks: Sequence[int], begin: int, blocks: Given) -> list[GroupCopy]:
        """Copies of chunks, of which the first is number `begin` of those that have blocks."""
        part = []
        for at in self.planner.chunk_groups:
            width = self.planner.blocks_of_key(at)
            part.append(blocks.by_group[at][begin * width : (begin + len(chunks)) * width])
        return self._coordinator.chunk_copies(chunks, part)

    def _side_copy(self, at: int, sides: Sequence[int], blocks: Given) -> GroupCopy:
        host = (block for side in sides for piece in self.pool.checkpoints.pieces(side) for block in piece)
        return GroupCopy(at, tuple(host), tuple(blocks.by_group[at]))

    def _use(self, stretches: Iterable[tuple[int, int]], sides: Sequence[int], now: float) -> None:
        """Use stretches once, the last first, and the sides. The beginning of a prompt is evicted last."""
        for _, chunk in stretches:
            path = self.pool.path(chunk, self.pool.depth(chunk))
            self.pool.touch(chunk, [key for key in map(self.pool.key, path) if key is not None], now)
        self.pool.use_beside(sides)

    # Events

    def step(self) -> StepPlan:
        """The plan of what was put and is loaded since the last one."""
        return self.edge.begin_step()

    def report(self, report: RankReport) -> list[Ended]:
        """The copying half has finished transfers. Those that ended with it."""
        ended = []
        for each in self.edge.report(report):
            ended.append(each)
            if each.is_fatal and not self.is_off:
                logger.error("%d copies have failed in a row: the host cache is off from now on", FAILURES_IN_A_ROW)
                self.edge.is_off = True
        return ended

    def reset(self) -> None:
        """Nothing put before now may be loaded again. Leases end; transfers in flight resolve and register nothing."""
        self.end_leases()
        self.edge.reset()

    def statistics(self) -> CacheStatistics:
        counts, sides = self.edge.statistics(), self._side_stores.values()
        return replace(
            counts,
            store_refusals=counts.store_refusals + sum(each.refusals for each in sides),
            store_declined=counts.store_declined + sum(each.declined for each in sides),
        )

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests: O(blocks)."""
        self.edge.check_valid()
