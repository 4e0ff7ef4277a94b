"""CPUPrefixCache inside an engine that does everything wrong that engines do, with bytes that name their owner.

Requests arrive, hit, compute in chunks, are preempted and aborted; transfers run late, fail, and are reported lost,
twice and out of order, by one to three ranks; resets and bad blocks come in between. Memory is a dict per rank from
block to a *pattern*, (epoch, key, part); a store and a load copy patterns, rank by rank, at any time after the plan.

In an exchange the host blocks that a store takes from a load hold nothing from the plan on: the load has what they held
then, and the store writes at any time.

Wrong KV is so seen: a chunk that is computed reads all before it, on every rank; a load that went well must have left
exactly its own keys' patterns of this epoch; and every chunk that the host pool lists must be there, on every rank.
"""

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_prefix_cache import POLICIES, Hit, Miss, MisuseError, Pending
from cpu_prefix_cache.deciding import (
    CPUPrefixCache,
    Direction,
    EngineSteps,
    HybridChunkPlanner,
    PrefixGroup,
    RankReport,
    Request,
    StepPlan,
    TransferPlan,
)
from cpu_prefix_cache.offload import completion
from cpu_prefix_cache.pool.scarcity import Scarcity
from cpu_prefix_cache.testing.engine import cache_options
from cpu_prefix_cache.testing.slots import Holding, PoolSlots
from property_tests.models.engines import QueueSlots
from property_tests.models.listener import Listener
from property_tests.models.model import longest_boundary
from property_tests.strategies import chain, pick, positions, prompts

GRID, DEVICE_CHUNKS = 4, 12
PLANS = {
    "one group": [("attention", 4, 100)],
    "two device blocks to a chunk": [("attention", 2, 100)],
    "two groups": [("draft", 2, 3_000), ("target", 4, 12_000)],
}
NOTHING = "nothing"
ALL_NAMES = sorted(
    {name for letters in product("ab", repeat=6) for name in chain("".join(letters))},
    key=lambda name: (len(name), name),
)
Arrival = tuple[str, int, int, str, bool]
FAR = st.sampled_from(["admitted", "computed", "step by step", "step by step", "ended", "stored", "stored", "stored"])
ENDS = [*5 * ["well"], "unfit", *2 * ["fails"]]  # of a share of a copy
MEANWHILE = st.sampled_from(
    ["nothing", "a report", "a preemption", "an end", "all lands", "a block goes bad", "a block goes bad"]
)
FAILURES = st.sampled_from([2, 5])  # 5 is the library's; a run of 40 steps hardly ever sees so many in a row
long_prompts = st.text("ab", min_size=6, max_size=6)
arrivals = st.lists(
    st.tuples(prompts, st.integers(0, GRID - 1), st.sampled_from([0, 0, 1, 2]), FAR, st.booleans()),
    min_size=1,
    max_size=3,
)


def beginnings(prompt: str) -> list[str]:
    return [prompt[:length] for length in range(1, len(prompt) + 1)]


class AlwaysScarce(Scarcity):
    holds = True


@dataclass(eq=False)
class Sequence:
    """A request in the engine. `epoch` is what its KV belongs to; `computed` counts tokens."""

    id: str
    prompt: str
    request: Request
    holding: Holding
    n0: int
    epoch: int
    computed: int
    loading: int | None = None
    boundary: int = 0
    stale: bool = False
    destinations: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)  # slots that hold what they held before, until it computes


@dataclass(eq=False)
class Copy:
    """A transfer in the hands of the ranks. `source` is what a store found in its blocks when it was sent, and `lent`,
    by rank, what a load finds in those that stores take from it.
    """

    plan: TransferPlan
    epoch: int
    source: Any = None
    lent: list[dict[int, Any]] = field(default_factory=list)
    cancelled: bool = False
    copied: dict[int, bool] = field(default_factory=dict)
    unfit: dict[int, tuple[int, ...]] = field(default_factory=dict)  # host blocks, by rank


