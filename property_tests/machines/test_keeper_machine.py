"""The keeper against a dictionary that may lose things: engines come, ask, write, crash; keepers crash, too.

The model knows what was last written to each slot, who writes where, and who has a lease on what. It has no pool, no
forest and no order of eviction, and knows by itself what each kind of model takes to resume. It holds the keeper to
this:

    what is found holds what was wanted, and is all that it takes to resume there
    a slot that is granted is nobody's: not leased, not being written, and nothing is written twice at once
    of a checkpoint that is granted, what is not to be written is there, and nobody writes it
    no slot is lost, whoever crashes
    while there has been room for everything, everything is found
    a keeper that follows another one hands out nothing while an engine of that one may still write
"""

from collections.abc import Callable
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_prefix_cache.deciding import ChunkLocalGroup, HybridChunkPlanner, PrefixGroup, StateGroup, WindowGroup
from cpu_prefix_cache.keeper.keeper import Keeper
from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES
from cpu_prefix_cache.keeper.records import HEADER_BYTES, RECORD, Records, records_bytes
from cpu_prefix_cache.messages.tier import KEY_BYTES

ENGINES = range(1, 5)
NAMESPACES = [bytes([number]) * NAMESPACE_BYTES for number in (1, 2)]
WHOLE = "aaaaaa", "aabaab", "bbaaaa"
prompts = st.sampled_from([whole[:end] for whole in WHOLE for end in range(1, 7)])
engines = st.sampled_from(ENGINES)


class Kind(NamedTuple):
    """A model with chunks of four tokens, which take `per_chunk` slots. To resume after `depth` of them takes pieces:
    of each the group, the chunk in which it lies, its number there, and how many slots it has.
    """

    groups: list
    per_chunk: int
    pieces: Callable[[int], list[tuple[int, int, int, int]]]


def full(name="full", size=64):
    return PrefixGroup(name=name, block_tokens=4, block_bytes=size)


