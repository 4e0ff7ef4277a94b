"""The machines of a cache over an engine, with a tier below the host: device, host and slots fail each in its own way.

Added to what those machines do: tiers of ranks work late, fail, lose slots, and have slots whose bytes changed under an
unchanged label; their reports are lost, repeated and partial; requests wait for promotions, come back, or never do; the
process ends at any moment and begins again with the slots as they are by then, reported in portions of any size.

Where the tier is a store, others put chunks and pieces there in any order, and it loses them; it answers late, in any
order, repeatedly or never. The decider may know only what was there at some time.

Wrong bytes are so seen: everything the host finds is compared on every rank (by the machines below), and every record
that a restart could serve must hold the bytes of its key, of this epoch.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cpu_prefix_cache import POLICIES
from cpu_prefix_cache.deciding import (
    Direction,
    EngineSteps,
    HybridChunkPlanner,
    PrefixGroup,
    RankReport,
    Request,
    TieredCache,
    TransferPlan,
)
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.messages.tier import Ask, TierOptions, TierPlan, TierReport, Told
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.testing.engine import cache_options
from cpu_prefix_cache.testing.slots import PoolSlots
from cpu_prefix_cache.tiers import promotions, questions, tier_cache, tiered_cache
from property_tests.machines.test_hybrid_cache_machine import HYBRID, HybridCacheMachine
from property_tests.machines.test_prefix_cache_machine import ALL_NAMES, FAILURES, GRID, NOTHING, PrefixCacheMachine
from property_tests.models.engines import QueueSlots
from property_tests.models.listener import Listener
from property_tests.models.tier_model import RankSlots, RankStore
from property_tests.strategies import chain, pick, positions, prompts

PLANS = {
    "one group": [("attention", 4, 100)],
    "two device blocks to a chunk": [("attention", 2, 100)],
    "two host blocks to a chunk": [("one", 4, 4_000), ("other", 4, 4_096)],
    "four host blocks to a chunk": [("draft", 2, 2_048), ("target", 4, 12_000)],
}
PREFILL = 10.0  # tokens a second
long_prompts = st.text("ab", min_size=3, max_size=6)
Thing = tuple[str, int]
THINGS = ["step", "step", "a read ends", "a read ends", "a read fails", "a read is late", "a slot is bad"]
THINGS += ["the tier ends", "the host ends", "another comes", "another comes", "another asks", "it is put off"]
THINGS += ["time", "reset", "others write", "others write", "it answers", "it cannot be asked"]
things = st.lists(st.tuples(st.sampled_from(THINGS), positions), max_size=5)
TIER_OPTIONS = {
    "offload": st.sampled_from([None, "lazy", "eager"]),
    "policy": st.sampled_from(sorted(POLICIES)),
    "times_the_host": st.sampled_from([2, 2, 3, 10]),
    "share": st.sampled_from([1, 2, 4]),  # of the host that is promoted, at most: 1/4 is the library's
    "slice_blocks": st.sampled_from([1, 2, 1_000]),
    "rate": st.sampled_from([None, None, None, 1e9, 100.0]),  # the last is slower than computing
    "is_slow": st.sampled_from([False, False, False, True]),  # the tier works only where a rule says so
    "is_silent": st.sampled_from([False, False, False, True]),  # a store answers only where a rule says so
    "store_after": st.sampled_from([1, 1, 2]),
    "tick": st.sampled_from([0.0, 0.01, 0.01, 0.04]),  # seconds to a step
}
ASK_SECONDS = 0.05


@dataclass(eq=False)
class Move:
    """A transfer in the hands of the ranks' tiers. `refused` has slots by rank."""

    plan: TransferPlan
    cancelled: bool = False
    copied: dict[int, bool] = field(default_factory=dict)
    refused: dict[int, list[int]] = field(default_factory=dict)


