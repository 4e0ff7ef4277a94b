"""KeyedHostCache with real bytes: puts and loads of any part of any prompt, late, in order, failing; leases; resets.

The model is a set of names, of a group and a key, that were put since the last reset. It knows no pool and no forest:

    a lookup finds     nothing but these; all of them in a large host where nothing has failed
    its lengths        follow, token by token, from the names that it finds one by one
    a lease            keeps what it names, until it is released, a reset, or a load of it that fails
    a put              copies what is neither here nor under way, and reads its blocks before it is done
    a load             that went well has brought the bytes of each key, and touches no other block
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cpu_prefix_cache.by_keys import CopyHandle, FoundKeys
from cpu_prefix_cache.copying import Copier, Passed
from cpu_prefix_cache.deciding import Direction
from property_tests.strategies import pick, positions, prompts
from tests.support.keyed_engine import BLOCKS, GROUPS, POISON, TOKENS, WINDOW, KeyedEngine, keys

LARGE, SMALL = 400, 9  # host blocks: of all that can be put, and of one prompt with its window and state
Name = tuple[str, bytes]


class Moment(Copier):
    """Moves bytes when the machine lets it, in the order of submission, and fails when the machine wants that."""

    def __init__(self, copier: Copier, tensors: object) -> None:
        self.copier, self.waiting = copier, list[Copy]()
        self.submitted = list[Copy]()

    def here(self):
        return Passed()

    def submit(self, direction, copies, after):
        copy = Copy(self, direction, copies)
        self.waiting.append(copy)
        self.submitted.append(copy)
        return copy


class Copy(Passed):
    """One transfer, and its event."""

    def __init__(self, at, direction, copies):
        self.at, self.direction, self.copies = at, direction, copies
        self.has_ended = self.has_failed = False

    def run(self, fails):
        if not fails or len(self.copies[0].host_blocks) % 2:  # a copy that fails may have moved its bytes
            self.at.copier.copy(self.direction, self.copies)
        self.has_ended, self.has_failed = True, fails

    def passed(self):
        if self.has_failed:
            raise RuntimeError("the machine wants this copy to fail")
        return self.has_ended

    def until_passed(self):
        while not self.has_ended:
            self.at.waiting.pop(0).run(fails=False)
        self.passed()


@dataclass
class Put:
    handle: CopyHandle
    names: set[Name]  # that it copies
    blocks: list[list[int]]
    epoch: int


@dataclass
class Load:
    handle: CopyHandle
    keys: list[bytes]
    names: set[Name]
    blocks: list[list[int]]
    epoch: int


@dataclass
class Leased:
    found: FoundKeys
    keys: list[bytes]
    names: set[Name] = field(default_factory=set)


class KeyedCacheMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from([GROUPS, GROUPS[:1], GROUPS[:2], (GROUPS[0], GROUPS[2]), GROUPS[2:]]),
        is_large=st.booleans(),
        policy=st.sampled_from(["lru", "adaptive"]),
    )
    def begin(self, groups, is_large, policy):
        self.groups, self.is_large = groups, is_large
        size = LARGE if is_large else SMALL
        self.engine = KeyedEngine(groups, host_blocks=size, policy=policy, wrap_copier=self._wrap)
        self.host = self.engine.host
        self.engine.poison()
        self.free = {group: list(range(BLOCKS)) for group in range(len(groups))}
        self.stored: set[Name] = set()  # since the last reset, unless a load of it has failed
        self.open: list[Put | Load] = []
        self.leases: list[Leased] = []
        self.epoch = self.left = 0
        self.has_failed = False  # since the last reset: nobody knows what was stored

    def _wrap(self, copier, tensors):
        self.copier = Moment(copier, tensors)
        return self.copier

    # The engine

    @rule(prompt=prompts, first=positions, counts=st.tuples(positions, positions, positions))
    def put(self, prompt, first, counts):
        part, names, blocks = self._given(self._keys(prompt, first), counts)
        if blocks is None:
            return
        self.engine.compute(part, blocks)
        here = names & self._here(part)
        puts = (put for put in self.open if isinstance(put, Put) and put.epoch == self.epoch)
        moving = {name for put in puts for name in put.names}
        self.copier.submitted.clear()
        handle = self.host.put(part, blocks)
        copied = {name for copy in self.copier.submitted for name in self._copied(copy, part, blocks)}
        assert not copied & here, "what is here is copied again"
        assert not copied & moving or self.has_failed, "what is under way is copied again"
        assert copied <= names
        self.stored |= copied
        self.open.append(Put(handle, copied, blocks, self.epoch))

    @rule(prompt=prompts, first=positions, counts=st.tuples(positions, positions, positions))
    def load(self, prompt, first, counts):
        self._load(self._keys(prompt, first), counts)

    @rule(position=positions, counts=st.tuples(positions, positions, positions))
    def load_what_is_leased(self, position, counts):
        if self.leases:
            lease = pick(self.leases, position)
            self._load(lease.keys[: lease.found.longest], counts)

    def _load(self, part, counts):
        part, names, blocks = self._given(part, counts)
        if blocks is None:
            return
        here = names <= self._here(part)
        handle = self.host.load(part, blocks)
        assert (handle.ok is not False) == here or self.host.cache.is_off, "a load of what is here, or is not"
        self.open.append(Load(handle, part, names, blocks, self.epoch))

    @rule(prompt=prompts, first=positions)
    def lookup(self, prompt, first):
        part = self._keys(prompt, first)
        found = self.host.lookup(part)
        here = self._here(part)
        assert list(found.lengths) == self._lengths(part, here)
        leased = {(group, key) for group in self.groups for key in part[: found.longest]} & here
        self.leases.append(Leased(found, part, leased))

    @rule(position=positions)
    def release(self, position):
        if self.leases:
            lease = pick(self.leases, position)
            self.leases.remove(lease)
            self.host.release(lease.found)

    @rule(count=st.integers(1, 3), fails=st.sampled_from([False, False, False, True]))
    def copy(self, count, fails):
        for copy in self.copier.waiting[:count]:
            self.copier.waiting.remove(copy)
            self.has_failed |= fails
            if fails and copy.direction is Direction.LOAD:  # it is forgotten with all that hangs below
                for lease in self.leases:
                    lease.names.clear()
            copy.run(fails)

    @rule()
    def poll(self):
        self.host.poll()

    @rule(position=positions)
    def wait(self, position):
        if self.open:
            pick(self.open, position).handle.wait()

    @rule(is_wanted=st.sampled_from([False, False, True]))
    def reset(self, is_wanted):
        if is_wanted:
            self.host.reset()
            self._forget()

    # Checks

    @invariant()
    def handles_end(self):
        for each in list(self.open):
            if each.handle.is_done:
                self.open.remove(each)
                self._ended(each)
        self.host.cache.check_valid()
        if self.host.cache.is_off:
            self.stored.clear()
            for lease in self.leases:
                lease.names.clear()

    @invariant()
    def names_that_are_found_were_put(self):
        every = {key for _, key in self.stored} | {key for lease in self.leases for key in lease.keys}
        here = self._here(sorted(every))
        assert here <= self.stored, "found, and never put"
        if self.is_large and not self.has_failed and not self.open:
            assert here == self.stored, "put, and not found"
        for lease in self.leases:
            assert lease.names <= here, "a lease has lost a name"

    @invariant()
    def other_blocks_are_left_alone(self):
        for number, group in enumerate(self.engine.groups):
            for part in group.parts:
                assert (part.rows[self.free[number]] == POISON).all(), "a block is written to that is nobody's"

    def teardown(self):
        if vars(self).get("host"):
            while self.copier.waiting:
                self.copier.waiting.pop(0).run(fails=False)
            self.host.drain()
            self.handles_end()
            assert not self.open, "a handle never ends"
            assert self.host.statistics().leases_left == self.left
            self.host.close()

    # Details

    def _forget(self):
        self.epoch += 1
        self.left += sum(lease.found.longest > 0 for lease in self.leases)
        self.stored.clear()
        self.leases.clear()
        self.has_failed = False

    def _keys(self, prompt, first) -> list[bytes]:
        return keys(*prompt)[first % len(prompt) :]

    def _given(self, part, counts):
        """These keys, the names that get blocks, and the blocks; None for those where too few are free."""
        wanted = [count % (len(part) + 1) for count, _ in zip(counts, self.groups, strict=False)]
        if any(len(self.free[number]) < count for number, count in enumerate(wanted)):
            return part, set(), None
        blocks = [[self.free[number].pop() for _ in range(count)] for number, count in enumerate(wanted)]
        names = {(self.groups[number], key) for number, count in enumerate(wanted) for key in part[len(part) - count :]}
        return part, names, blocks

    def _ended(self, each):
        if isinstance(each, Load) and each.handle.ok:
            assert self.engine.wrong(each.keys, each.blocks) == [], "a load has brought other bytes"
        for number, blocks in enumerate(each.blocks):
            for part in self.engine.groups[number].parts:
                part.rows[blocks] = POISON
            self.free[number] += blocks

    def _here(self, part: Sequence[bytes]) -> set[Name]:
        """The names of these keys that are found one by one."""
        return {(group, key) for key in part for group in self._groups_here(key)}

    def _groups_here(self, key: bytes) -> Iterator[str]:
        found = self.host.lookup([key])
        yield from (group for group in self.groups if list(found.by_group[group]) == [1])
        self.host.release(found)

    def _lengths(self, part: Sequence[bytes], here: set[Name]) -> list[int]:
        """After how many keys all is here that the next token reads of these keys, token by token."""
        reads: dict[str, Callable[[int], range]] = {
            "attention": lambda token: range(token),
            "window": lambda token: range(max(0, token - WINDOW + 1), token),
            "state": lambda token: range(token - 1, token),
        }
        lengths = []
        for length in range(1, len(part) + 1):
            tokens = ((group, at) for group in self.groups for at in reads[group](length * TOKENS))
            if all((group, part[at // TOKENS]) in here for group, at in tokens):
                lengths.append(length)
        return lengths

    def _copied(self, copy: Copy, part: Sequence[bytes], blocks: Sequence[Sequence[int]]) -> Iterator[Name]:
        if copy.direction is Direction.STORE:
            for each in copy.copies:
                given = blocks[each.group]
                last = part[len(part) - len(given) :]
                yield from ((self.groups[each.group], last[given.index(block)]) for block in each.device_blocks)


KeyedCacheMachine.TestCase.settings = settings(max_examples=60)
test_keyed_cache = KeyedCacheMachine.TestCase
