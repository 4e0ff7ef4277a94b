"""A pool closed over itself and another one beside it, against a model that knows only which chunks have blocks.

The model does not know in which order chunks leave. It gets the chunks that left, and checks that they may: a duplicate
before all else where room is scarce, of the others only what nothing hangs below, and nothing at or above a pin. With
an overlap a duplicate is one of the others while something that only this pool has hangs right below it.
"""

from itertools import product

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_prefix_cache import POLICIES
from cpu_prefix_cache.deciding import BlockPool
from cpu_prefix_cache.pool.scarcity import Scarcity
from cpu_prefix_cache.pool.shape import Beside
from cpu_prefix_cache.pool.states import BlockState
from property_tests.strategies import chain, pick, positions, prompts

NAMES = sorted(
    {"".join(letters) for size in range(1, 7) for letters in product("ab", repeat=size)},
    key=lambda name: (len(name), name),
)


def above(name: str) -> list[str]:
    """`name` and what it hangs below."""
    return [name[:size] for size in range(1, len(name) + 1)]


class Fixed(Scarcity):
    """Scarcity that does not change."""

    def __init__(self, holds: bool) -> None:
        super().__init__(8)
        self._holds = holds

    @property
    def holds(self) -> bool:
        return self._holds


class SharedPoolMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(2, 8),
        per_chunk=st.sampled_from([1, 1, 2]),
        overlap=st.integers(0, 2),
        policy=st.sampled_from(sorted(POLICIES)),
        is_scarce=st.sampled_from([True, True, False]),
    )
    def build(self, blocks: int, per_chunk: int, overlap: int, policy: str, is_scarce: bool) -> None:
        self.per_chunk, self.overlap = per_chunk, overlap
        self.pool = BlockPool(blocks * per_chunk, policy, blocks_per_chunk=per_chunk, beside=Beside(8, overlap))
        self.pool._duplicates.scarcity = Fixed(is_scarce)
        self.is_scarce = is_scarce
        self.held: set[str] = set()  # have blocks here
        self.duplicates: list[str] = []  # the first to leave first
        self.kept: set[str] = set()  # duplicates that stood before their turn, for what hangs below them
        self.pins: list[tuple[object, str]] = []
        self.writing: list[tuple[list[int], list[str], object]] = []
        self.now = 0.0

    # Queries

    def placed(self) -> set[str]:
        """The chunks that must have a place: those here, and what they or pins hang below."""
        ends = [*self.held, *(name for _, name in self.pins)]
        return {name for end in ends for name in above(end)}

    def protected(self) -> set[str]:
        return {name for _, end in self.pins for name in above(end)}

    def spare(self) -> int:
        """How many chunks can be had."""
        free = len(self.pool.free) // self.per_chunk
        return free + len(self.held - self.protected())

    def touch(self, prompt: str) -> object:
        self.now += 1.0
        deepest = next((name for name in reversed(above(prompt)) if name in self.placed()), None)
        node = None if deepest is None else self.pool.place(deepest.encode())
        return self.pool.touch(node, chain(prompt), self.now)

    # Events

    @rule(ends=st.lists(st.tuples(prompts, st.integers(1, 3)), min_size=1, max_size=4), last_lands=st.booleans())
    def ends_of_prompts_are_written(self, ends: list[tuple[str, int]], last_lands: bool) -> None:
        """So many of the last chunks of each. The more there are, the sooner the pool is full."""
        for at, (prompt, count) in enumerate(ends, 1):
            self.write(prompt, count, lands=at < len(ends) or last_lands)

    def write(self, prompt: str, count: int, *, lands: bool) -> None:
        """Its last chunks, as far as they are not here, in one go if they are neighbours."""
        moving = {name for _, names, _ in self.writing for name in names}
        names = [name for name in above(prompt)[-count:] if name not in self.held | moving]
        while len(names) > 1 and len(names[-1]) - len(names[0]) >= len(names):
            names.pop(0)
        if not names or len(names) > self.spare():
            return
        touch = self.touch(prompt)
        before, free = set(self.held), len(self.pool.free) // self.per_chunk
        nodes = self.pool.allocate(len(names), [name.encode() for name in names])
        self.check_gone(before, len(names), len(names) - free)
        self.writing.append((nodes, names, touch))
        if lands:
            self.what_is_written_lands(len(self.writing) - 1)

    def check_gone(self, before: set[str], wanted: int, short: int) -> None:
        self.held = {name for name in NAMES if self.pool.find(name.encode()) is not None}
        gone = before - self.held
        assert self.held <= before and len(gone) <= wanted, "more leave than come"
        assert gone.isdisjoint(self.protected()), "what is pinned has left (rule 2)"
        first = self.first_to_leave(before, short)
        assert gone >= set(first), "a duplicate stays out of turn"
        others = gone - set(first)
        assert len(others) <= max(0, short - len(first)), "a duplicate stays, and what only this pool has leaves"
        for name in others:
            assert not any(each != name and each.startswith(name) for each in self.held), "what hangs below it is lost"
        self.duplicates = [name for name in self.duplicates if name in self.held]
        self.kept &= self.held

    def first_to_leave(self, before: set[str], short: int) -> list[str]:
        """So many duplicates in turn, but for those that a pin protects and, from now on, those that are kept."""
        leave: list[str] = []
        if not self.is_scarce:
            return leave
        alone = before - self.kept - set(self.duplicates)  # only this pool has them
        for name in [*self.duplicates]:
            if len(leave) >= short:
                break
            if name in self.protected():
                continue
            if any(each.startswith(name) and len(each) - len(name) <= self.overlap for each in alone):
                self.duplicates.remove(name)
                self.kept.add(name)
            else:
                leave.append(name)
        return leave

    @precondition(lambda self: self.writing)
    @rule(which=positions)
    def what_is_written_lands(self, which: int) -> None:
        nodes, names, touch = self.writing.pop(which % len(self.writing))
        ancestors = above(names[0])[:-1]
        known = [name for name in ancestors if self.pool.place(name.encode()) is not None]
        assert known == ancestors[: len(known)], "the index is not closed (rule 3)"
        parent = self.pool.place(known[-1].encode()) if known else self.pool.root
        parent = self.pool.outline([name.encode() for name in ancestors[len(known) :]], parent)
        self.pool.commit(nodes, [name.encode() for name in names], parent, touch)
        self.held |= set(names)

    @precondition(lambda self: self.writing)
    @rule(which=positions)
    def what_is_written_fails(self, which: int) -> None:
        nodes, _, _ = self.writing.pop(which % len(self.writing))
        self.pool.abort(nodes)

    @precondition(lambda self: self.held)
    @rule(which=positions, size=st.integers(1, 3), again=st.booleans())
    def a_prefix_is_loaded(self, which: int, size: int, again: bool) -> None:
        """It is a duplicate from then on; and pinned, where another request loads it, too."""
        names = [name for name in above(pick(sorted(self.held), which))[-size:] if name in self.held]
        self.touch(names[-1])
        if again:
            self.pin(names[-1])
        self.pool.duplicated(self.pool.place(name.encode()) for name in reversed(names))
        self.kept -= set(names)
        for name in reversed(names):
            self.duplicates = [each for each in self.duplicates if each != name] + [name]

    @rule(prompt=prompts)
    def a_prompt_is_used_beside(self, prompt: str) -> None:
        keys = chain(prompt)
        self.pool.duplicate_above(keys, len(keys))
        placed = [name for name in above(prompt) if name in self.placed()]
        for name in reversed(placed):
            if name not in self.held or name in self.duplicates:
                break
            self.kept.discard(name)
            self.duplicates.append(name)

    @rule(prompt=prompts)
    def a_prompt_is_about_to_leave(self, prompt: str) -> None:
        names = [name for name in reversed(above(prompt)) if name in self.held]
        self.pool.renew([node for name in names if (node := self.pool.find(name.encode())) is not None])
        self.duplicates = [name for name in self.duplicates if name not in names]
        self.kept -= set(names)

    @precondition(lambda self: self.placed())
    @rule(which=positions)
    def a_chunk_is_pinned(self, which: int) -> None:
        self.pin(pick(sorted(self.placed()), which))

    def pin(self, name: str) -> None:
        node = self.pool.place(name.encode())
        assert node is not None
        self.pins.append((self.pool.pin(node), name))

    @precondition(lambda self: self.pins)
    @rule(which=positions)
    def a_pin_ends(self, which: int) -> None:
        pin, _ = self.pins.pop(which % len(self.pins))
        self.pool.unpin(pin)

    @precondition(lambda self: self.held and not self.pins)
    @rule(which=positions)
    def a_chunk_is_withdrawn(self, which: int) -> None:
        name = pick(sorted(self.held), which)
        self.pool.withdraw(self.pool.place(name.encode()))
        self.held = {each for each in self.held if not each.startswith(name)}
        self.duplicates = [each for each in self.duplicates if each in self.held]
        self.kept &= self.held

    @precondition(lambda self: not self.pins)
    @rule(sure=st.sampled_from([False, False, True]))
    def all_is_reset(self, sure: bool) -> None:
        if sure:
            self.pool.reset()
            assert self.pool.statistics().retired == self.per_chunk * sum(len(nodes) for nodes, _, _ in self.writing)
            for nodes, _, _ in self.writing:
                self.pool.abort(nodes)
            assert self.pool.statistics().free == self.pool.ready
            self.writing.clear()
            self.held = set()
            self.duplicates = []
            self.kept = set()

    # Invariants

    @invariant()
    def the_pool_keeps_its_rules(self) -> None:
        self.pool.check_valid()

    @invariant()
    def each_place_belongs_to_a_chunk_that_something_here_needs(self) -> None:
        placed, found = self.placed(), self.pool.find_all(map(str.encode, NAMES))
        for name, here in zip(NAMES, found, strict=True):
            node = self.pool.place(name.encode())
            assert (node is not None) == (name in placed), f"{name} has a place, or has none"
            assert here == self.pool.find(name.encode()) and (here is not None) == (name in self.held)
            if node is not None:
                assert self.pool.state(node) is (BlockState.CACHED if name in self.held else BlockState.ABSENT)
                parent = self.pool.root if len(name) == 1 else self.pool.place(name[:-1].encode())
                assert self.pool.parent(node) == parent, f"{name} hangs below another chunk"

    @invariant()
    def runs_end_where_something_is_missing(self) -> None:
        for name in ("aaaaaa", "ababab", "bbbbbb", *self.duplicates):
            keys = chain(name)
            for start in range(len(keys) + 1):
                run = start
                while run < len(keys) and keys[run].decode() in self.held:
                    run += 1
                assert self.pool.resident_run(keys, start, len(keys)) == run

    @invariant()
    def room_is_counted_right(self) -> None:
        assert self.pool.num_available // self.per_chunk == self.spare()


TestSharedPool = SharedPoolMachine.TestCase
TestSharedPool.settings = settings(max_examples=200)
