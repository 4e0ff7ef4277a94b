"""Promotions: what a tier has of some prompts is read into the host pool, chunks in slices, then the checkpoint.

A prompt is read as far as saves most time (`time_saved.py`); where nothing does, now and then a little, as a trial
(`trials.py`).

A want is a wish and no state of its own: how far it is, each step reads from the pools and the ledger. What the host
has of it already is kept there by a pin, its lease, until whoever wants it ends it.

    want    noted --slices are read--> over --> ended
               `--- nobody waits any more --------^
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from cpu_prefix_cache.messages.next_use import usable_next_use
from cpu_prefix_cache.messages.request import Request
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.edge import PENDING_GRACE_SECONDS, Edge, Ended
from cpu_prefix_cache.offload.transfers import LoadTransfer, Promotion, StoreTransfer
from cpu_prefix_cache.pool.block_pool import Pin
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator
from cpu_prefix_cache.tiers.tier_cache import TierCache
from cpu_prefix_cache.tiers.time_saved import Candidate, best
from cpu_prefix_cache.tiers.trials import Trials

PROMOTED_SHARE = 4  # at most this part of the host is promoted and not admitted yet
MOST_CANDIDATES = 8  # checkpoints above one another, from the deepest on
# So much of a prompt is read where the rate is not known, or seems too low: enough to measure it (`slab/meter.py`).
TRIAL_BYTES = 256 << 20
NEVER = math.inf  # the deadline of a want until its request is looked up


@dataclass(slots=True, eq=False)
class Want:
    """A request that waits until the host has its first `stop` chunks, and the checkpoint below `depth` of them, if one
    is needed. `stop` is `depth` until the tier loses some. `host_end` is how many tokens it had before. `is_hint`: of a
    prompt that nobody has requested yet.
    """

    request: Request
    stop: int
    depth: int
    host_end: int
    deadline: float
    unread: int = 0  # bytes that are still to be asked for
    is_hint: bool = False
    has_begun: bool = False
    lease: Pin | None = None
    blocks: int = 0  # host blocks that were promoted for it, and have landed
    is_over: bool = False  # nothing more comes


class Promotions:
    """From the tier `below` into the pool of `coordinator`, by its `edge`.

    The host has a request up to `host_end`, and up to token `least` nothing is read for it. It is computed at the rate
    `prefill`, in tokens a second, if that is known.
    """

    def __init__(self, coordinator: KVCacheCoordinator, edge: Edge, below: TierCache) -> None:
        self._coordinator, self._edge, self._below = coordinator, edge, below
        self._trials = Trials()
        self._asked = self._declined = 0  # requests that wait for the tier, and those that computing serves sooner
        self._late = 0  # of the first, those whose deadline passed
        self._planner, self._pool = coordinator.planner, coordinator.pool
        width = self._planner.host_blocks_per_chunk
        self.open: dict[Want, None] = {}  # those that are not ended, in the order in which they came
        self.slices: dict[Any, tuple[Promotion, Want, int]] = {}  # promotions in flight by id, and their blocks
        self.unread = 0  # bytes that wants which are not over have still to ask for
        self._promoted = 0  # blocks: of these, and of what has landed for wants that are open
        self.budget = max(width, self._pool.capacity // PROMOTED_SHARE)  # blocks
        self._trial_budget = min(self.budget, max(width, TRIAL_BYTES // self._planner.host_block_bytes))

    # Looking

    @property
    def queue_bytes(self) -> int:
        """Bytes to be read before anything that is requested now."""
        return self._below.queue_bytes + self.unread

    @property
    def has_room(self) -> bool:
        """Whether more may be promoted than is wanted already."""
        return self._promoted + self.unread // self._planner.host_block_bytes < self.budget

    def unknown_until(
        self, request: Request, host_end: int, least: int, prefill: float | None, queue_bytes: int
    ) -> float | None:
        """Time until which it is not known what a store has of a request. None: it is, or could save no time."""
        most = self._most(request, host_end)
        if most.boundary <= least:
            return None
        is_worth_asking = self._best([most], prefill, queue_bytes) is not None or self._trials.is_due(self._below.now)
        return self._below.awaited(request, host_end) if is_worth_asking else None

    def chosen_early(self, request: Request, host_end: int, least: int, prefill: float | None) -> Candidate | None:
        """How far to read for a request that has not been looked up yet, so that nobody waits for it."""
        return self._best(self._reachable(request, host_end, least), prefill, queue_bytes=0)

    def _best(self, candidates: Sequence[Candidate], prefill: float | None, queue_bytes: int) -> Candidate | None:
        return best(candidates, prefill=prefill, rate=self._below.load_rate, queue_bytes=queue_bytes)

    def _most(self, request: Request, host_end: int) -> Candidate:
        """All that a tier could bring of this request, if it has all of it."""
        grid, planner = self._planner.grid_tokens, self._planner
        end = planner.resumable_chunks(planner.findable_chunks(request.num_tokens)) * grid
        blocks = (end // grid - host_end // grid) * planner.host_blocks_per_chunk
        return Candidate(end, end - host_end, blocks * planner.host_block_bytes)

    def _reachable(self, request: Request, host_end: int, least: int) -> list[Candidate]:
        """Where the tier could bring this request. Of a tier whose rate is not known, little is read at once."""
        if not self._below.can_be_read:
            return []
        budget = self._trial_budget if self._below.load_rate is None else self.budget
        return self._candidates(request, host_end, least, budget)

    def _candidates(self, request: Request, host_end: int, least: int, budget: int) -> list[Candidate]:
        """Where the tier could bring this request, the deepest first, as far as it fits into `budget` blocks."""
        keys, grid, lower = request.keys, self._planner.grid_tokens, self._below.coordinator
        width = self._planner.host_blocks_per_chunk
        boundary = lower.longest_boundary(keys, host_end, request.num_tokens)
        here = self._pool.resident_run(keys, 0, boundary // grid)
        most = here + budget // width if width else len(keys)  # chunks
        found: list[Candidate] = []
        while boundary > max(host_end, least) and len(found) < MOST_CANDIDATES:
            stop = self._planner.chunks_to_resume(boundary // grid)
            blocks = max(0, stop - here) * width + self._coordinator.num_blocks(stop)
            if blocks <= budget:
                size = blocks * self._planner.host_block_bytes
                found.append(Candidate(boundary, boundary - host_end, size))
                if not self._planner.has_checkpoints:
                    break  # the gain is proportional to the tokens: the deepest, or none
            boundary = lower.longest_boundary(keys, host_end, min(stop - 1, most) * grid + 1)
        return found

    # Wants

    def want(self, request: Request, host_end: int, least: int, prefill: float | None) -> Want | None:
        """Note what to read for a request that is looked up; where reading saves no time, the want is over. None: the
        tier has no more of it than the host.
        """
        candidates, now = self._reachable(request, host_end, least), self._below.now
        if not candidates:
            return None
        chosen = self._best(candidates, prefill, self.queue_bytes)
        if chosen is not None:
            self._trials.saves(now)
        elif self._trials.is_due(now):
            chosen = next(iter(self._candidates(request, host_end, least, self._trial_budget)), None)
            if chosen is not None:
                self._trials.tries(now)
        if chosen is None:
            self._declined += 1
            return Want(request, 0, 0, host_end, now, is_over=True)
        want = self._note(request, chosen, host_end)
        self.begin_deadline(want)
        return want

    def want_early(self, request: Request, chosen: Candidate, host_end: int, *, is_hint: bool = False) -> Want:
        """Note what was `chosen_early`. For a hint nobody waits, so its bytes do not count as those before others."""
        self._trials.saves(self._below.now)
        return self._note(request, chosen, host_end, is_hint=is_hint)

    def begin_deadline(self, want: Want) -> None:
        """A request is looked up. It waits for what is read before it, too, although computing it may take less: others
        want the GPU as well.
        """
        self._asked += 1
        before = takewhile(lambda each: each is not want, self.open)
        num_bytes = self._below.queue_bytes + want.unread + sum(each.unread for each in before)
        want.deadline = self._below.now + 2 * self._below.seconds_to_read(num_bytes) + PENDING_GRACE_SECONDS

    def _note(self, request: Request, chosen: Candidate, host_end: int, *, is_hint: bool = False) -> Want:
        depth = self._planner.chunks_to_resume(chosen.boundary // self._planner.grid_tokens)
        unread = 0 if is_hint else chosen.num_bytes
        want = Want(request, depth, depth, host_end, NEVER, unread=unread, is_hint=is_hint)
        self.open[want] = None
        self.unread += want.unread
        return want

    def end(self, want: Want) -> None:
        """Its lease ends. What is being read for it goes on."""
        self.over(want)
        self.open.pop(want, None)
        self._promoted -= want.blocks
        want.blocks = 0
        self._pool.unpin(want.lease)
        want.lease = None

    def late(self, want: Want) -> None:
        """Nobody waits for it any longer."""
        self._late += not want.is_over
        self.over(want)

    def over(self, want: Want) -> None:
        """Nothing more is read for it."""
        want.is_over = True
        self.unread -= want.unread
        want.unread = 0

    def advance(self, want: Want, may_read: bool) -> bool:
        """Keep what the host has of it by now, and read more. Whether those that came later may read, too: this one
        does not lack room.
        """
        self._begin(want)
        keys = want.request.keys
        resident = self._pool.resident_run(keys, 0, want.stop)
        self._keep(want, resident)
        covered = self._edge.stores.covered_run(keys, resident, want.stop)
        while covered < want.stop:
            end = covered
            if self._below.can_be_read:
                end = self._below.pool.resident_run(keys, covered, min(want.stop, covered + self._below.slice_chunks))
            if end == covered:
                want.stop = covered  # the tier has lost it, or is left alone
                break
            end = covered + min(end - covered, self._room_chunks(want) if may_read else 0)
            if end == covered:
                return False
            read = self._read(want, Chain(keys[covered - 1] if covered else None, keys[covered:end]))
            if not read:
                return False
            covered += read
        has_room, awaits_checkpoint = True, False
        if want.depth <= want.stop:
            has_room, awaits_checkpoint = self._read_checkpoint(want, may_read)
        if resident == want.stop and not awaits_checkpoint:
            self.over(want)
        return may_read and has_room

    def ended(self, ended: Ended, load: LoadTransfer) -> Sequence[StoreTransfer]:
        """The tier has read a slice. The stores whose chunks can be found since then."""
        store, want, blocks = self.slices.pop(load.owner)
        kept = self._num_blocks(store.nodes[: load.good]) if ended.ok and want in self.open else 0
        want.blocks += kept
        self._promoted += kept - blocks
        return self._edge.promoted(store, ended.ok, load.good)

    def statistics(self) -> TierStatistics:
        """Counts of the tier, and of wants. O(pins)."""
        below = self._below.tier_statistics()
        return replace(below, asked=self._asked, late=self._late, declined=self._declined)

    def check_valid(self) -> None:
        """Assert that what is promoted is counted right. For tests."""
        for transfer, _, _ in self.slices.values():
            assert transfer in list(self._edge.ledger), "a promotion was resolved before the tier had read it"
        promoted = sum(blocks for _, _, blocks in self.slices.values()) + sum(want.blocks for want in self.open)
        assert self.unread == sum(want.unread for want in self.open), "what is to be read is miscounted"
        assert self._promoted == promoted <= self.budget, "promoted blocks are miscounted, or more than may be"

    # Details

    def _begin(self, want: Want) -> None:
        """The request uses what the tier has of it, once; an expected one uses it when it comes."""
        if not want.has_begun:
            want.has_begun = True
            if want.is_hint:
                return
            request = want.request
            deepest = self._below.pool.find(request.keys[want.stop - 1])
            next_use = usable_next_use(request.next_use)
            self._below.pool.touch(deepest, request.keys, self._below.now, request.num_tokens, next_use)

    def _read_checkpoint(self, want: Want, may_read: bool) -> tuple[bool, bool]:
        """Read its checkpoint, if that is not here. Whether there was room for it, and whether it is still to come."""
        keys, depth = want.request.keys, want.depth
        key = checkpoint_key(keys[depth - 1]) if depth else b""
        if not depth or key in self._edge.ledger.writing:
            return True, bool(depth)
        checkpoint = self._below.checkpoint_at(keys, depth) if self._below.can_be_read else None
        if checkpoint is None or self._pool.find(key) is not None:
            return True, False
        has_room = may_read and self._promoted + self._coordinator.num_blocks(depth) <= self.budget
        return has_room and self._read(want, Chain(keys[depth - 1], (), checkpoint)) > 0, True

    def _keep(self, want: Want, resident: int) -> None:
        """Let the lease keep the first `resident` chunks, and the checkpoint."""
        keys = [want.request.keys[resident - 1]] if resident else []
        keys += [checkpoint_key(want.request.keys[want.depth - 1])] if 0 < want.depth <= resident else []
        nodes = tuple(node for node in map(self._pool.find, keys) if node is not None)
        if nodes and (want.lease is None or want.lease.blocks != nodes):
            before, want.lease = want.lease, self._pool.pin(*nodes)
            self._pool.unpin(before)

    def _room_chunks(self, want: Want) -> int:
        """How many chunks may be promoted now, if the host has room. For a hint nothing, while anything is read: so a
        request that comes waits for no more than a slice.
        """
        if want.is_hint and self.slices:
            return 0
        width = self._planner.host_blocks_per_chunk
        if not width:
            return self._below.slice_chunks
        return max(0, (self.budget - self._promoted) // width)

    def _read(self, want: Want, chain: Chain) -> int:
        """Begin to promote as many first nodes of a chain as find room. Their number."""
        store = self._edge.stores.receive(chain, self._pool.touch(None), ("promotion", id(want)))
        if store is None:
            return 0
        blocks = self._num_blocks(store.nodes)
        self.slices[store.id] = store, want, blocks
        self._promoted += blocks
        asked = min(want.unread, blocks * self._planner.host_block_bytes)
        want.unread -= asked
        self.unread -= asked
        self._below.read(store.id, chain.first(len(store.nodes)), store.nodes)
        return len(store.nodes)

    def _num_blocks(self, nodes: Sequence[int]) -> int:
        return sum(1 for node in nodes for _ in self._pool.all_blocks_of(node))