class WithTier(PrefixCacheMachine):
    """Parts that a tier adds to a machine. A subclass makes the device in `new_slots`, after a restart too."""

    cache: TieredCache

    ask_seconds: float | None = None

    def new_slots(self) -> Any:
        raise NotImplementedError

    def new_tier(self) -> Any:
        return RankSlots(self.planner)

    def build_tier(self, options: dict[str, Any], host: dict[str, Any]) -> None:
        self.tier, self.host_options = options, host
        self.ranks = range(host["ranks"])
        self.patch.setattr(tier_cache, "READ_BYTES", options["slice_blocks"] * self.planner.host_block_bytes)
        self.patch.setattr(promotions, "PROMOTED_SHARE", options["share"])
        self.tiers = [self.new_tier() for _ in self.ranks]
        self.budget = max(self.planner.host_blocks_per_chunk, self.host_blocks // options["share"])
        self.stages = 0
        self.new_cache()

    def new_cache(self) -> None:
        self.slots = self.new_slots()
        self.listener_below = Listener()
        self.cache = TieredCache(
            self.planner,
            self.slots.device,
            host_blocks=self.host_blocks,
            below=TierOptions(
                self.tier["times_the_host"] * self.host_blocks + 1,
                offload=self.tier["offload"],
                policy=self.tier["policy"],
                ask_seconds=self.ask_seconds,
            ),
            **cache_options(
                store_after=self.tier["store_after"],
                log_boundaries=True,
                steps=EngineSteps(max_tokens=3 * GRID),
                **self.host_options,
            ),
        )
        for _ in range(2 if self.tier["rate"] else 0):
            self.cache.prefilled(1_024, 1_024 / PREFILL)
        self.moves: dict[int, Move] = {}
        self.told_below: list[TierReport] = []
        self.shut: set[int] = set()  # ranks whose tiers cannot be opened
        self.asking: dict[str, tuple[str, int]] = {}  # who waits for the tier
        self.queued: set[str] = set()  # those of them that were not looked up yet
        self.deadlines: dict[str, float] = {}
        self.tried_at = 0.0  # reading it, although that seemed slower than computing
        self.bad: set[tuple[int, int]] = set()  # slots and generations that were refused, or whose load failed
        self.highest = -1  # generation given so far
        self.below_resolved: set[int] = set()
        self.is_told = True  # of the last reset
        self.asks: dict[int, Ask] = {}  # that were not answered
        self.answers: dict[int, Told] = {}  # that somebody waits for

    # requests

    def check_pending(self, id: str, keys: list[bytes], deadline: float, n0: int, could: int) -> None:
        want = self.cache._wants.get(id)
        if want is None or want.is_over or want.deadline != deadline:
            super().check_pending(id, keys, deadline, n0, could)
            return
        assert self.now < deadline
        if self.tier["rate"] == 100.0 and id not in self.deadlines:
            assert self.now >= self.tried_at + min(60.0, max(2.0, self.tried_at)), "computing is faster, and it is read"
            self.tried_at = self.now
        before = self.deadlines.setdefault(id, deadline)
        assert before == deadline or self.now >= before + questions.REMEMBERED_SECONDS, "it waits for ever"
        self.deadlines[id] = deadline

    def waits_until(self, id: str) -> float | None:
        return self.deadlines.get(id)

    def a_request_arrives(self, prompt: str, partial: int, cut: int, far: str, loads_last: bool) -> None:
        super().a_request_arrives(prompt, partial, cut, far, loads_last)
        id = f"r{self.born}"
        if id not in self.running and self.waits_until(id) is not None:
            self.asking[id] = prompt, partial
            if not loads_last:
                self.the_tier_ends()
                self.asks_again(id)

    def begin(self, id: str, prompt: str, partial: int, cut: int) -> bool:
        """A request that is admitted, preempted and comes back looks up, and waits, like a new one."""
        is_admitted = super().begin(id, prompt, partial, cut)
        if is_admitted:
            self.forget_waits(id)
        return is_admitted

    def forget_waits(self, id: str) -> None:
        self.deadlines.pop(id, None)

    @rule(prompt=long_prompts, partial=st.integers(1, GRID - 1), meanwhile=things)
    def a_request_is_queued(self, prompt: str, partial: int, meanwhile: list[Thing]) -> None:
        """Its turn comes later, or never."""
        self.born += 1
        id = f"q{self.born}"
        self.asking[id] = prompt, partial
        self.queued.add(id)
        self.cache.queued(Request(id, chain(prompt), len(prompt) * GRID + partial), self.now)
        for what, number in meanwhile:
            self.happens(what, number)

    @rule(prompt=long_prompts, meanwhile=things)
    def a_prompt_is_expected(self, prompt: str, meanwhile: list[Thing]) -> None:
        """By a hint, which may be wrong."""
        self.cache.expected(chain(prompt), self.now)
        for what, number in meanwhile:
            self.happens(what, number)

    def asks_again(self, id: str) -> bool:
        prompt, partial = self.asking[id]
        self.queued.discard(id)
        if not self.begin(id, prompt, partial, 0):
            return False
        del self.asking[id]
        sequence = self.running[id]
        if sequence.loading is not None:
            self.everything_lands()
        if sequence.loading is None:
            self.compute(sequence, 100, step_between=False)
            self.end(sequence)
        return True

    @rule(others=st.lists(long_prompts, min_size=2, max_size=4), prompt=long_prompts, before=things, meanwhile=things)
    def the_host_forgets_a_prompt_that_comes_back(
        self, others: list[str], prompt: str, before: list[Thing], meanwhile: list[Thing]
    ) -> None:
        """Things happen while it is written to the tier, and while it is read."""
        self.a_request_arrives(prompt, 1, 0, "stored", True)
        for thing in before:
            self.happens(*thing)
        for each in others:
            self.a_request_arrives(each, 1, 0, "stored", False)
        self.flood(9)
        self.a_request_comes_and_waits(prompt, meanwhile)

    @rule(others=st.lists(long_prompts, min_size=2, max_size=4), prompt=long_prompts, before=things, meanwhile=things)
    def the_host_forgets_another(
        self, others: list[str], prompt: str, before: list[Thing], meanwhile: list[Thing]
    ) -> None:
        """Under a second name, because Hypothesis leaves out half of the rules of a run."""
        self.the_host_forgets_a_prompt_that_comes_back(others, prompt, before, meanwhile)

    def a_request_comes_and_waits(self, prompt: str, meanwhile: list[Thing]) -> None:
        self.a_request_arrives(prompt, 1, 0, "computed", True)
        id = f"r{self.born}"
        for thing in meanwhile:
            self.happens(*thing)
        for _ in range(4):
            if id in self.asking:
                self.the_tier_ends()
                self.asks_again(id)

    def happens(self, what: str, number: int) -> None:
        rank = number % len(self.ranks)
        reads = [id for id, move in self.moves.items() if move.plan.direction is Direction.LOAD and not move.copied]
        match what:
            case "step":
                self.one_step_begins()
            case "a read ends" if reads:
                for each in self.ranks:
                    self.move(self.moves[pick(reads, number)], each, False)
                    self.report_below(each)
            case "a read fails" if reads:
                for each in self.ranks:
                    self.move(self.moves[pick(reads, number)], each, each == rank)
                    self.report_below(each)
            case "a read is late" if reads:
                self.a_read_of_a_tier_is_late(number, rank)
            case "a slot is bad":
                self.a_slot_goes_bad(number, rank, number % 2 == 0)
            case "the tier ends":
                self.the_tier_ends(fails=number % 3 == 0)
            case "the host ends":
                super().everything_lands(fails=number % 4 == 0)
            case "another comes":
                self.a_request_arrives(pick(ALL_NAMES, number).decode(), 1, 0, "computed", number % 2 == 0)
            case "another asks":
                self.who_waits_asks_again(number) if self.asking else None
            case "it is put off":
                self.cache.catch_up()
            case "time":
                self.now += (0.02, 0.05, 1.1, 31.0, 70.0)[number % 5]
            case "reset":
                self.the_weights_change(number % 2 == 0)
            case "others write" | "it answers" | "it cannot be asked":
                self.happens_in_a_store(what, number)

    def happens_in_a_store(self, what: str, number: int) -> None: ...

    @precondition(lambda self: self.asking)
    @rule(which=positions)
    def who_waits_asks_again(self, which: int) -> None:
        self.asks_again(pick(list(self.asking), which))

    @precondition(lambda self: self.asking)
    @rule(which=positions, is_notified=st.booleans())
    def who_waits_is_aborted(self, which: int, is_notified: bool) -> None:
        """It never comes back, and not every engine notifies the cache."""
        id = pick(list(self.asking), which)
        del self.asking[id]
        if is_notified or id in self.queued:
            self.queued.discard(id)
            self.cache.abandoned(id)
            self.forget_waits(id)
            assert id not in self.cache._wants

    @precondition(lambda self: self.asking)
    @rule(which=positions)
    def a_deadline_passes(self, which: int) -> None:
        """Edge 10 of the study: then the answer is what the host has, or Pending for a load."""
        id = pick(list(self.asking), which)
        self.now = max(self.now, self.waits_until(id) or 0)
        self.asks_again(id)

    @rule(seconds=st.sampled_from([0.05, 1.1, 31.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # steps

    @rule()
    def one_step_begins(self) -> None:
        self.now += self.tier["tick"]
        self.cache.passed(self.now)
        self.take_in(self.cache.step())
        self.take_in_below(self.cache.plan_below())

    @rule()
    def what_was_put_off_is_done(self) -> None:
        self.cache.catch_up()

    def take_in_below(self, plan: TierPlan) -> None:
        self.is_told = True
        for rank in self.tiers:
            rank.advance(plan)
        self.tiers[0].taken = max(self.tiers[0].taken, plan.taken)
        self.asks |= {ask.id: ask for ask in plan.asks}
        for open_ in (self.asks, self.answers):
            for id in [id for id in open_ if id < plan.told_below]:
                del open_[id]
        assert plan.first_generation == self.cache.below._generations.first
        for transfer in plan.step.transfers:
            assert transfer.id not in self.moves
            self.moves[transfer.id] = Move(transfer, cancelled=transfer.failed)
            slots = [slot for copy in transfer.copies for slot in copy.host_blocks]
            blocks = [block for copy in transfer.copies for block in copy.device_blocks]
            assert len(set(slots)) == len(slots) == len(set(blocks)) == len(blocks)
            labels = [label for copy in transfer.copies for label in copy.labels]
            assert len(labels) == len(slots)
            if transfer.direction is Direction.STORE:
                assert all(label.generation > self.highest for label in labels), "a generation comes twice"
                self.highest = max((label.generation for label in labels), default=self.highest)
                assert not labels or self.highest >= plan.first_generation
            else:
                pairs = zip(slots, labels, strict=True)  # of chunks: a bad piece may be part of other checkpoints
                read = {(slot, label.generation) for slot, label in pairs if label.block == CHUNK}
                assert self.bad.isdisjoint(read), "bytes that were refused are promoted again"
        for id in plan.step.cancelled:
            self.moves[id].cancelled |= not self.moves[id].copied
        self.below_resolved |= set(plan.step.resolved)
        self.below_resolved |= {id for id in self.moves if id < plan.step.resolved_below}

    # actions of the ranks' tiers

    @rule(
        moves=st.lists(st.tuples(positions, positions, st.sampled_from([False, False, False, True])), max_size=4),
        rank=positions,
        report=st.sampled_from(["none", "lost", "half", "whole", "whole", "whole"]),
    )
    def tiers_work(self, moves: list[tuple[int, int, bool]], rank: int, report: str) -> None:
        for which, on, fails in moves:
            open_ = [each for each in self.moves.values() if len(each.copied) < len(self.ranks)]
            if open_:
                move = pick(open_, which)
                self.move(move, pick([each for each in self.ranks if each not in move.copied], on), fails)
        if report != "none":
            self.report_below(rank % len(self.ranks), lost=report == "lost", half=report == "half")

    @rule()
    def the_tier_ends(self, fails: bool = False) -> None:
        """Whatever is under way."""
        self.one_step_begins()
        self.the_store_works()
        for move in self.moves.values():
            for rank in self.ranks:
                if rank not in move.copied:
                    self.move(move, rank, fails)
        for rank in self.ranks:
            self.report_below(rank, half=True)
            self.report_below(rank)

    def the_store_works(self) -> None: ...

    @rule()
    def the_tier_ends_and_goes_on(self) -> None:
        for _ in range(3):
            self.the_tier_ends()

    @precondition(lambda self: len(self.below_resolved) < len(self.moves))
    @rule(sure=st.sampled_from([*3 * [False], True]))
    def the_disk_breaks(self, sure: bool) -> None:
        """For long enough that the tier is left alone, sometimes."""
        for _ in range(3 if sure else 0):
            self.the_tier_ends(fails=True)

    def everything_lands(self, but_loads: bool = False, fails: bool = False) -> None:
        super().everything_lands(but_loads, fails)
        if not self.tier["is_slow"]:
            self.the_tier_ends()

    def move(self, move: Move, rank: int, fails: bool) -> None:
        if move.cancelled:
            move.copied[rank] = False
            return
        move.copied[rank] = not fails
        tier, memory = self.tiers[rank], self.host[rank]
        for copy in move.plan.copies:
            for slot, block, label in zip(copy.host_blocks, copy.device_blocks, copy.labels, strict=True):
                if move.plan.direction is Direction.STORE:
                    content = memory.get(block, NOTHING)
                    if self.is_alive_below(move.plan.id):
                        assert content == self.right(label), f"slot {slot} is to hold {label}, and gets {content}"
                    tier.write(slot, label, content)
                    if fails and block % 2:
                        tier.records.pop(slot, None)
                elif fails:
                    memory[block] = "torn"
                elif (content := tier.read(slot, label)) is None:
                    memory[block] = "poison"
                    move.refused.setdefault(rank, []).append(slot)
                else:
                    memory[block] = content

    def is_alive_below(self, id: int) -> bool:
        transfer = self.cache.below.edge.ledger.get(id)
        return transfer is not None and not transfer.is_cancelled

    def right(self, label: Label) -> Any:
        """Contents of a host block with these bytes."""
        piece = self.planner.pieces[label.group]
        if label.block == CHUNK:
            content = tuple((self.epoch, label.key, piece.group.name, part) for part in range(piece.device_blocks))
        else:
            content = self.piece_pattern(self.epoch, label.key, label.group, label.block)
        return content, label.place

    def report_below(self, rank: int, lost: bool = False, half: bool = False) -> None:
        mine = {id: move.copied[rank] for id, move in self.moves.items() if rank in move.copied}
        mine = {id: ok for id, ok in mine.items() if id not in self.below_resolved and (id % 2 or not half)}
        done = frozenset(id for id, ok in mine.items() if ok)
        refused = tuple((id, tuple(each)) for id in done if (each := self.moves[id].refused.get(rank)))
        transfers = RankReport(
            rank, done, frozenset(mine) - done, load_bytes_per_second=self.tier["rate"], unfit=refused
        )
        tier = self.tiers[rank]
        report = TierReport(transfers, tier.next_generation, *tier.portion())
        if rank in self.shut:
            report = TierReport(RankReport(rank), next_generation=None)
        elif rank == 0:
            report = report._replace(told=tuple(self.answers.values()))
        if not lost:
            self.told_below.append(report)
            self.hear_below(report)

    @precondition(lambda self: self.told_below)
    @rule(which=positions)
    def an_old_report_of_a_tier_comes_again(self, which: int) -> None:
        self.hear_below(pick(self.told_below, which))

    @precondition(lambda self: any(move.plan.direction is Direction.LOAD for move in self.moves.values()))
    @rule(which=positions, rank=positions)
    def a_read_of_a_tier_is_late(self, which: int, rank: int) -> None:
        loads = [id for id, move in self.moves.items() if move.plan.direction is Direction.LOAD]
        id, rank = pick(loads, which), rank % len(self.ranks)
        late = RankReport(rank, late=frozenset([id]))
        self.hear_below(TierReport(late, self.tiers[rank].next_generation, 0, (), False))

    def hear_below(self, report: TierReport) -> None:
        ledger = self.cache.below.edge.ledger
        before = {transfer.id for transfer in ledger}
        planned = {
            (slot, self.cache.below._generations.of[slot])
            for transfer in ledger.loads.values()
            if ledger.is_planned(transfer)
            for copy in transfer.plan.copies
            for slot in copy.host_blocks
        }
        self.cache.report_below(report)
        for id in (before - {transfer.id for transfer in ledger}) & self.moves.keys():  # others' writes are not sent
            move = self.moves[id]
            assert len(move.copied) == len(self.ranks), "resolved before all ranks had reported (rule 10)"
            if move.plan.direction is Direction.LOAD:
                whole = all(move.copied.values())
                refused = {slot for slots in move.refused.values() for slot in slots}
                for copy in move.plan.copies:
                    for slot, label in zip(copy.host_blocks, copy.labels, strict=True):
                        if self.ask_seconds is None and (slot in refused or not whole):
                            self.bad |= {(slot, label.generation)} - planned  # others may have put it anew

    # events that befall slots

    @precondition(lambda self: any(tier.records for tier in self.tiers))
    @rule(which=positions, rank=positions, lost=st.booleans())
    def a_slot_goes_bad(self, which: int, rank: int, lost: bool) -> None:
        """A bit flips, or one rank has lost it."""
        tier = pick(self.tiers, rank)
        if tier.records:
            slot = pick(sorted(tier.records), which)
            tier.lost.add(slot)
            tier.records[slot].is_intact = False
            tier.records[slot].content = "flipped"
            if lost:
                del tier.records[slot]

    @rule(rank=positions, sure=st.sampled_from([*3 * [False], True]))
    def a_rank_loses_its_disk(self, rank: int, sure: bool) -> None:
        if sure:
            tier = pick(self.tiers, rank)
            tier.lost |= set(tier.records)
            tier.records.clear()

    @rule(
        sure=st.sampled_from([False, True]),
        rank=positions,
        portion=st.sampled_from([1, 2, 3, 100]),
        kept=st.lists(st.booleans(), max_size=6),
        told=st.integers(0, 4),
        shut=st.sampled_from([(), (), (0,), (1,), (0, 1)]),
        prompt=prompts,
        meanwhile=things,
    )
    def the_process_ends_and_begins_again(
        self,
        sure: bool,
        rank: int,
        portion: int,
        kept: list[bool],
        told: int,
        shut: tuple[int, ...],
        prompt: str,
        meanwhile: list[Thing],
    ) -> None:
        """At any moment: `kept` are the transfers in flight that were carried out before. One rank may be the only one
        that knows of the last reset. A request comes after so many portions were reported. Some ranks' tiers cannot be
        opened at first.
        """
        if not sure:
            return
        self.carry_out(kept)
        if not self.is_told:
            heard = self.tiers if self.ask_seconds else [pick(self.tiers, rank)]  # who puts new weights into a store
            for tier in heard:  # puts it into its namespace
                tier.advance(self.cache.plan_below())
        for tier in self.tiers:
            tier.open(portion=portion, scans=tier is self.tiers[0])
            for slot, record in self.tiers[0].records.items():
                there = tier.records.get(slot)
                if there is None or there.label.generation != record.label.generation:
                    tier.lost.add(slot)  # a transfer was carried out on one rank alone
        for each in (self.running, self.copies, self.resolved, self.loads, self.late, self.told, self.leases):
            each.clear()
        self.waiting.clear()
        self.prepared = [0 for _ in self.ranks]
        self.device = [{} for _ in self.ranks]
        self.host = [{} for _ in self.ranks]
        self.listener = Listener()
        self.resolved_below = 0
        self.new_cache()
        self.cache.edge.epoch = self.epoch
        self.shut = {rank for rank in shut if rank in self.ranks}
        for _ in range(told):
            self.the_tier_ends()
        known = [record.label.key.decode() for record in self.tiers[0].records.values()]
        self.a_request_comes_and_waits(max([prompt, *sorted(known)], key=len), meanwhile)

    @precondition(lambda self: self.shut)
    @rule()
    def the_tiers_open(self) -> None:
        assert not self.cache.below.can_be_read and self.cache.below.edge.statistics().pool.cached == 0
        self.shut.clear()
        self.the_tier_ends()

    def carry_out(self, kept: list[bool]) -> None:
        for at, move in enumerate(self.moves.values()):
            for rank in self.ranks:
                if rank not in move.copied and kept and kept[(at + rank) % len(kept)]:
                    self.move(move, rank, fails=False)

    @precondition(lambda self: self.cache.statistics().pool.cached or self.cache.below.edge.statistics().pool.cached)
    @rule(sure=st.sampled_from([False, False, True]))
    def the_weights_change(self, sure: bool) -> None:
        if sure:
            self.cache.reset()
            self.slots.reset()
            self.epoch += 1
            self.is_told = False
            for sequence in self.running.values():
                sequence.stale = True
            assert not self.on_host()
            assert not any(self.cache.below.pool.find(name) for name in ALL_NAMES)

    # invariants

    @invariant()
    def records_are_right(self) -> None:
        """Check those that could be served, now or after a restart: where all ranks have one, the highest floor counts.

        What is known before the ranks have reported is taken in later, and only if no reset came first.
        """
        opened = self.tiers[0].next_generation if self.cache.below.edge.epoch else 0
        floor = max(self.cache.below._generations.first, opened, *(tier.floor for tier in self.tiers))
        for rank, tier in enumerate(self.tiers):
            for slot, record in tier.records.items():
                if record.is_intact and record.label.generation >= floor:
                    right = self.right(record.label)
                    assert record.content == right, f"rank {rank}, slot {slot}: {record} instead of {right}"

    @invariant()
    def the_tier_has_its_listed_slots(self) -> None:
        """Leave out slots that went bad."""
        pool, generations = self.cache.below.pool, self.cache.below._generations.of
        for name in ALL_NAMES:
            for key in (name, checkpoint_key(name)):
                node = pool.find(key)
                for slot in () if node is None else pool.all_blocks_of(node):
                    for rank, tier in enumerate(self.tiers):
                        record = tier.records.get(slot)
                        has_it = record is not None and record.label.generation == generations[slot]
                        assert has_it or slot in tier.lost, f"rank {rank} does not have {key!r} in slot {slot}"
                        assert key != name or not has_it or record.label.key == key

    @invariant()
    def moving_blocks_are_held(self) -> None:
        host, slots = set(self.cache.pool.free), set(self.cache.below.pool.free)
        ledger = self.cache.below.edge.ledger
        for transfer in ledger:
            landed = ledger.has_landed(transfer)  # it waits for its parent's, and nothing copies any more
            for copy in transfer.plan.copies:
                assert landed or host.isdisjoint(copy.device_blocks), "a host block that a tier copies can be reused"
                assert slots.isdisjoint(copy.host_blocks), "a slot that is copied can be reused"

    @invariant()
    def promotions_are_bounded(self) -> None:
        """Count what is being read, and what was read and waits to be admitted (edges 7 and 30 of the study)."""
        pool, stores = self.cache.pool, [store for store, *_ in self.cache._promotions.slices.values()]
        moving = sum(1 for store in stores for node in store.nodes for _ in pool.all_blocks_of(node))
        assert moving + sum(want.blocks for want in self.cache._promotions.open) <= self.budget

    @invariant()
    def the_tiers_log_lists_where_requests_can_be_brought(self) -> None:
        pool, needs_checkpoint = self.cache.below.pool, self.planner.needs_checkpoint
        there = [name for name in ALL_NAMES if pool.find(name) is not None]
        could = {name.decode() for name in there if not needs_checkpoint(len(name)) or pool.find(checkpoint_key(name))}
        assert self.listener_below.hear(self.cache.below.pool.take_events()) == could

    @invariant()
    def leases_end(self) -> None:
        wants = {*self.cache._wants.values(), *self.cache._promotions.open}
        leases = {want.lease for want in wants if want.lease is not None}
        assert not any(lease.released for lease in leases)
        late = tiered_cache.LEASE_SECONDS + questions.REMEMBERED_SECONDS
        endless = self.queued | {want.request.id for want in wants if want is self.cache._ahead}
        if self.tier["rate"] is None:
            assert all(want.deadline <= self.now + late for want in wants if want.request.id not in endless)
        assert {want.request.id for want in wants if want.deadline == math.inf} <= endless
        assert self.cache._queued.keys() <= self.queued

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for id in self.queued:
            self.cache.abandoned(id)
        for sequence in list(self.running.values()):
            self.end(sequence)
        while self.leases:
            self.cache.release(self.leases.pop()[0])
        self.tier["is_slow"] = self.tier["is_silent"] = False
        self.shut.clear()
        at_rest = 0
        for _ in range(200):
            self.now += 10.0
            self.everything_lands()
            at_rest = 0 if self.cache.has_transfers or self.cache._wants else at_rest + 1
            if at_rest == 3:
                break
        assert at_rest == 3, "it never comes to rest"
        super().teardown()
        below = self.cache.below.edge.statistics()
        assert below.storing == below.loading == 0
        assert below.pool.pinned == below.pool.writing == below.pool.retired == 0
        assert not self.cache.below.edge.ledger.writing and not self.cache.below.edge.ledger.loading
        assert not self.cache._promotions.slices and not self.cache._wants and not self.cache._promotions.open
        host = self.cache.statistics().pool
        assert host.pinned == host.writing == host.retired == 0
        assert not self.cache.below.is_flushed or not self.cache.below.demotion.num_waiting


class WithStore(WithTier):
    """Changes where the tier is a store that others write, too."""

    ask_seconds = ASK_SECONDS
    tiers: list[RankStore]

    def new_tier(self) -> RankStore:
        return RankStore(self.planner)

    def new_cache(self) -> None:
        super().new_cache()
        self.hearing: dict[str, float] = {}  # who waits for an answer

    @rule(sure=st.booleans())
    def the_weights_change(self, sure: bool) -> None:
        """Then every request is looked up anew."""
        super().the_weights_change(sure)
        if sure:
            self.hearing.clear()

    def forget_waits(self, id: str) -> None:
        super().forget_waits(id)
        self.hearing.pop(id, None)

    # actions of others and of the store

    @rule(what=st.lists(st.tuples(prompts, positions), min_size=1, max_size=4))
    def others_write(self, what: list[tuple[str, int]]) -> None:
        """Whole prompts, single chunks, pieces, on all ranks or on one."""
        if not self.is_told:
            return
        for prompt, number in what:
            names = chain(prompt)[-1:] if number % 4 == 0 else chain(prompt)
            ranks = [pick(self.ranks, number)] if number % 5 == 0 else self.ranks
            for name in names:
                for label in self.labels_at(name, number % 3 > 0):
                    for rank in ranks:
                        self.tiers[rank].others_write(label, self.right(label))

    def labels_at(self, name: bytes, has_checkpoint: bool) -> list[Label]:
        """Labels of a chunk, and of the checkpoint at its end."""
        keys, pieces = chain(name.decode()), self.planner.pieces
        chunk = [(name, group, CHUNK) for group, piece in enumerate(pieces) if piece.in_chunk]
        beside = [(keys[at.chunk], at.group, at.block) for at in self.planner.checkpoint(len(name))]
        return [
            Label(key, b"", group, place, block, 0)
            for key, group, block in (chunk + beside if has_checkpoint else chunk)
            for place in range(pieces[group].host_blocks)
        ]

    @precondition(lambda self: self.asks)
    @rule(which=positions, ok=st.sampled_from([True, True, True, False]), is_told=st.booleans())
    def the_store_answers(self, which: int, ok: bool, is_told: bool) -> None:
        """Also a question that was answered already, once more."""
        ask = pick(list(self.asks.values()), which)
        self.answers[ask.id] = self.tiers[0].answer(ask) if ok else Told(ask.id, ok=False)
        if is_told:
            self.report_below(0)

    def the_store_works(self) -> None:
        if not self.tier["is_silent"]:
            for id, ask in self.asks.items():
                self.answers.setdefault(id, self.tiers[0].answer(ask))

    def happens_in_a_store(self, what: str, number: int) -> None:
        if what == "others write":
            self.others_write([(pick(ALL_NAMES, number).decode(), number // len(ALL_NAMES))])
        elif self.asks:
            self.the_store_answers(number, what == "it answers", True)

    @rule(prompt=long_prompts, number=positions, meanwhile=things)
    def others_have_a_prompt_that_comes(self, prompt: str, number: int, meanwhile: list[Thing]) -> None:
        self.others_write([(prompt, number * 20 + 1), (prompt[:-1], 1)])
        self.a_request_comes_and_waits(prompt, meanwhile)

    @rule(prompt=long_prompts, number=positions, meanwhile=things)
    def others_have_another(self, prompt: str, number: int, meanwhile: list[Thing]) -> None:
        """Under a second name, because Hypothesis leaves out half of the rules of a run."""
        self.others_have_a_prompt_that_comes(prompt, number, meanwhile)

    # requests

    def check_pending(self, id: str, keys: list[bytes], deadline: float, n0: int, could: int) -> None:
        question = self.cache.below._questions._of.get(id)
        if question is None or question.is_over or question.deadline != deadline:
            super().check_pending(id, keys, deadline, n0, could)
            return
        assert self.now < deadline <= self.now + ASK_SECONDS
        before = self.hearing.setdefault(id, deadline)
        assert before == deadline or self.now >= before + questions.REMEMBERED_SECONDS, "it waits for ever"
        self.hearing[id] = deadline

    def waits_until(self, id: str) -> float | None:
        return self.deadlines.get(id, self.hearing.get(id))

    # invariants

    @invariant()
    def records_are_right(self) -> None:
        """Check today's names. A rank takes others after a reset, and no plan reads before it knows of the reset."""
        if self.is_told:
            super().records_are_right()

    @invariant()
    def the_tier_has_its_listed_slots(self) -> None:
        """The decider knows what was there at some time; also pieces by the name of their chunk."""
        pool, had = self.cache.below.pool, self.tiers[0].had
        for name in ALL_NAMES:
            for key, is_checkpoint in ((name, False), (checkpoint_key(name), True)):
                if pool.find(key) is not None:
                    labels = self.labels_at(name, is_checkpoint)
                    assert had.issuperset((each.key, each.group, each.place, each.block) for each in labels)

    @invariant()
    def questions_end(self) -> None:
        questions_ = self.cache.below._questions
        assert len(questions_._of) <= self.born + 1 and len(questions_._open) <= questions_._next
        assert all(question.deadline <= self.now + ASK_SECONDS for question in questions_._of.values())

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "cache"):
            questions_ = self.cache.below._questions
            self.cache.passed(self.now + 100.0)
            assert not questions_._of, "a request is remembered for ever"
            assert len(questions_._open) <= 1, "a question is remembered for ever"  # the probe of a store that is away


class TierMachine(WithTier):
    @initialize(
        mode=st.sampled_from(["eager", "lazy"]),
        ranks=st.sampled_from([1, 2, 3]),
        plan=st.sampled_from(sorted(PLANS)),
        pooled=st.booleans(),
        host_chunks=st.integers(4, 12),
        device_chunks=st.integers(8, 12),
        portion=st.sampled_from([0, 0, 0, 1, 3, 100]),
        policy=st.sampled_from(sorted(POLICIES)),
        failures=FAILURES,
        tier=st.fixed_dictionaries(TIER_OPTIONS),
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
        failures: int,
        tier: dict[str, Any],
    ) -> None:
        groups = [PrefixGroup(name=name, block_tokens=tokens, block_bytes=size) for name, tokens, size in PLANS[plan]]
        self.planner = HybridChunkPlanner(groups, max_model_len=1_000, grid_tokens=GRID, in_pages=True)
        self.host_blocks = host_chunks * self.planner.host_blocks_per_chunk
        self.is_lazy, self.is_pooled = mode == "lazy", pooled
        self.device_chunks, self.policy = device_chunks, policy
        ready = 0 if portion else None
        self.begin_with_nothing(ranks, portion, failures)
        self.build_tier(tier, {"ready_blocks": ready, "offload": mode, "policy": policy, "ranks": ranks})

    def new_slots(self) -> Any:
        width = self.planner.device_blocks_per_chunk
        if self.is_pooled and width == 1:
            return PoolSlots(self.planner, self.device_chunks, self.policy)
        return QueueSlots(self.device_chunks, width)


class HybridTierMachine(WithTier, HybridCacheMachine):
    @initialize(**HYBRID, tier=st.fixed_dictionaries(TIER_OPTIONS))
    def build(
        self,
        mode: str,
        ranks: int,
        layout: str,
        host_room: int,
        device_room: int,
        portion: int,
        interval: int | None,
        policy: str,
        failures: int,
        tier: dict[str, Any],
    ) -> None:
        self.plan(layout, host_room, device_room, in_pages=True)
        host = {"ready_blocks": 0 if portion else None, "offload": mode, "policy": policy, "ranks": ranks}
        self.begin_with_nothing(ranks, portion, failures)
        self.build_tier(tier, {**host, "checkpoint_interval": interval and interval * GRID})

    def new_slots(self) -> Any:
        return PoolSlots(self.planner, self.device_blocks)


class StoreMachine(WithStore, TierMachine):
    """Prefix groups."""


class HybridStoreMachine(WithStore, HybridTierMachine):
    """Windows, local chunks, states."""


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=100)
TestHybridTier = HybridTierMachine.TestCase
TestHybridTier.settings = settings(max_examples=70)
TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60)
TestHybridStore = HybridStoreMachine.TestCase
TestHybridStore.settings = settings(max_examples=60)
