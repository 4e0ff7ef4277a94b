"""KeyedCache: a host cache of blocks by keys, for an engine that decides by itself what is kept and what is loaded.

    put       the engine has blocks of these keys: what the host lacks is stored
    lookup    which of these keys it has, and where a request could resume: a lease keeps them
    load      into these device blocks
    release   a lease ends

Its edge is that of every host cache: planned, moving, landed, committed. A put is stored as chunks that hang one below
the other, and below the key before them where the host has that, else apart. So lookups here go by each key, and not by
the forest, which decides what is evicted and what a pin holds.

    put k0 k1 k2       root --- k0 --- k1 --- k2
    put k3 k4             `---- k3 --- k4           the engine gave k3 and k4 alone: nobody knows that k2 comes before
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from cpu_prefix_cache.keyed.given import Given, GivenBlocks
from cpu_prefix_cache.keyed.key_planner import KeyPlanner
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import GroupCopy, RankReport, StepPlan
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.messages.stats import CacheStatistics
from cpu_prefix_cache.offload.break_even import BreakEven
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.offload.edge import Edge, Ended
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.offload.transfers import LoadTransfer, StoreTransfer, TransferLedger
from cpu_prefix_cache.pool.block_pool import Pin
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, new_pool

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class FoundKeys:
    """The beginning of some keys that the host has. A lease on it, until `release`.

    `lengths` are the numbers of keys after which a request can resume, ascending: all groups have what that takes.
    `by_group` has the same for each group alone, as far as the prefix groups reach.
    """

    lengths: Sequence[int]
    by_group: Mapping[str, Sequence[int]]
    pin: Pin | None = field(default=None, repr=False)
    is_released: bool = field(default=False, repr=False)

    @property
    def longest(self) -> int:
        return self.lengths[-1] if self.lengths else 0


class KeyedCache:
    """`host_blocks` blocks of `planner.host_block_bytes` bytes on each rank, of which `ready_blocks` may be used at
    once. An engine has `device_blocks` blocks in all.

    Raises ConfigurationError for an unknown policy.
    """

    def __init__(
        self,
        planner: KeyPlanner,
        *,
        host_blocks: int,
        device_blocks: int,
        ready_blocks: int | None = None,
        policy: str = "lru",
    ) -> None:
        self.planner = planner
        self.pool = new_pool(planner, host_blocks, policy, ready=ready_blocks)
        self._given = GivenBlocks(planner, device_blocks)
        self._coordinator, ledger = KVCacheCoordinator(planner, self.pool), TransferLedger(ranks=1)
        self._stores = StorePlanner(self._coordinator, self._given, ledger)
        self._side_stores = {
            at: StorePlanner(KVCacheCoordinator(planner.of_side(at), self.pool), self._given, ledger)
            for at in planner.side_groups
        }
        rates = BreakEven(0, planner.chunk_bytes / planner.grid_tokens, ranks=1)
        self.edge = Edge(self._stores, Offload(self._stores), rates)
        self._leases = set[FoundKeys]()
        self.leases_left = 0  # that a reset has ended

    @property
    def is_off(self) -> bool:
        """Whether nothing is found nor stored any more, since copies have failed again and again."""
        return self.edge.is_off

    # Stores

    def put(self, keys: Sequence[bytes], blocks: Given, now: float) -> list[StoreTransfer]:
        """Plan stores of what the host lacks of these keys."""
        if self.is_off:
            return []
        self._given.give(keys, blocks)
        touch = self.pool.touch(self._deepest(keys), keys, now)
        planned: list[StoreTransfer | None] = []
        for start, stop in self._missing(keys, len(keys) - blocks.chunks):
            above = keys[start - 1] if start and self._stores.is_covered(keys[start - 1]) else None
            planned.append(self._stores.plan(Chain(above, keys[start:stop]), touch)[0])
        for at, sides in blocks.sides.items():
            for key in keys[len(keys) - len(sides) :]:
                if self._stores.is_covered(key) and not self._stores.is_covered(self.planner.side_key(key, at)):
                    side = CheckpointAt(1, (self.planner.side_name(key, at),))
                    planned.append(self._side_stores[at].plan(Chain(key, (), side), touch)[0])
        return [each for each in planned if each is not None]

    def _deepest(self, keys: Sequence[bytes]) -> int | None:
        """The last chunk of the first stretch, if the host has the first key."""
        return next((node for _, node in self._ends(self.pool.find_all(keys)) if node is not None), None)

    def _missing(self, keys: Sequence[bytes], start: int) -> Iterator[tuple[int, int]]:
        """The stretches of keys that neither the host has nor a store is writing. Asked for as what is before each of
        them has been planned.
        """
        is_covered, at = self._stores.is_covered, start
        while at < len(keys):
            begin = at
            while at < len(keys) and not is_covered(keys[at]):
                at += 1
            if begin < at:
                yield begin, at
            at += 1

    # Lookups

    def lookup(self, keys: Sequence[bytes], before: int = 0) -> FoundKeys:
        """Look up these keys; `before` more come before the first. What is found is kept until `release`."""
        nodes = [] if self.is_off else self.pool.find_all(keys)
        end = nodes.index(None) if None in nodes and self.planner.chunk_groups else len(nodes)
        sides = {at: self._sides(keys[:end], at) for at in self.planner.side_groups}
        by_group = {at: self._lengths(at, there, before) for at, there in sides.items()}
        lengths: Sequence[int] = range(1, end + 1)
        for each in by_group.values():
            both = set(each)
            lengths = [length for length in lengths if length in both]
        names = {group.name: by_group.get(at, range(1, end + 1)) for at, group in enumerate(self.planner.groups)}
        found = FoundKeys(lengths, names)
        if lengths:
            kept = [node for _, node in self._ends(nodes[: lengths[-1]])]
            kept += [node for there in sides.values() for node in there[: lengths[-1]] if node is not None]
            found.pin = self.pool.pin(*kept)
            self._leases.add(found)
        return found

    def release(self, found: FoundKeys) -> None:
        """End a lease, if a reset has not. Raises MisuseError the second time."""
        if found.is_released:
            raise MisuseError("this lease was released before")
        found.is_released = True
        self._end(found)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def end_leases(self) -> None:
        """End those that nobody has released. They are counted."""
        self.leases_left += len(self._leases)
        for found in list(self._leases):
            self._end(found)

    def _end(self, found: FoundKeys) -> None:
        if found.pin is not None:
            self.pool.unpin(found.pin)
            found.pin = None
            self._leases.remove(found)

    def _sides(self, keys: Sequence[bytes], at: int) -> list[int | None]:
        return self.pool.find_all([self.planner.side_key(key, at) for key in keys])

    def _lengths(self, at: int, sides: Sequence[int | None], before: int) -> list[int]:
        """After how many of the keys the sides of one group are there that resuming takes. What lies before the first
        key is the engine's.
        """
        gaps, gap = [], before - 1  # by chunk: the last one up to there that has no side
        for chunk, side in enumerate(sides, before):
            gap = chunk if side is None else gap
            gaps.append(gap)
        lengths = []
        for length in range(1, len(sides) + 1):
            needed = self.planner.needed(at, before + length)
            if isinstance(needed, range):
                needed = range(max(before, needed.start), needed.stop)
                is_here = not needed or gaps[needed[-1] - before] < needed[0]
            else:
                is_here = all(sides[chunk - before] is not None for chunk in needed if chunk >= before)
            if is_here:
                lengths.append(length)
        return lengths

    def _ends(self, nodes: Sequence[int | None]) -> Iterator[tuple[int, int]]:
        """The stretches of chunks that hang one below the other: the end of each, and its last chunk."""
        for at, (node, after) in enumerate(pairwise((*nodes, None)), 1):
            if node is not None and (after is None or self.pool.parent(after) != node):
                yield at, node

    # Loads

    def load(self, keys: Sequence[bytes], blocks: Given, now: float) -> list[LoadTransfer] | None:
        """Plan loads into these blocks. None: some of it is not here any more."""
        first = len(keys) - blocks.chunks if self.planner.chunk_groups else len(keys)
        nodes = _whole(self.pool.find_all(keys[first:]))
        wanted = [(at, keys[len(keys) - len(each) :]) for at, each in blocks.sides.items() if each]
        leaves = _whole([leaf for at, last in wanted for leaf in self._sides(last, at)])
        if self.is_off or nodes is None or leaves is None:
            return None
        self._use(keys, nodes, leaves, now)
        rest = iter(leaves)
        copies = [self._side_copy(at, [*islice(rest, len(last))], blocks) for at, last in wanted]
        loads, begin = list[LoadTransfer](), 0
        for end, deepest in self._ends(nodes):
            copies += self._chunk_copies(nodes[begin:end], begin, blocks)
            above = keys[first + begin - 1] if first + begin else None
            loads.append(self._load(Chain(above, keys[first + begin : first + end]), [deepest, *leaves], copies, now))
            copies, leaves, begin = [], [], end
        return [*loads, self._load(Chain(None, ()), leaves, copies, now)] if leaves else loads

    def _load(self, chain: Chain, nodes: Sequence[int], copies: Sequence[GroupCopy], now: float) -> LoadTransfer:
        device_blocks = [block for copy in copies for block in copy.device_blocks]
        return self.edge.load(None, chain, nodes, copies, device_blocks, now)

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

    def _use(self, keys: Sequence[bytes], nodes: Sequence[int], leaves: Sequence[int], now: float) -> None:
        """One use of all of these: what comes first in the prompt is evicted last."""
        ends = [*leaves, *(node for _, node in self._ends(nodes))][::-1]
        for node in ends[:-1]:
            self.pool.touch(node)
        for node in ends[-1:]:
            self.pool.touch(node, keys, now)

    # Events

    def step(self) -> StepPlan:
        """The plan of what was put and is loaded since the last one."""
        return self.edge.begin_step()

    def report(self, report: RankReport) -> list[Ended]:
        """The copying half has finished transfers. Those that ended with it."""
        ended = []
        for each in self.edge.report(report):
            ended.append(each)
            if self.edge.has_failed_often(each.transfer.plan.direction) and not self.is_off:
                logger.error("%d copies have failed in a row: the host cache is off from now on", FAILURES_IN_A_ROW)
                self.edge.is_off = True
                self.reset()
        return ended

    def reset(self) -> None:
        """Nothing put before now may be loaded again. Leases end; transfers in flight resolve and register nothing."""
        self.end_leases()
        self.edge.reset()

    def statistics(self) -> CacheStatistics:
        return self.edge.statistics()

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests: O(blocks)."""
        self.edge.check_valid()


def _whole(nodes: Sequence[int | None]) -> list[int] | None:
    """All of these; None if one is missing."""
    here = [node for node in nodes if node is not None]
    return here if len(here) == len(nodes) else None