def of_window(depth):
    """Six tokens, with the one to come, in blocks of two, and the state."""
    blocks = [block for block in range(2 * depth - 3, 2 * depth) if block >= 0]
    return [(2, block // 2, block % 2, 1) for block in blocks] + [(3, depth - 1, 0, 2)]


FULL = Kind([full()], 1, lambda depth: [])
SEVERAL = Kind([full(), full("second", 128)], 3, lambda depth: [])
STATE = Kind(
    [
        full(size=128),
        full("second"),
        WindowGroup(name="window", block_tokens=2, block_bytes=64, window_tokens=6),
        StateGroup(name="state", block_tokens=4, block_bytes=128),
    ],
    3,
    of_window,
)
WINDOW = Kind(
    [full(), WindowGroup(name="window", block_tokens=4, block_bytes=64, window_tokens=10)],
    1,
    lambda depth: [(1, chunk, 0, 1) for chunk in range(max(0, depth - 3), depth)],
)
LOCAL = Kind(
    [full(), ChunkLocalGroup(name="local", block_tokens=4, block_bytes=64, window_tokens=8)],
    1,
    lambda depth: [(1, depth - 1, 0, 1)] if depth % 2 else [],
)


def keys_of(prompt):
    return [prompt[: at + 1].encode().ljust(KEY_BYTES, b".") for at in range(len(prompt))]


class Write(NamedTuple):
    """Slots with what is to be written there: of each chunk, and of the checkpoint, whose name is None if it was not
    granted.
    """

    prompt: str
    chunks: list
    checkpoint: tuple | None
    pieces: dict

    @property
    def slots(self):
        return [slot for chunk in (*self.chunks, self.pieces) for slot in chunk]

    @property
    def names(self):
        """Without the place in a piece."""
        return {content[:-1] for chunk in (*self.chunks, self.pieces) for content in chunk.values()}


class KeeperMachine(RuleBasedStateMachine):
    """`held[slot]` is what was last committed there; `joined` has the namespace of each engine."""

    kind = FULL
    is_reading = False  # whether anything but engines writes to slots

    @initialize(chunks=st.integers(1, 8))
    def begin(self, chunks):
        self.planner = HybridChunkPlanner(self.kind.groups, max_model_len=64)
        self.slots = slots = chunks * self.planner.fewest_blocks
        self.file = memoryview(bytearray(records_bytes(slots)))
        Records(self.file).begin(slots, 64)
        self.keeper = self.new_keeper()
        self.held = {}
        self.known = set()  # chunks and checkpoints that were committed
        self.joined = {}
        self.leases = {}  # (engine, id) -> slots
        self.writes = {}  # (engine, id) -> Write
        self.wanted = self.next = 0
        self.is_damaged = self.has_crashed = False
        self.absent = set()
        for engine in ENGINES[:2]:
            self.joins(engine, NAMESPACES[0])

    def new_keeper(self):
        return Keeper(self.slots, Records(self.file), self.planner)

    def new_id(self):
        self.next += 1
        return self.next

    # Contents of slots

    def chunk(self, engine, prompt):
        return [(self.joined[engine], prompt, place) for place in range(self.kind.per_chunk)]

    def pieces(self, engine, prompt):
        """Contents of each piece of the checkpoint after this prompt."""
        return [
            [(self.joined[engine], prompt[: chunk + 1], group, number, place) for place in range(width)]
            for group, chunk, number, width in self.kind.pieces(len(prompt))
        ]

    @property
    def writing(self):
        return {name for write in self.writes.values() for name in write.names}

    @property
    def has_had_room(self):
        return self.wanted <= self.slots and not self.is_damaged

    def resumable(self, engine, prompt):
        """After how many chunks a request could resume, if nothing was evicted."""
        space = self.joined[engine]
        here = self.present(engine, prompt)
        ends = [prompt[:end] for end in range(1, here + 1)]
        able = (len(end) for end in ends if (space, end, "!") in self.known or not self.pieces(engine, end))
        return max(able, default=0)

    def present(self, engine, prompt):
        space = self.joined[engine]
        return next((end for end in range(len(prompt)) if (space, prompt[: end + 1]) not in self.known), len(prompt))

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
        self.is_answered(engine, id, prompt, self.keeper.run(engine, id, keys_of(prompt)))

    def is_answered(self, engine, id, prompt, leased):
        present, depth, slots = leased
        wanted = [content for end in range(1, depth + 1) for content in self.chunk(engine, prompt[:end])]
        wanted += [content for piece in self.pieces(engine, prompt[:depth]) for content in piece] if depth else []
        assert [self.held.get(slot) for slot in slots] == wanted, "a slot holds something else"
        if self.has_had_room:
            assert present == self.present(engine, prompt)
            least = self.resumable(engine, prompt)
            assert depth >= least if self.has_crashed else depth == least, "something is not found"
        if slots:
            self.leases[engine, id] = list(slots)

    def looks_at(self, engine, prompt):
        """Without a lease afterwards."""
        self.looks_up(engine, prompt)
        if self.leases.pop((engine, self.next), None):
            self.keeper.release(engine, self.next)

    @rule(data=st.data())
    def releases(self, data):
        if self.leases:
            engine, id = each = data.draw(st.sampled_from(sorted(self.leases)))
            self.keeper.release(engine, id)
            del self.leases[each]

    @rule(engine=engines, prompt=prompts, has_checkpoint=st.booleans())
    def takes(self, engine, prompt, has_checkpoint):
        if engine not in self.joined:
            return
        id = self.new_id()
        first, slots, try_again, pieces = self.keeper.take(engine, id, keys_of(prompt), has_checkpoint)
        rest, per_chunk = list(slots), self.kind.per_chunk
        chunks = []
        while rest:
            content = self.chunk(engine, prompt[: first + len(chunks) + 1])
            chunks.append(dict(zip(rest[:per_chunk], content, strict=True)))
            del rest[:per_chunk]
        checkpoint = self.joined[engine], prompt, "!"
        granted = self.taken_pieces(engine, prompt, pieces)
        write = Write(prompt, chunks, None if pieces is None else checkpoint, granted)
        assert pieces is None or (has_checkpoint and first + len(chunks) == len(prompt))
        if self.absent:
            assert not write.slots, "a slot was handed out that an engine of an earlier keeper may write to"
        leased = {slot for lease in self.leases.values() for slot in lease}
        written = {slot for other in self.writes.values() for slot in other.slots}
        assert not set(write.slots) & (leased | written), "a slot is somebody's"
        assert len(set(write.slots)) == len(write.slots), "a slot is granted twice"
        assert not write.names & self.writing, "something is written twice at once"
        missing = [self.chunk(engine, prompt[:end])[0][:-1] for end in range(first + 1, len(prompt) + 1)]
        missing += [piece[0][:-1] for piece in self.pieces(engine, prompt)]
        ending = [other.checkpoint for other in self.writes.values()]  # it may have no slot of its own
        is_awaited = any(name in self.writing for name in missing) or checkpoint in ending
        assert not write.checkpoint or write.checkpoint not in ending, "a checkpoint is written twice at once"
        assert not try_again or self.absent or is_awaited or self.is_reading, "there is nothing to wait for"
        for slot in write.slots:
            self.held.pop(slot, None)
        if not try_again:  # of what is refused, too: something may have left for it
            self.wanted += self.kind.per_chunk * (len(prompt) - first) + len(write.pieces)
        if write.slots or write.checkpoint:
            self.writes[engine, id] = write

    def taken_pieces(self, engine, prompt, pieces):
        """Slots to be written, with their contents. All other pieces are there."""
        found = {}
        for slots, contents in zip(pieces, self.pieces(engine, prompt), strict=True) if pieces is not None else ():
            if slots:
                found.update(zip(slots, contents, strict=True))
            else:
                assert set(contents) <= set(self.held.values()), "a piece is neither there nor to be written"
                assert contents[0][:-1] not in self.writing, "a piece is shared that somebody is writing"
        return found

    @rule(pair=st.tuples(engines, engines), whole=st.sampled_from(WHOLE), end=st.integers(1, 5))
    def takes_beside(self, pair, whole, end):
        """Two checkpoints of one prompt, of chunks that are there, whose writes end later."""
        if set(pair) <= self.joined.keys():
            self.takes(pair[0], whole, False)
            if (pair[0], self.next) in self.writes:
                self.commit((pair[0], self.next), len(self.writes[pair[0], self.next].chunks), False)
            self.takes(pair[0], whole[:end], True)
            self.takes(pair[1], whole[: end + 1], True)

    @rule(data=st.data())
    def commits(self, data):
        if self.writes:
            each = data.draw(st.sampled_from(sorted(self.writes)))
            count = data.draw(st.integers(0, len(self.writes[each].chunks)))
            self.commit(each, count, data.draw(st.booleans()))

    def commit(self, each, count, has_checkpoint):
        write = self.writes.pop(each)
        has_checkpoint = has_checkpoint and write.checkpoint is not None and count == len(write.chunks)
        self.keeper.commit(*each, count, has_checkpoint)
        for chunk in write.chunks[:count]:
            self.held.update(chunk)
            self.known.update(content[:-1] for content in chunk.values())
        if has_checkpoint:
            self.held.update(write.pieces)
            self.known.add(write.checkpoint)
        self.looks_at(each[0], write.prompt)

    @rule(engine=engines, prompts=st.lists(prompts, min_size=1, max_size=5))
    def serves(self, engine, prompts):
        """Requests one after the other; of each, what is missing is stored, and the last keeps its lease."""
        if engine not in self.joined:
            self.joins(engine, NAMESPACES[0])
        for prompt in prompts:
            self.takes(engine, prompt, True)
            if (engine, self.next) in self.writes:
                self.commit((engine, self.next), len(self.writes[engine, self.next].chunks), True)
        self.looks_up(engine, prompts[-1])

    # Keepers

    @precondition(lambda self: not self.absent)
    @rule(data=st.data())
    def keeper_crashes(self, data):
        """Engines that were there come back or are gone, in any order, once none of their copies is under way."""
        damaged = data.draw(st.none() | st.sampled_from(sorted(self.held) or [0]))
        if damaged is not None and self.wanted > self.slots:  # it ended within this record
            at = HEADER_BYTES + RECORD.size * damaged
            self.file[at + RECORD.size - KEY_BYTES : at + RECORD.size] = bytes(KEY_BYTES)
            self.is_damaged = True
        self.keeper = self.new_keeper()
        self.keeper.absent.update(self.joined)
        self.keeper.recover()
        self.absent, self.has_crashed = set(self.joined), True
        before, self.joined, self.leases, self.writes = self.joined, {}, {}, {}
        for engine in data.draw(st.lists(st.sampled_from(sorted(before)), unique=True)) if before else ():
            self.joins(engine, before[engine])
            for whole in WHOLE:
                self.looks_at(engine, whole)

    @rule(engine=engines)
    def is_gone(self, engine):
        self.keeper.absent.discard(engine)
        self.absent.discard(engine)

    @invariant()
    def no_slot_is_lost(self):
        self.keeper.check_valid()
        now = self.keeper.statistics()
        assert now.free + now.writing + now.cached == self.slots and not now.retired
        assert now.writing >= sum(len(write.slots) for write in self.writes.values())
        assert self.writes or not now.writing


class SeveralMachine(KeeperMachine):
    kind = SEVERAL


class StateMachine(KeeperMachine):
    kind = STATE


class WindowMachine(KeeperMachine):
    kind = WINDOW


class LocalMachine(KeeperMachine):
    kind = LOCAL


TestFull, TestSeveral = KeeperMachine.TestCase, SeveralMachine.TestCase
TestState, TestWindow, TestLocal = StateMachine.TestCase, WindowMachine.TestCase, LocalMachine.TestCase
TestFull.settings = TestSeveral.settings = TestState.settings = TestWindow.settings = TestLocal.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