class PrefixCacheMachine(RuleBasedStateMachine):
    notes = False  # whether the device notes what it hands out

    @initialize(
        mode=st.sampled_from(["eager", "lazy"]),
        ranks=st.sampled_from([1, 2, 3]),
        plan=st.sampled_from(sorted(PLANS)),
        pooled=st.booleans(),
        host_chunks=st.integers(4, 16),
        device_chunks=st.integers(8, DEVICE_CHUNKS),
        portion=st.sampled_from([0, 0, 0, 1, 3, 100]),
        policy=st.sampled_from(sorted(POLICIES)),
        steps=st.sampled_from([EngineSteps(max_tokens=3 * GRID), EngineSteps(max_tokens=GRID, ahead_blocks=1)]),
        failures=FAILURES,
        is_scarce=st.sampled_from([None, True, True]),
        notes=st.booleans(),
    )
    def build(
        self,
        mode: str,
        ranks: int,
        plan: str,
        pooled: bool,
        host_chunks: int,
        device_chunks: int,
        portion: int,
        policy: str,
        steps: EngineSteps,
        failures: int,
        is_scarce: bool | None,
        notes: bool,
    ) -> None:
        groups = [PrefixGroup(name=name, block_tokens=tokens, block_bytes=size) for name, tokens, size in PLANS[plan]]
        self.planner = HybridChunkPlanner(groups, max_model_len=1_000, grid_tokens=GRID)
        width = self.planner.device_blocks_per_chunk
        self.slots = QueueSlots(device_chunks, width)
        if pooled and width == 1:
            self.slots = PoolSlots(self.planner, device_chunks, policy)
        if notes and isinstance(self.slots, QueueSlots):
            self.slots.noted = {}
        self.host_blocks = host_chunks * self.planner.host_blocks_per_chunk
        self.is_lazy = mode == "lazy"
        self.cache = CPUPrefixCache(
            self.planner,
            self.slots.device,
            host_blocks=self.host_blocks,
            ready_blocks=0 if portion else None,
            **cache_options(policy=policy, offload=mode, ranks=ranks, steps=steps, exchanges=True, log_boundaries=True),
        )
        self.notes = self.cache.pool.shape.is_shared
        if is_scarce and self.notes:
            self.cache.pool._duplicates.scarcity = AlwaysScarce(1)
        self.begin_with_nothing(ranks, portion, failures)

    def begin_with_nothing(self, ranks: int, portion: int, failures: int) -> None:
        """Each report of a rank brings `portion` blocks more, 0: all are there. So many failures turn the cache off."""
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(completion, "FAILURES_IN_A_ROW", failures)
        self.portion = portion or self.host_blocks
        self.prepared = [0] * ranks
        self.listener = Listener()
        self.ranks = range(ranks)
        self.device: list[dict[int, Any]] = [{} for _ in self.ranks]
        self.host: list[dict[int, Any]] = [{} for _ in self.ranks]
        self.running: dict[str, Sequence] = {}
        self.waiting: list[tuple[str, str]] = []  # preempted: (id, prompt)
        self.copies: dict[int, Copy] = {}
        self.resolved: dict[int, bool] = {}
        self.loads: dict[int, Sequence] = {}
        self.late: set[int] = set()  # loads that some rank has given up
        self.told: list[RankReport] = []
        self.leases: list[tuple[Any, str, int]] = []
        self.meanwhile = "nothing"  # happens between the lookup of a hit and its load
        self.epoch = self.now = self.born = self.resolved_below = 0

    # expected bytes

    def pattern(self, epoch: int, key: bytes) -> list[tuple[Any, ...]]:
        """Patterns of the device blocks of one chunk, group by group."""
        return [
            (epoch, key, piece.group.name, part) for piece in self.planner.pieces for part in range(piece.device_blocks)
        ]

    def on_device(self, rank: int, slot: int) -> list[Any]:
        return [self.device[rank].get(block, NOTHING) for block in self.slots.blocks_of(slot)]

    def write(self, slot: int, patterns: list[Any]) -> None:
        for memory in self.device:
            memory.update(zip(self.slots.blocks_of(slot), patterns, strict=True))

    def on_host(self) -> set[str]:
        """Names of the host's chunks, looked up one by one."""
        return {name.decode() for name in ALL_NAMES if self.cache.pool.find(name) is not None}

    def can_be_hit(self) -> set[str]:
        """Where a request could resume from the host alone."""
        return self.on_host()

    # requests

    @rule(arrivals=arrivals)
    def requests_arrive(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.a_request_arrives(*arrival)

    @rule(arrivals=arrivals)
    def more_requests_arrive(self, arrivals: list[Arrival]) -> None:
        """Under a second name, because Hypothesis leaves out half of the rules of a run, and this one carries all."""
        self.requests_arrive(arrivals)

    @rule(arrivals=arrivals, slots=st.integers(2, 9))
    def other_requests_flood_the_device_and_one_comes_back(self, arrivals: list[Arrival], slots: int) -> None:
        """The host must bring back what the device no longer has."""
        self.everything_lands()
        self.flood(slots)
        self.requests_arrive(arrivals)

    @rule(
        prompts=st.lists(long_prompts, min_size=3, max_size=4, unique=True),
        cut=st.integers(0, 2),
        twins=st.integers(0, 1),
    )
    def a_long_prompt_comes_back_after_others(self, prompts: list[str], cut: int, twins: int) -> None:
        """Where they are on the device alone, its load saves them, and takes their place."""
        first, *others = prompts
        for prompt in [first, *others]:
            for sequence in list(self.running.values()):
                self.end(sequence)
            self.a_request_arrives(prompt, 0, 0, "ended", loads_last=False)
            for _ in range(DEVICE_CHUNKS if prompt == first else 0):  # it leaves the device bit by bit
                self.everything_lands()
                self.flood(1)
        self.a_request_arrives(first, 1, cut, "admitted", loads_last=True)
        for _ in range(twins):
            self.a_request_arrives(first, 1, cut, "admitted", loads_last=True)

    @rule(what=MEANWHILE)
    def loads_wait_from_now_on(self, what: str) -> None:
        """Have this happen between the lookup of each and its load."""
        self.meanwhile = what

    def wait_before_the_load(self, which: int) -> None:
        if self.meanwhile == "a block goes bad":
            for oldest in range(which % 4):
                self.a_block_goes_bad(oldest)
        elif self.meanwhile == "a report":
            self.report(which % len(self.ranks))
        elif self.meanwhile == "all lands":
            self.everything_lands()
        elif self.running and self.meanwhile == "a preemption":
            self.a_request_is_preempted(which)
        elif self.running and self.meanwhile == "an end":
            self.a_request_ends(which)

    def a_request_arrives(self, prompt: str, partial: int, cut: int, far: str, loads_last: bool) -> None:
        """Let it get so far at once: computed, ended, its stores landed; before or after the loads in flight."""
        self.born += 1
        if len(self.running) > 2:
            self.end(next(iter(self.running.values())))
        if not self.begin(f"r{self.born}", prompt, partial, cut if partial else 0):
            return
        sequence = self.running[f"r{self.born}"]
        if sequence.loading is not None and not loads_last:
            self.everything_lands()
        if far == "admitted" or sequence.loading is not None:
            return
        for _ in range(len(prompt) if far == "step by step" else 0):
            self.compute(sequence, GRID, step_between=False)
            self.one_step_begins()
        self.compute(sequence, 100, step_between=False)
        if far in ("ended", "stored"):
            self.end(sequence)
        if far == "stored":
            self.everything_lands(but_loads=loads_last)

    def everything_lands(self, but_loads: bool = False, fails: bool = False) -> None:
        """Odd ids first: children before their parents, as often as not."""
        self.one_step_begins()
        for copy in self.copies.values():
            for rank in self.ranks:
                if rank not in copy.copied and not (but_loads and copy.plan.direction is Direction.LOAD):
                    self.copy(copy, rank, fails)
        for rank in self.ranks:
            self.report(rank, half=True)
            self.report(rank)

    @precondition(lambda self: self.waiting)
    @rule(which=positions, partial=st.integers(0, GRID - 1))
    def a_preempted_request_comes_back(self, which: int, partial: int) -> None:
        id, prompt = self.waiting.pop(which % len(self.waiting))
        if not self.begin(id, prompt, partial, 0):
            self.waiting.append((id, prompt))

    def begin(self, id: str, prompt: str, partial: int, cut: int) -> bool:
        keys, num_tokens = chain(prompt), len(prompt) * GRID + partial
        matched = min(self.slots.match(keys), (num_tokens - 1) // GRID)
        n0 = matched * GRID
        request = Request(id, keys, num_tokens)
        on_host = self.on_host()
        before = self.cache.statistics()
        answer = self.cache.lookup(request, n0, self.now)
        assert self.cache.statistics() == before  # rule 5
        could = longest_boundary(GRID, n0, num_tokens, prompt, on_host)
        if isinstance(answer, Pending):
            self.check_pending(id, keys, answer.deadline, n0, could)
            return False
        assert answer == (Hit(could, n0) if could > n0 else Miss())
        inside = longest_boundary(GRID, n0 + 1, num_tokens, prompt, on_host)
        off_grid = self.cache.lookup(request, n0 + 1, self.now)
        assert off_grid == (Hit(inside, n0) if inside > n0 + 1 else Miss())  # rule 8
        boundary = n0
        if isinstance(answer, Hit):
            boundary = max(n0, could - cut * GRID)  # an engine may accept less than it was offered (S7.19)
            self.wait_before_the_load(self.born * 7 + could)
            if self.slots.match(keys) < matched:
                return False  # the engine looks up again
        total = -(-num_tokens // GRID)
        holding = self.slots.take(keys, matched, total)
        if holding is None:
            return False  # no room: the engine looks up again later, and nothing was pinned for it (S7.3)
        sequence = Sequence(id, prompt, request, holding, n0, self.epoch, n0)
        sequence.given = holding.slots[max(matched, boundary // GRID) :]
        if not self.notes:
            self.overwrite_given(sequence)
        self.running[id] = sequence
        self.cache.admit(request, n0, boundary if boundary > n0 else None, self.now)
        if boundary > n0:
            self.start_load(sequence, boundary)
        return True

    def check_pending(self, id: str, keys: list[bytes], deadline: float, n0: int, could: int) -> None:
        assert self.now < deadline
        same = any(each.n0 <= n0 < each.boundary for each in self.loads.values())
        assert same or (could > n0 and self.is_lazy and self.loads) or self.is_stored_now(keys[could // GRID])

    def is_stored_now(self, key: bytes) -> bool:
        """Whether a store in flight carries the chunk, even one not handed to the ranks yet, and it left the device."""
        return key in self.cache.edge.ledger.writing and not self.slots.match([key])

    def start_load(self, sequence: Sequence, boundary: int) -> None:
        slots = sequence.holding.slots[sequence.n0 // GRID : boundary // GRID]
        destinations = self.by_group(slots)
        twice = [[*blocks[:-1], blocks[0]] for blocks in destinations]
        null = [[*blocks[:-1], self.slots.null_block] for blocks in destinations]
        for bad in ([blocks[1:] for blocks in destinations], twice, null):
            if bad != destinations and (bad is not null or self.slots.null_block is not None):
                with pytest.raises(MisuseError):
                    self.cache.load(sequence.id, boundary, bad, self.now)  # rule 7
        sequence.loading = self.cache.load(sequence.id, boundary, destinations, self.now)
        sequence.boundary = boundary
        sequence.destinations = list(sequence.holding.slots)
        self.loads[sequence.loading] = sequence

    def by_group(self, slots: list[int]) -> list[list[int]]:
        lists: list[list[int]] = [[] for _ in self.planner.pieces]
        for slot in slots:
            blocks = list(self.slots.blocks_of(slot))
            for lane, piece in zip(lists, self.planner.pieces, strict=True):
                lane += blocks[: piece.device_blocks]
                del blocks[: piece.device_blocks]
        return lists

    @precondition(lambda self: any(each.loading is None for each in self.running.values()))
    @rule(which=positions, tokens=st.integers(1, 4 * GRID), step_between=st.booleans())
    def a_request_computes(self, which: int, tokens: int, step_between: bool) -> None:
        self.compute(
            pick([each for each in self.running.values() if each.loading is None], which), tokens, step_between
        )

    def compute(self, sequence: Sequence, tokens: int, step_between: bool) -> None:
        end = min(sequence.computed + tokens, sequence.request.num_tokens)
        chunks = end // GRID
        if not sequence.stale and isinstance(self.slots, QueueSlots):
            self.slots.publish_early(sequence.holding, sequence.request.keys, chunks)  # rule 11
        if step_between or self.notes:
            self.one_step_begins()
        self.copy_before_compute()
        self.overwrite_given(sequence)
        self.read_everything_before(sequence)
        for at in range(sequence.computed // GRID, chunks):
            epoch = sequence.epoch if not sequence.stale else "an old one"
            self.write(sequence.holding.slots[at], self.pattern(epoch, sequence.request.keys[at]))
        if not sequence.stale:
            self.slots.publish(sequence.holding, sequence.request.keys, chunks)
        sequence.computed = end
        self.cache.computed(sequence.id, end)

    def overwrite_given(self, sequence: Sequence) -> None:
        """Its new slots lose what they held."""
        for slot in sequence.given:
            self.write(slot, [("left by", sequence.id)] * len(self.slots.blocks_of(slot)))
        sequence.given = []

    def copy_before_compute(self) -> None:
        """Compute waits for the stores that hold it: they read what it overwrites."""
        for copy in list(self.copies.values()):
            for rank in self.ranks:
                if copy.plan.holds_compute and rank not in copy.copied:
                    self.copy(copy, rank, fails=False)

    def read_everything_before(self, sequence: Sequence) -> None:
        if sequence.stale:
            return
        for at in range(sequence.computed // GRID):
            right = self.pattern(sequence.epoch, sequence.request.keys[at])
            for rank in self.ranks:
                assert self.on_device(rank, sequence.holding.slots[at]) == right, "attention reads somebody else's KV"

    @precondition(lambda self: self.running)
    @rule(which=positions)
    def a_request_is_preempted(self, which: int) -> None:
        sequence = pick(list(self.running.values()), which)
        self.cache.preempted(sequence.id)
        self.leave(sequence)
        self.waiting.append((sequence.id, sequence.prompt))

    @precondition(lambda self: self.running)
    @rule(which=positions)
    def a_request_ends(self, which: int) -> None:
        """Or is aborted. An engine counts what is being loaded as computed already (S7.13)."""
        self.end(pick(list(self.running.values()), which))

    def end(self, sequence: Sequence) -> None:
        self.cache.finished(sequence.id, sequence.boundary if sequence.loading is not None else sequence.computed)
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self.slots.let_go(sequence.holding)

    # steps and copies

    @rule()
    def one_step_begins(self) -> None:
        self.now += 1
        self.take_in(self.cache.step())

    def take_in(self, plan: StepPlan) -> None:
        assert plan.epoch == self.epoch + self.cache.is_off  # turning off is a reset, for good
        if self.cache.is_off:  # what was planned before goes out, and registers nothing
            assert all(transfer.failed or self.is_cancelled(transfer.id) for transfer in plan.transfers)
        self.resolved_below = plan.resolved_below
        assert all(id in self.resolved for id in range(plan.resolved_below) if id in self.copies)
        for transfer in plan.transfers:
            assert transfer.id not in self.copies and transfer.id >= plan.resolved_below
            copy = self.copies[transfer.id] = Copy(transfer, plan.epoch, cancelled=transfer.failed)
            may_be_empty = self.planner.has_checkpoints  # a checkpoint may share all of its pieces
            assert transfer.failed == (not transfer.copies) or (may_be_empty and not transfer.failed)
            for group in transfer.copies:
                device, host = group.device_blocks, group.host_blocks
                assert self.slots.null_block not in device
                assert len(set(device)) == len(device) and len(set(host)) == len(host)
            if transfer.direction is Direction.STORE:
                copy.source = self.source_of(transfer)
            else:
                self.lend(copy)
        for id in plan.cancelled:
            if not self.copies[id].copied:
                self.copies[id].cancelled = True
            self.copies[id].epoch = -1

    def lend(self, load: Copy) -> None:
        """Take what the load reads out of the host blocks that stores take from it."""
        read = {block for group in load.plan.copies for block in group.host_blocks}
        stores = [self.copies[id].plan for id in load.plan.after]
        exchanged = [store for store in stores if load.plan.id in store.after]
        lent = {block for store in exchanged for group in store.copies for block in group.host_blocks}
        assert lent <= read
        assert not any(self.writes(store, read) for store in stores if store not in exchanged)
        for store in exchanged:
            self.check_order(store, load.plan)
        load.lent = [{block: memory.get(block, NOTHING) for block in lent} for memory in self.host]
        for memory in self.host:
            memory.update(dict.fromkeys(lent, "lent"))

    def check_order(self, store: TransferPlan, load: TransferPlan) -> None:
        """Each piece goes where the load has read before it overwrites that piece."""
        (saved,), (loaded,) = store.copies, load.copies
        (piece,) = self.planner.pieces
        h, d = piece.host_blocks, piece.device_blocks
        for at in range(len(saved.host_blocks) // h):
            read = max(loaded.host_blocks.index(block) // h for block in saved.host_blocks[at * h : (at + 1) * h])
            sources = set(saved.device_blocks[at * d : (at + 1) * d])
            assert read < min(at // d for at, block in enumerate(loaded.device_blocks) if block in sources)

    def writes(self, store: TransferPlan, blocks: set[int]) -> bool:
        return any(not blocks.isdisjoint(group.host_blocks) for group in store.copies)

    def source_of(self, plan: TransferPlan) -> list[Any]:
        """Content of a store's blocks once the compute before it is done: KV that belongs together."""
        found = [self.device[rank].get(b, NOTHING) for rank in self.ranks for c in plan.copies for b in c.device_blocks]
        cancelled = self.is_cancelled(plan.id)
        assert cancelled or all(isinstance(each[0], int) for each in found), f"a store reads {found}"
        return found

    def is_cancelled(self, id: int) -> bool:
        return next(each for each in self.cache.edge.ledger if each.id == id).is_cancelled

    @rule(
        copies=st.lists(st.tuples(positions, positions, st.sampled_from(ENDS)), max_size=4),
        rank=positions,
        report=st.sampled_from(["none", "lost", "half", "whole", "whole", "whole"]),
    )
    def ranks_work(self, copies: list[tuple[int, int, str]], rank: int, report: str) -> None:
        """Some shares of some transfers are copied, do not fit, or fail; one rank may report, in vain or in part."""
        for which, on, end in copies:
            open_ = [each for each in self.copies.values() if len(each.copied) < len(self.ranks)]
            if open_:
                copy = pick(open_, which)
                rank_of = pick([each for each in self.ranks if each not in copy.copied], on)
                self.copy(copy, rank_of, end == "fails", unfit=on if end == "unfit" else None)
        if report != "none":
            self.report(rank % len(self.ranks), lost=report == "lost", half=report == "half")

    def copy(self, copy: Copy, rank: int, fails: bool, unfit: int | None = None) -> None:
        """`unfit` is by how many pieces the first one of a store that does not fit is behind the first."""
        if copy.cancelled:
            copy.copied[rank] = False
            return
        is_load = copy.plan.direction is Direction.LOAD
        for before in map(self.copies.get, copy.plan.after if is_load else ()):  # what it overwrites is read first
            if before is not None and rank not in before.copied:
                self.copy(before, rank, fails)
        for before in list(self.copies.values()) if is_load else ():  # and what compute of the steps before waited for
            if before.plan.holds_compute and before.plan.id < copy.plan.id and rank not in before.copied:
                self.copy(before, rank, fails)
        copy.copied[rank] = not fails and copy.epoch != -1
        if is_load:
            sequence = self.loads[copy.plan.id]
            for slot in sequence.destinations[sequence.n0 // GRID : sequence.boundary // GRID]:
                self.device[rank].update(dict.fromkeys(self.slots.blocks_of(slot), "poison"))
        for group in copy.plan.copies:
            piece = self.planner.pieces[group.group]
            h, d = piece.host_blocks, piece.device_blocks
            for at in range(len(group.host_blocks) // h):
                host = group.host_blocks[at * h : (at + 1) * h]
                device = group.device_blocks[at * d : (at + 1) * d]
                if copy.plan.direction is Direction.STORE:
                    content = tuple(self.device[rank].get(block, NOTHING) for block in device)
                    is_unfit = unfit is not None and at % 3 == unfit % 3
                    if is_unfit:
                        copy.unfit[rank] = (*copy.unfit.get(rank, ()), host[0])
                    for part, block in enumerate(host):
                        self.host[rank][block] = "torn" if fails or is_unfit else (content, part)
                else:
                    memory = self.host[rank] | copy.lent[rank]
                    parts = [memory.get(block, NOTHING) for block in host]
                    whole = parts == [(parts[0][0], part) for part in range(h)] and not fails
                    for part, block in enumerate(device):
                        self.device[rank][block] = parts[0][0][part] if whole else "torn"

    @precondition(lambda self: self.loads)
    @rule(which=positions, rank=positions)
    def a_load_is_late(self, which: int, rank: int) -> None:
        """A rank gives it up: nobody finds what it reads any more, and it goes on all the same until it has ended.

        What was withdrawn before may have been stored anew, in other blocks: that is found.
        """
        id = pick(sorted(self.loads), which)
        copy = self.copies.get(id)
        if copy is None or copy.epoch == -1:
            return
        report = RankReport(rank % len(self.ranks), late=frozenset([id]))
        self.told.append(report)
        self.hear(report)
        self.late.add(id)
        sequence = self.loads[id]
        found = self.cache.pool.find(sequence.request.keys[sequence.n0 // GRID])
        read = {block for each in copy.plan.copies for block in each.host_blocks}
        assert copy.epoch != self.epoch or found is None or found not in read

    @precondition(lambda self: self.told and self.copies.keys() - self.resolved.keys())
    @rule(which=positions)
    def an_old_report_comes_again(self, which: int) -> None:
        self.hear(pick(self.told, which))

    def report(self, rank: int, lost: bool = False, half: bool = False) -> None:
        mine = {id: copy.copied[rank] for id, copy in self.copies.items() if rank in copy.copied}
        mine = {id: ok for id, ok in mine.items() if id >= self.resolved_below}
        if half:
            mine = {id: ok for id, ok in mine.items() if id % 2}
        done = frozenset(id for id, ok in mine.items() if ok)
        self.prepared[rank] = min(self.host_blocks, self.prepared[rank] + self.portion)
        unfit = tuple((id, self.copies[id].unfit[rank]) for id in done if rank in self.copies[id].unfit)
        report = RankReport(rank, done, frozenset(mine) - done, self.prepared[rank], unfit=unfit)
        if not lost:
            self.told.append(report)
            self.hear(report)

    def hear(self, report: RankReport) -> None:
        all_resolved = self.cache.report(report)
        stored = any(each.direction is Direction.STORE for each in all_resolved)
        for resolved in all_resolved:  # before anybody takes blocks that are free from now on
            if resolved.direction is Direction.LOAD and resolved.ok:
                self.was_loaded(self.loads[resolved.id])
        for resolved in all_resolved:
            assert resolved.id not in self.resolved, "resolved twice (rule 10)"
            copy = self.copies[resolved.id]
            assert len(copy.copied) == len(self.ranks), "resolved before all ranks had reported (rule 10)"
            self.resolved[resolved.id] = resolved.ok
            assert not (resolved.ok and resolved.id in self.late), "a load that was given up counted all the same"
            if resolved.ok:
                assert all(copy.copied.values()) and copy.epoch == self.epoch
            if resolved.direction is Direction.LOAD:
                if not (resolved.ok or stored or copy.plan.failed or copy.epoch == -1 or resolved.id in self.late):
                    sequence = self.loads[resolved.id]
                    first = sequence.request.keys[sequence.n0 // GRID]
                    read = {block for each in copy.plan.copies for block in each.host_blocks}
                    assert self.cache.pool.find(first) not in read, "it would fail again, for ever (rule 10)"
                self.loaded(self.loads.pop(resolved.id), resolved.id, resolved.ok)

    def was_loaded(self, sequence: Sequence) -> None:
        assert not sequence.stale, "bytes from before a reset (rule 13)"
        for at in range(sequence.n0 // GRID, sequence.boundary // GRID):
            right = self.pattern(sequence.epoch, sequence.request.keys[at])
            for rank in self.ranks:
                assert self.on_device(rank, sequence.destinations[at]) == right, "a load brought other bytes"

    def loaded(self, sequence: Sequence, id: int, ok: bool) -> None:
        if self.running.get(sequence.id) is not sequence:
            return
        assert sequence.loading == id
        sequence.loading = None
        if not ok:
            self.copy_before_compute()  # stores of this step may read what it computes over
            for slot in sequence.holding.slots[sequence.n0 // GRID :]:
                self.write(slot, ["failed"] * len(self.slots.blocks_of(slot)))
            return
        sequence.computed = sequence.boundary
        self.read_everything_before(sequence)
        self.slots.publish(sequence.holding, sequence.request.keys, sequence.boundary // GRID)

    # events in between

    @precondition(lambda self: self.cache.statistics().pool.cached)
    @rule(sure=st.sampled_from([False, False, True]))
    def the_weights_change(self, sure: bool) -> None:
        if not sure:
            return
        self.cache.reset()
        self.slots.reset()
        self.epoch += 1
        for sequence in self.running.values():
            sequence.stale = True
        assert not self.on_host()

    @precondition(lambda self: self.copies.keys() - self.resolved.keys())
    @rule(sure=st.sampled_from([*5 * [False], True]))
    def the_link_breaks(self, sure: bool) -> None:
        """Whatever is under way fails: often enough the cache turns itself off."""
        if sure:
            self.everything_lands(fails=True)

    def flood(self, slots: int) -> None:
        for count in range(slots, 0, -1):
            holding = self.slots.take([], 0, count)
            if holding is not None:
                if self.notes:
                    self.one_step_begins()
                    self.copy_before_compute()
                for slot in holding.slots:
                    self.write(slot, ["flood"] * len(self.slots.blocks_of(slot)))
                self.slots.let_go(holding)
                return

    @rule(which=positions)
    def a_block_goes_bad(self, which: int) -> None:
        """One that only the device's own cache, or a store, still uses."""
        used = {slot for sequence in self.running.values() for slot in sequence.holding.slots}
        names = [each.prompt for each in self.running.values()]
        free = [
            (slot, key)
            for slot, key in self.slots.cached()
            if slot not in used and not any(name.startswith(key.decode()) for name in names)
        ]
        if not free:
            return
        slot, _ = pick(free, which)
        self.slots.bad(slot)
        self.write(slot, ["bad"] * len(self.slots.blocks_of(slot)))
        self.cache.invalidated(self.slots.blocks_of(slot))

    @rule(prompt=prompts)
    def a_prefix_is_reserved(self, prompt: str) -> None:
        lease = self.cache.reserve(Request("lease", chain(prompt), 100), len(prompt) * GRID)
        assert (lease is not None) == self.on_host().issuperset(beginnings(prompt))
        if lease is not None:
            self.leases.append((lease, prompt, self.epoch))

    @precondition(lambda self: self.leases)
    @rule(which=positions)
    def a_lease_ends(self, which: int) -> None:
        lease, _, _ = self.leases.pop(which % len(self.leases))
        self.cache.release(lease)
        with pytest.raises(MisuseError):
            self.cache.release(lease)

    # invariants

    @invariant()
    def the_cache_keeps_its_own_rules(self) -> None:
        self.cache.check_valid()
        self.slots.check_valid()

    @invariant()
    def the_log_lists_the_boundaries_that_can_be_hit(self) -> None:
        assert self.listener.hear(self.cache.take_events()) == self.can_be_hit()

    @invariant()
    def bytes_are_those_of_the_key(self) -> None:
        """Everything the host can find is there, on every rank, from this epoch."""
        for name in self.on_host():
            blocks = list(self.cache.pool.blocks_of([self.cache.pool.find(name.encode())]))
            whole = self.pattern(self.epoch, name.encode())
            for piece in self.planner.pieces:
                if not piece.in_chunk:
                    continue
                content = tuple(whole[: piece.device_blocks])
                del whole[: piece.device_blocks]
                for part in range(piece.host_blocks):
                    block = blocks.pop(0)
                    for rank in self.ranks:
                        assert self.host[rank].get(block) == (content, part), f"rank {rank} has other bytes for {name}"

    @invariant()
    def bytes_that_move_are_held(self) -> None:
        """Device blocks of a transfer are nobody else's until all ranks have reported, but of stores at hand-out: ranks
        read them before compute, or before the load that holds them (rules 10, 11).
        """
        loads = {id for copy in self.copies.values() if copy.plan.direction is Direction.LOAD for id in copy.plan.after}
        for id, copy in self.copies.items():
            if id not in self.resolved and not copy.plan.holds_compute and id not in loads:
                for group in copy.plan.copies:
                    for block in group.device_blocks:
                        slot = next(s for s in range(20) if block in self.slots.blocks_of(s))
                        assert not self.slots.is_free(slot), f"block {block} of transfer {id} can be reused"

    @invariant()
    def reserved_chunks_stay(self) -> None:
        """Unless its bytes could not be trusted any more: a transfer failed, or a load was given up."""
        if self.late or not all(self.resolved.values()):
            return
        for _, prompt, epoch in self.leases:
            if epoch == self.epoch:
                assert self.on_host().issuperset(beginnings(prompt))

    def teardown(self) -> None:
        """Everything ends well: nothing is held, pinned, or written down any more."""
        if not hasattr(self, "cache"):
            return
        self.patch.undo()
        for sequence in list(self.running.values()):
            self.end(sequence)
        for lease, _, _ in self.leases:
            self.cache.release(lease)
        for _ in range(100):
            self.everything_lands()
            if not self.cache.statistics().storing + self.cache.statistics().loading:
                break
        self.bytes_are_those_of_the_key()
        self.the_cache_keeps_its_own_rules()
        assert set(self.copies) == set(self.resolved), "a transfer was never resolved (rule 10)"
        now = self.cache.statistics()
        assert now.running == now.storing == now.loading == 0
        assert now.pool.pinned == now.pool.writing == now.pool.retired == 0
        assert not self.cache.edge.ledger.writing and not self.cache.edge.ledger.loading
        if isinstance(self.slots, QueueSlots):
            assert not any(self.slots.references.values()), "a hold was not given back"
        else:
            device = self.slots.pool.statistics()
            assert device.pinned == device.writing == device.retired == 0, "a hold was not given back"


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=500)
