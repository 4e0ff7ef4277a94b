"""KeyedTier with a rank that works late, in any order, fails and loses slots, through resets and restarts.

The same above a store that others write, too, and that loses values and answers late, or badly.

Every job ends once. A host block that was loaded, and whose name is not lost, has the bytes of that name, of this
revision of the weights. Nothing is found that was never stored since the last reset.
"""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_prefix_cache.deciding import BlockName, KeyedTier
from cpu_prefix_cache.messages.plan import Label
from property_tests.models.keyed_rank import GROUPS, PLANNER, KeyedRank
from property_tests.models.tier_model import RankStore
from property_tests.strategies import pick, positions

HOST = 12
ASK_SECONDS = 5.0
NAMES = [BlockName(letter * 32, group) for letter in (b"a", b"b", b"c", b"d") for group in range(GROUPS)]
some_names = st.lists(st.sampled_from(NAMES), unique=True, max_size=6)


@dataclass
class Job:
    names: list[BlockName]
    blocks: list[int]
    is_load: bool
    weights: int


class KeyedTierMachine(RuleBasedStateMachine):
    @initialize(slots=st.integers(1, 6), portion=st.integers(1, 3), is_shared=st.booleans())
    def begin(self, slots, portion, is_shared):
        self.slots, self.is_shared = slots, is_shared
        self.rank = KeyedRank(RankStore(PLANNER) if is_shared else None, portion)
        self.weights = self.ended = self.now = 0
        self.stored: set[BlockName] = set()  # since the last reset
        self.looked_up: set[BlockName] = set()  # last
        self._start()

    def _start(self):
        seconds = ASK_SECONDS if self.is_shared else None
        self.tier = KeyedTier(self.slots, host_blocks=HOST, block_bytes=4096, ask_seconds=seconds)
        self.jobs: dict[int, Job] = {}
        self.free = list(range(HOST))
        self.number = 0

    @rule(names=some_names)
    def store(self, names):
        job = self._job(names, is_load=False)
        if job is not None:
            self.rank.host |= {block: (name, self.weights) for name, block in zip(job.names, job.blocks, strict=True)}
            self.tier.store(self.number, job.names, job.blocks)

    @rule(names=some_names)
    def load(self, names):
        job = self._job(names, is_load=True)
        if job is not None:
            self.rank.host |= dict.fromkeys(job.blocks, "poison")
            self.tier.load(self.number, job.names, job.blocks)

    def _job(self, names, is_load):
        if len(self.free) < len(names):
            return None
        blocks, self.free = self.free[: len(names)], self.free[len(names) :]
        self.number += 1
        self.jobs[self.number] = Job(names, blocks, is_load, self.weights)
        return self.jobs[self.number]

    @rule(names=some_names)
    def touch(self, names):
        self.tier.touch(names)

    @rule()
    def step(self):
        self.rank.run(self.tier.plan())
        self._take(self.rank.report())

    @rule()
    def report_late(self):
        """Without a plan that has resolved what was reported before."""
        self._take(self.rank.report())

    def _take(self, report):
        for number, lost in self.tier.report(report):
            job = self.jobs.pop(number)
            self.free += job.blocks
            assert lost <= set(job.names)
            kept = [(name, block) for name, block in zip(job.names, job.blocks, strict=True) if name not in lost]
            if job.is_load:
                for name, block in kept:
                    assert self.rank.host[block] == (name, self.weights), "wrong bytes"
            elif job.weights == self.weights:
                self.stored |= {name for name, _ in kept}

    @precondition(lambda self: self.rank.waiting)
    @rule(at=positions, well=st.sampled_from([True, True, True, False]))
    def end(self, at, well):
        self.rank.end(pick(list(self.rank.waiting), at), well)

    @precondition(lambda self: self.rank.slots.records)
    @rule(at=positions)
    def damage(self, at):
        pick(list(self.rank.slots.records.values()), at).is_intact = False

    @rule(names=some_names)
    def look(self, names):
        self.looked_up = set(names)
        for name in names:
            if self.tier.has(name) and self.is_shared:
                assert (name.key, name.number, 0, 0) in self.rank.slots.had

    @precondition(lambda self: self.rank.asks)
    @rule(at=positions, well=st.sampled_from([True, True, False]))
    def answer(self, at, well):
        self.rank.answer(pick(list(self.rank.asks), at), well)

    @precondition(lambda self: self.is_shared)
    @rule(names=some_names)
    def others_store(self, names):
        for name in names:
            label = Label(name.key, b"", name.number, 0, 0, self.rank.slots.next_generation)
            self.rank.slots.others_write(label, (name, self.weights))

    @precondition(lambda self: self.is_shared and self.rank.slots.records)
    @rule(at=positions)
    def lose(self, at):
        del self.rank.slots.records[pick(list(self.rank.slots.records), at)]

    @rule(seconds=st.sampled_from([1, 10, 40]))
    def time(self, seconds):
        self.now += seconds
        self.tier.passed(self.now)

    @rule()
    def reset(self):
        """A plan follows at once, as in every connector."""
        self.tier.reset()
        self.weights += 1
        self.stored.clear()
        self.step()

    @rule(portion=st.integers(1, 3))
    def restart(self, portion):
        """Transfers that had not ended were carried out in part, or not at all."""
        for id in list(self.rank.waiting):
            self.rank.end(id, well=False)
        self.rank = KeyedRank(self.rank.slots, portion)
        self._start()
        self.tier.passed(self.now)

    @invariant()
    def all_rules_hold(self):
        self.tier.check_valid()

    @invariant()
    def nothing_is_found_that_was_never_stored(self):
        written = {record.content for record in self.rank.slots.records.values()}
        for name in () if self.is_shared else NAMES:  # where a lookup is a question
            if self.tier.has(name):
                assert name in self.stored or (name, self.weights) in written

    def teardown(self):
        """In the end every job ends, and every question."""
        for _ in range(50):
            for id in list(self.rank.waiting):
                self.rank.end(id)
            for id in list(self.rank.asks):
                self.rank.answer(id)
            self.step()
            answers = [self.tier.has(name) for name in sorted(self.looked_up)]
        assert not self.jobs and sorted(self.free) == list(range(HOST))
        assert None not in answers, "an answer is awaited for ever"


TestKeyedTier = KeyedTierMachine.TestCase
TestKeyedTier.settings = settings(max_examples=100, stateful_step_count=40)
