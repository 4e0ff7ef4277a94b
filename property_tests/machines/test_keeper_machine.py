"""The keeper against a dictionary that may lose things: engines come, ask, write, crash; keepers crash, too.

The model knows what was last written to each slot, who writes where, and who has a lease on what. It has no pool, no
forest and no order of eviction. It holds the keeper to this:

    what is found holds what was wanted, and is a prefix
    a slot that is granted is nobody's: not leased, not being written, and no key is written twice at once
    no slot is lost, whoever crashes
    while there has been room for everything, everything is found
    a keeper that follows another one hands out nothing while an engine of that one may still write
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup
from cpu_prefix_cache.keeper.keeper import Keeper
from cpu_prefix_cache.keeper.protocol import KEY_BYTES, NAMESPACE_BYTES
from cpu_prefix_cache.keeper.records import HEADER_BYTES, RECORD, Records, records_bytes

ENGINES = range(1, 5)
FULL = HybridChunkPlanner([PrefixGroup(name="full", block_tokens=4, block_bytes=64)], max_model_len=64)
NAMESPACES = [bytes([number]) * NAMESPACE_BYTES for number in (1, 2)]
prompts = st.text("ab", min_size=1, max_size=6)
engines = st.sampled_from(ENGINES)


def keys_of(prompt):
    return [prompt[: at + 1].encode().ljust(KEY_BYTES, b".") for at in range(len(prompt))]


class KeeperMachine(RuleBasedStateMachine):
    """`held[slot]` is what was last committed there; `joined` has the namespace of each engine."""

    @initialize(slots=st.integers(1, 8))
    def begin(self, slots):
        self.slots = slots
        self.file = memoryview(bytearray(records_bytes(slots)))
        records = Records(self.file)
        records.begin(slots, 64)
        self.keeper = Keeper(slots, records, FULL)
        self.held = {}
        self.joined = {}
        self.leases = {}  # (engine, id) -> slots
        self.writes = {}  # (engine, id) -> names, slots
        self.granted = self.next = 0
        self.absent = set()
        for engine in ENGINES[:2]:
            self.joins(engine, NAMESPACES[0])

    def new_id(self):
        self.next += 1
        return self.next

    def names(self, engine, prompt):
        return [(self.joined[engine], key) for key in keys_of(prompt)]

    @property
    def writing(self):
        return {name for names, _ in self.writes.values() for name in names}

    # Engines

    @rule(engine=engines, namespace=st.sampled_from(NAMESPACES))
    def joins(self, engine, namespace):
        if engine not in self.joined:
            self.keeper.join(engine, namespace)
            self.joined[engine] = namespace
            self.absent.discard(engine)

    @rule(engine=engines)
    def crashes(self, engine):
        if engine in self.joined:
            self.keeper.leave(engine)
            del self.joined[engine]
            self.leases = {each: slots for each, slots in self.leases.items() if each[0] != engine}
            self.writes = {each: write for each, write in self.writes.items() if each[0] != engine}

    @rule(engine=engines, namespace=st.sampled_from(NAMESPACES))
    def gets_other_weights(self, engine, namespace):
        if engine in self.joined:
            self.keeper.name(engine, namespace)
            self.joined[engine] = namespace

    # Requests

    @rule(engine=engines, prompt=prompts)
    def looks_up(self, engine, prompt):
        if engine not in self.joined:
            return
        id = self.new_id()
        slots = list(self.keeper.run(engine, id, keys_of(prompt)).slots)
        names = self.names(engine, prompt)
        assert [self.held.get(slot) for slot in slots] == names[: len(slots)], "a slot holds something else"
        if self.granted <= self.slots:
            known = set(self.held.values())
            assert len(slots) == next((at for at, name in enumerate(names) if name not in known), len(names))
        if slots:
            self.leases[engine, id] = slots

    @rule(data=st.data())
    def releases(self, data):
        if self.leases:
            engine, id = each = data.draw(st.sampled_from(sorted(self.leases)))
            self.keeper.release(engine, id)
            del self.leases[each]

    @rule(engine=engines, prompt=prompts)
    def takes(self, engine, prompt):
        if engine not in self.joined:
            return
        id = self.new_id()
        first, slots, try_again, _ = self.keeper.take(engine, id, keys_of(prompt))
        names = self.names(engine, prompt)[first : first + len(slots)]
        assert len(names) == len(slots)
        if self.absent:
            assert not slots, "a slot was handed out that an engine of an earlier keeper may write to"
        leased = {slot for lease in self.leases.values() for slot in lease}
        written = {slot for _, others in self.writes.values() for slot in others}
        assert not set(slots) & (leased | written) and len(set(slots)) == len(slots), "a slot is somebody's"
        assert not set(names) & self.writing, "a key is written twice at once"
        missing = self.names(engine, prompt)[first:]
        assert not try_again or self.absent or missing[0] in self.writing, "there is nothing to wait for"
        if slots:
            for slot in slots:
                self.held.pop(slot, None)
            self.writes[engine, id] = names, list(slots)
            self.granted += len(slots)

    @rule(data=st.data())
    def commits(self, data):
        if self.writes:
            each = data.draw(st.sampled_from(sorted(self.writes)))
            self.commit(each, data.draw(st.integers(0, len(self.writes[each][1]))))

    def commit(self, each, count):
        names, slots = self.writes.pop(each)
        self.keeper.commit(*each, count, False)
        self.held.update(zip(slots[:count], names[:count], strict=True))

    @rule(engine=engines, prompts=st.lists(prompts, min_size=1, max_size=5))
    def serves(self, engine, prompts):
        """Requests one after the other; of each, what is missing is stored, and the last keeps its lease."""
        if engine not in self.joined:
            self.joins(engine, NAMESPACES[0])
        for prompt in prompts:
            self.looks_up(engine, prompt)
            self.takes(engine, prompt)
            if (engine, self.next) in self.writes:
                self.commit((engine, self.next), len(self.writes[engine, self.next][1]))
            if (engine, self.next - 1) in self.leases and prompt is not prompts[-1]:
                self.keeper.release(engine, self.next - 1)
                del self.leases[engine, self.next - 1]

    # Keepers

    @precondition(lambda self: not self.absent)
    @rule(data=st.data())
    def keeper_crashes(self, data):
        """Engines that were there come back or are gone, in any order, once none of their copies is under way."""
        damaged = data.draw(st.none() | st.sampled_from(sorted(self.held) or [0]))
        if damaged is not None and self.granted > self.slots:  # it ended within this record
            at = HEADER_BYTES + RECORD.size * damaged
            self.file[at + RECORD.size - KEY_BYTES : at + RECORD.size] = bytes(KEY_BYTES)
        self.keeper = Keeper(self.slots, Records(self.file), FULL)
        self.keeper.absent.update(self.joined)
        self.keeper.recover()
        self.absent = set(self.joined)
        before, self.joined, self.leases, self.writes = self.joined, {}, {}, {}
        for engine in data.draw(st.lists(st.sampled_from(sorted(before)), unique=True)) if before else ():
            self.joins(engine, before[engine])

    @rule(engine=engines)
    def is_gone(self, engine):
        self.keeper.absent.discard(engine)
        self.absent.discard(engine)

    @invariant()
    def no_slot_is_lost(self):
        self.keeper.check_valid()
        now = self.keeper.statistics()
        assert now.free + now.writing + now.cached == self.slots and not now.retired
        assert now.writing == sum(len(slots) for _, slots in self.writes.values())


TestKeeper = KeeperMachine.TestCase
TestKeeper.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
