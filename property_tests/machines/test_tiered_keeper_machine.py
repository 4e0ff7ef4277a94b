"""The keeper's machine with a tier below the pool: what is read from there holds what was wanted, too.

The tier is a dict of slots with labels (`tier_model.py`), of which copies end late, or fail, and contents are damaged.
Beside what the keeper alone is held to:

    no slot into which the tier is read is leased, or written by an engine
    while an engine of an earlier keeper may write, nothing is read into any slot
    a question that waits is answered, at its deadline at most
    a keeper whose pool is lost finds the tier's

The tier is a store in two of the machines: it is queried first, answers late or with an error, and forgets all.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from cpu_prefix_cache.keeper.records import Records, records_bytes
from cpu_prefix_cache.keeper.tiered_keeper import TieredKeeper
from cpu_prefix_cache.messages.plan import Direction, RankReport
from cpu_prefix_cache.messages.request import Pending
from cpu_prefix_cache.messages.tier import TierOptions, TierReport, Told
from cpu_prefix_cache.tiers import promotions
from property_tests.machines.test_keeper_machine import (
    ENGINES,
    FULL,
    SEVERAL,
    STATE,
    WHOLE,
    WINDOW,
    KeeperMachine,
    engines,
    keys_of,
    prompts,
)
from property_tests.models.tier_model import RankSlots, RankStore, carry_out


class TieredKeeperMachine(KeeperMachine):
    """`waiting` has the prompt, and the deadline, of each question that is not answered yet. All of the pool may be
    read at once. `asks` are those that the store has not answered, `told` its answers.
    """

    model, ask_seconds = RankSlots, None

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(promotions, "PROMOTED_SHARE", 1)

    def teardown(self):
        self.patch.undo()

    def new_keeper(self):
        self.files = getattr(self, "files", None) or self.model(self.planner)
        self.files.open(portion=3, scans=True)
        self.asks, self.told, self.heard = {}, {}, 0
        self.moving, self.ended, self.unfit, self.waiting, self.now = {}, {}, {}, {}, getattr(self, "now", 0.0)
        options = TierOptions(3 * self.slots, ask_seconds=self.ask_seconds)
        return TieredKeeper(self.slots, Records(self.file), self.planner, options)

    @property
    def is_reading(self):
        return bool(self.keeper._promotions.slices)

    # Questions

    @rule(engine=engines, prompt=prompts)
    def looks_up(self, engine, prompt):
        if engine not in self.joined:
            return
        id = self.new_id()
        answer = self.keeper.run(engine, id, keys_of(prompt), self.now)
        if isinstance(answer, Pending):
            assert answer.deadline > self.now and not self.absent
            self.waiting[engine, id] = prompt, answer.deadline
        else:
            self.is_answered(engine, id, prompt, answer)

    def looks_at(self, engine, prompt):
        super().looks_at(engine, prompt)
        if self.waiting.pop((engine, self.next), None):
            self.keeper.release(engine, self.next)

    @rule(data=st.data())
    def goes_away(self, data):
        if self.waiting:
            each = data.draw(st.sampled_from(sorted(self.waiting)))
            del self.waiting[each]
            self.keeper.release(*each)

    @rule(engine=engines)
    def crashes(self, engine):
        super().crashes(engine)
        self.waiting = {each: other for each, other in self.waiting.items() if each[0] != engine}

    # The tier

    @rule(seconds=st.sampled_from([0.0, 0.01, 1.0]))
    def steps(self, seconds=0.0):
        self.now += seconds
        self.keeper.passed(self.now)
        for engine, id, answer in self.keeper.step():
            prompt, _ = self.waiting.pop((engine, id))
            if isinstance(answer, Pending):
                self.waiting[engine, id] = prompt, answer.deadline
            else:
                self.is_answered(engine, id, prompt, answer)
        late = [each for each, (_, deadline) in self.waiting.items() if self.now >= deadline]
        assert not late, "a question waits beyond its deadline"
        plan = self.keeper.plan_below()
        self.files.advance(plan)
        self.files.taken = plan.taken
        self.asks |= {ask.id: ask for ask in plan.asks}
        self.heard = max([self.heard, *(ask.id + 1 for ask in plan.asks)])
        self.told = {id: told for id, told in self.told.items() if id >= plan.told_below}
        for ended in (self.ended, self.unfit):
            for id in [id for id in ended if id < plan.step.resolved_below or id in plan.step.resolved]:
                del ended[id]
        for transfer in plan.step.transfers:
            self.moving[transfer.id] = transfer
            if transfer.direction is Direction.LOAD:
                self.reads_into({slot for copy in transfer.copies for slot in copy.device_blocks})

    def reads_into(self, slots):
        assert not self.absent, "a slot is read into that an engine of an earlier keeper may write to"
        leased = {slot for lease in self.leases.values() for slot in lease}
        written = {slot for other in self.writes.values() for slot in other.slots}
        assert not slots & (leased | written), "a slot that is read into is somebody's"
        for slot in slots:
            self.held.pop(slot, None)

    @rule(data=st.data(), is_well=st.sampled_from([True] * 5 + [False]))
    def ends(self, data, is_well):
        if self.moving:
            self.end(data.draw(st.sampled_from(sorted(self.moving))), is_well)
            self.reports()

    def end(self, id, is_well=True):
        transfer = self.moving.pop(id)
        refused = carry_out(self.files, transfer, self.held, is_well)
        self.ended[id] = is_well
        if is_well and refused:
            self.unfit[id] = refused

    @rule()
    def reports(self):
        done = frozenset(id for id, is_well in self.ended.items() if is_well)
        ranks = RankReport(0, done, frozenset(self.ended) - done, unfit=tuple(self.unfit.items()))
        number, found, is_over = self.files.portion()
        told = tuple(self.told.values())
        report = TierReport(ranks, self.files.next_generation, number, found, is_over, told, self.heard)
        self.keeper.report_below(report)

    @rule()
    def rests(self):
        """All that moves ends well."""
        for _ in range(30):
            for id in list(self.moving):
                self.end(id)
            for id in list(self.asks):
                self.answer(id)
            self.reports()
            self.steps()

    @rule(data=st.data())
    def loses(self, data):
        if self.files.records:
            self.files.records[data.draw(st.sampled_from(sorted(self.files.records)))].is_intact = False

    # Ends

    @precondition(lambda self: not self.absent)
    @rule(engine=engines, stored=st.lists(prompts, max_size=3), has_rested=st.booleans(), prompt=st.sampled_from(WHOLE))
    def all_are_killed(self, engine, stored, has_rested, prompt):
        """The pool is lost, and nobody has its file; files have what was written until then."""
        if stored:
            self.serves(engine, stored)
        if has_rested:
            self.rests()
        self.file = memoryview(bytearray(records_bytes(self.slots)))
        Records(self.file).begin(self.slots, 64)
        namespaces, self.held, self.joined, self.leases, self.writes = self.joined, {}, {}, {}, {}
        self.is_damaged = True
        self.keeper = self.new_keeper()
        self.keeper.recover()
        for engine, namespace in namespaces.items():
            self.joins(engine, namespace)
        self.rests()
        for engine in namespaces:
            self.looks_up(engine, prompt)

    @invariant()
    def no_slot_is_lost(self):
        self.keeper.check_valid()
        now = self.keeper.statistics()
        assert now.free + now.writing + now.cached + now.retired == self.slots
        assert not (self.writes or self.moving or self.ended or self.waiting) or now.writing >= 0
        assert len(self.joined) <= len(ENGINES)


class StoreMachine(TieredKeeperMachine):
    model, ask_seconds = RankStore, 0.02

    def answer(self, id, is_well=True):
        ask = self.asks.pop(id)
        self.told[id] = self.files.answer(ask) if is_well else Told(id, ok=False)

    @rule(data=st.data(), is_well=st.sampled_from([True] * 5 + [False]))
    def answers(self, data, is_well):
        if self.asks:
            self.answer(data.draw(st.sampled_from(sorted(self.asks))), is_well)
            self.reports()

    @rule()
    def forgets(self):
        self.files.forget_all()


class StoreState(StoreMachine):
    kind = STATE


class TieredSeveral(TieredKeeperMachine):
    kind = SEVERAL


class TieredState(TieredKeeperMachine):
    kind = STATE


class TieredWindow(TieredKeeperMachine):
    kind = WINDOW


TestFull, TestSeveral = TieredKeeperMachine.TestCase, TieredSeveral.TestCase
TestState, TestWindow = TieredState.TestCase, TieredWindow.TestCase
TestStore, TestStoreState = StoreMachine.TestCase, StoreState.TestCase
assert TieredKeeperMachine.kind is FULL
TestFull.settings = TestSeveral.settings = TestState.settings = TestWindow.settings = TestStore.settings = (
    TestStoreState.settings
) = settings(max_examples=100, stateful_step_count=40, deadline=None)
