"""BlockPool against a list of chunks that is scanned for everything.

The model may lose things: whatever the pool still finds must carry the bytes last written for it, whatever is pinned
must not be lost, and what does leave, leaves in exactly the model's order. Once for each policy.
"""

from collections.abc import Callable, Sequence
from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_prefix_cache import POLICIES, MisuseError
from cpu_prefix_cache.deciding import BlockPool, PoolExhausted
from cpu_prefix_cache.pool.states import BlockState
from property_tests.models.listener import Listener
from property_tests.models.model import Chunk, Foretold, SlowArc, SlowPool
from property_tests.strategies import chain, pick, positions, prompts


class PoolMachine(RuleBasedStateMachine):
    policy: str
    make_model: Callable[[BlockPool], SlowPool]

    @initialize(
        chunks=st.integers(3, 9), per_chunk=st.sampled_from([1, 2, 3]), spare=st.integers(0, 2), late=st.booleans()
    )
    def build(self, chunks: int, per_chunk: int, spare: int, late: bool) -> None:
        self.per_chunk = per_chunk
        self.ready = 2 * per_chunk if late else chunks * per_chunk + spare
        blocks = chunks * per_chunk + spare
        self.pool = BlockPool(blocks, self.policy, blocks_per_chunk=per_chunk, ready=self.ready, log_boundaries=True)
        self.listener = Listener()
        self.model = type(self).make_model(self.pool)
        self.now = 0.0
        self.memory: dict[int, str] = {}  # block -> what its last writer left there
        self.requests: list[tuple[str, object, int]] = []
        self.pins: list[tuple[object, list[Chunk]]] = []

    def in_state(self, *states: str) -> list[Chunk]:
        return [chunk for chunk in self.model.chunks if chunk.state in states]

    @property
    def free_chunks(self) -> int:
        return (self.ready - len(self.model.chunks) * self.per_chunk) // self.per_chunk

    # a request and its chunks

    @rule(prompt=prompts, less=st.integers(0, 2), pause=st.sampled_from([0.0, 1.0, 40.0, 5_000.0]))
    def a_request_comes(self, prompt: str, less: int, pause: float) -> None:
        """It touches the deepest chunk it matched, or one above it: the device had the rest, or the load was cut."""
        matched = self.model.longest(prompt)
        matched = matched[: max(0, len(matched) - less)]
        block = self.model.cached(matched).block if matched else None
        self.now += pause
        self.requests.append((prompt, self.pool.touch(block, chain(prompt), self.now), self.model.touch(matched)))

    @rule(prompt=prompts, asks=st.booleans())
    def a_request_stores_its_prompt(self, prompt: str, asks: bool) -> None:
        """The whole story at once, so that a run gets somewhere. With `asks` it pins its parent, like a cache."""
        self.a_request_comes(prompt, 0, 1.0)
        names = self.names_of(prompt)
        above = self.model.cached(prompt[: len(prompt) - len(names)])
        if asks and above is not None:
            self.pin(above)
        if asks and names:
            names = names[: self.choice(names)]
        self.take(len(names), names)
        if len(self.in_state("writing")) >= len(names):
            self.a_request_commits(0, len(names))
        if asks and above is not None:
            self.a_pin_ends(-1)

    def choice(self, names: Sequence[str]) -> int:
        """How many chunks of a request the policy wants."""
        above = self.model.cached(names[0][:-1])
        before = self.pool.statistics(), list(self.pool.soonest_evicted())
        choice = self.pool.choose(above.block if above else self.pool.root, [name.encode() for name in names])
        assert choice == self.model.accepts(names, max(0, len(names) - self.free_chunks))
        assert before == (self.pool.statistics(), list(self.pool.soonest_evicted()))
        return choice

    @rule(count=st.integers(0, 6), all_or_none=st.booleans())
    def chunks_are_allocated(self, count: int, all_or_none: bool) -> None:
        """Without a key, as an engine allocates them that has no other pool."""
        self.take(count, all_or_none=all_or_none)

    @precondition(lambda self: self.requests)
    @rule(which=positions, count=st.integers(1, 6), all_or_none=st.booleans())
    def chunks_of_a_request_are_allocated(self, which: int, count: int, all_or_none: bool) -> None:
        """They may be committed as something else, by another request, or given up."""
        names = self.names_of(pick(self.requests[-6:], which)[0])[:count]
        self.take(len(names), names, all_or_none=all_or_none)

    @rule(which=st.lists(positions, min_size=1, max_size=3))
    def free_blocks_are_claimed(self, which: list[int]) -> None:
        """These very ones, because they hold chunks already. If one is not free, or comes twice, nothing changes."""
        free = list(self.pool.free)
        fit = which[: len(free) // self.per_chunk]
        chunks = [[free.pop(position % len(free)) for _ in range(self.per_chunk)] for position in fit]
        used = [block for block in range(self.pool.ready) if block not in self.pool.free]
        before = list(self.pool.free), self.pool.statistics()
        for bad in (chunks[0] if chunks else [-1], used[: self.per_chunk], [*free[:4], 0, 1, 2, 3][:4]):
            with pytest.raises(MisuseError):
                self.pool.claim([*chunks, bad])
            assert before == (list(self.pool.free), self.pool.statistics())
        nodes = self.pool.claim(chunks)
        assert nodes == [blocks[0] for blocks in chunks]
        for node, blocks in zip(nodes, chunks, strict=True):
            assert list(self.pool.blocks_of([node])) == blocks
            self.model.chunks.append(Chunk(node))
            self.write(node, "unfinished")

    def names_of(self, prompt: str) -> list[str]:
        """Missing chunks of a prompt."""
        return [prompt[:end] for end in range(len(self.model.longest(prompt)) + 1, len(prompt) + 1)]

    def take(self, count: int, names: Sequence[str] = (), *, all_or_none: bool = False) -> None:
        """As many chunks as can be had (rule 4)."""
        keys = [name.encode() for name in names]
        order = self.model.eviction_order()
        short = max(0, count - self.free_chunks)
        can_have = min(count, self.free_chunks + len(order))
        assert min(count, self.pool.num_available // self.per_chunk) == can_have
        assert self.pool.least_available <= self.pool.num_available
        before = self.found()
        gone = self.model.evict(short, names)
        if all_or_none and can_have < count:
            with pytest.raises(PoolExhausted) as refusal:
                self.pool.allocate(count, keys)
            assert (refusal.value.wanted, refusal.value.available) == (count, can_have)
            blocks = []
            self.model.announce([])
        else:
            blocks = self.pool.allocate(count, keys) if all_or_none else self.pool.take(count, keys)
            assert len(blocks) == can_have
        assert before - self.found() == set(gone)
        assert names or gone == order[:short]
        assert blocks == sorted(set(blocks))
        whole = self.pool.blocks_of(blocks)
        assert len(set(whole)) == len(whole) == len(blocks) * self.per_chunk and all(b < self.ready for b in whole)
        taken = [Chunk(block) for block in blocks]
        self.model.chunks += taken
        for block in blocks:
            self.write(block, "unfinished")
        if names:
            self.model.announce(taken)

    @precondition(lambda self: self.requests and self.in_state("writing"))
    @rule(which=positions, count=st.integers(1, 4))
    def a_request_commits(self, which: int, count: int) -> None:
        prompt, touch, stamp = self.requests[-1 - which % min(len(self.requests), 6)]
        have = len(self.model.longest(prompt))
        names = self.names_of(prompt)
        chunks = self.in_state("writing")[: min(count, len(names))]
        names = names[: len(chunks)]
        parent = self.model.cached(prompt[:have]).block if have else self.pool.root
        for chunk, name in zip(chunks, names, strict=True):
            self.write(chunk.block, name)
        self.pool.commit([chunk.block for chunk in chunks], [name.encode() for name in names], parent, touch)
        self.model.commit(chunks, names, stamp)

    @precondition(lambda self: self.in_state("writing") and self.in_state("cached"))
    @rule(which=positions)
    def a_chunk_is_not_committed_twice(self, which: int) -> None:
        there = pick(self.in_state("cached"), which)
        parent = there.parent.block if there.parent is not None else self.pool.root
        with pytest.raises(MisuseError):
            self.pool.commit([self.in_state("writing")[0].block], [there.name.encode()], parent, self.pool.touch(None))
        self.model.stamp += 1

    @precondition(lambda self: self.in_state("writing"))
    @rule(which=positions)
    def a_writer_hears_that_nobody_wants_it(self, which: int) -> None:
        chunk = pick(self.in_state("writing"), which)
        self.pool.retire([chunk.block])
        self.model.forget(chunk)
        chunk.state = "retired"

    @precondition(lambda self: any(chunk.has_writer for chunk in self.model.chunks))
    @rule(which=positions)
    def a_writer_gives_up(self, which: int) -> None:
        chunk = pick([chunk for chunk in self.model.chunks if chunk.has_writer], which)
        self.pool.abort([chunk.block])
        self.model.forget(chunk)
        chunk.state, chunk.has_writer = "retired", False
        self.model.free_unneeded()

    # pins

    @precondition(lambda self: self.todays)
    @rule(which=positions, also=positions)
    def blocks_are_pinned(self, which: int, also: int) -> None:
        self.pin(pick(self.todays, which), pick(self.todays, also))

    @property
    def todays(self) -> list[Chunk]:
        """Chunks since the last reset."""
        return [chunk for chunk in self.model.chunks if not chunk.is_old]

    def pin(self, *chunks: Chunk) -> None:
        self.pins.append((self.pool.pin(*(chunk.block for chunk in chunks)), list(chunks)))
        for chunk in chunks:
            chunk.pins += 1

    @precondition(lambda self: self.pins)
    @rule(which=positions)
    def a_pin_ends(self, which: int) -> None:
        pin, chunks = self.pins.pop(which % len(self.pins))
        self.pool.unpin(pin)
        for chunk in chunks:
            chunk.pins -= 1
        self.model.free_unneeded()
        with pytest.raises(MisuseError):
            self.pool.unpin(pin)  # exactly once (rule 2)

    # events that take keys away or add room

    @precondition(lambda self: self.in_state("cached"))
    @rule(which=positions)
    def a_chunk_is_withdrawn(self, which: int) -> None:
        chunk = pick(sorted(self.in_state("cached"), key=lambda chunk: -len(chunk.name)), which)
        self.pool.withdraw(chunk.block)
        self.model.withdraw(chunk.name)

    @precondition(lambda self: len(self.in_state("cached")) > 4)
    @rule(sure=st.integers(0, 3))
    def everything_is_withdrawn(self, sure: int) -> None:
        if sure < 3:
            return
        self.pool.reset()
        for chunk in self.in_state("writing"):
            self.model.forget(chunk)
            chunk.state = "retired"
        self.model.withdraw("")
        for chunk in self.model.chunks:
            chunk.is_old = True
        assert self.pool.statistics().cached == self.pool.statistics().writing == 0

    @rule(more=st.integers(0, 4))
    def the_pool_grows(self, more: int) -> None:
        self.pool.grow(self.ready + more * self.per_chunk)
        self.ready = min(self.ready + more * self.per_chunk, self.pool.capacity)

    # invariants

    @invariant()
    def the_pool_keeps_its_own_rules(self) -> None:
        self.pool.check_valid()

    @invariant()
    def blocks_are_counted_by_state(self) -> None:
        now = self.pool.statistics()
        for state, blocks in (("writing", now.writing), ("cached", now.cached), ("retired", now.retired)):
            assert blocks == len(self.in_state(state)) * self.per_chunk
        assert now.free + now.writing + now.cached + now.retired == now.ready == self.ready  # rule 1

    @invariant()
    def found_blocks_are_those_written(self) -> None:
        for name in self.model.names():
            block = self.pool.find(name.encode())
            assert block == self.model.cached(name).block and self.pool.state(block) is BlockState.CACHED
            assert {self.memory[each] for each in self.pool.blocks_of([block])} == {name}
            assert [self.pool.key(each) for each in self.pool.path(block, len(name))] == chain(name)
        for chunk in self.in_state("writing", "retired"):
            assert self.pool.key(chunk.block) is None

    @invariant()
    def the_log_lists_the_boundaries_that_can_be_hit(self) -> None:
        assert self.listener.hear(self.pool.take_events()) == self.model.names()

    @invariant()
    def pins_hold_no_more_than_is_said(self) -> None:
        held: set[int] = set()
        for _, chunks in self.pins:
            for chunk in chunks:
                above: Chunk | None = chunk
                while above is not None:
                    if above.state == "cached":
                        held.add(above.block)
                    above = above.parent
        now = self.pool.statistics()
        assert len(held) * self.per_chunk <= now.protected <= now.cached
        assert self.pins or not now.protected

    @invariant()
    def pinned_chunks_keep_their_bytes(self) -> None:
        for _, chunks in self.pins:
            for chunk in chunks:
                assert chunk in self.model.chunks and self.pool.is_pinned(chunk.block)
                assert self.memory[chunk.block] == chunk.name or chunk.has_writer or not chunk.name

    @invariant()
    def the_next_to_leave_are_known(self) -> None:
        order = [self.pool.key(block).decode() for block in self.pool.soonest_evicted()]
        assert order == self.model.eviction_order()
        assert len(list(islice(self.pool.soonest_evicted(), 2))) == min(2, len(order))

    def write(self, block: int, name: str) -> None:
        for each in self.pool.blocks_of([block]):
            self.memory[each] = name

    def found(self) -> set[str]:
        every = (self.pool.key(block) for block in range(self.pool.capacity))
        return {key.decode() for key in every if key is not None}


class LruMachine(PoolMachine):
    policy = "lru"
    make_model = staticmethod(lambda pool: SlowPool())


class ArcMachine(PoolMachine):
    policy = "arc"
    make_model = staticmethod(lambda pool: SlowArc(pool.capacity))

    @invariant()
    def the_lists_are_as_long_as_the_papers(self) -> None:
        arc = self.pool._policy
        assert [ring.size for ring in arc._rings] == [self.model.size("T1"), self.model.size("T2")]
        assert arc._ghosts.counts == [len(names) for names in self.model.ghosts.values()]
        assert arc._target == pytest.approx(self.model.p)
        for which, names in enumerate(self.model.ghosts.values()):
            assert arc._ghosts.keys(which) == [name.encode() for name in names]


class AdaptiveMachine(PoolMachine):
    """The worth of chunks is held by test_adaptive_laws.py; here, that foretold evictions are lawful and happen."""

    policy = "adaptive"
    make_model = Foretold


def test_every_policy_has_a_machine() -> None:
    assert {machine.policy for machine in (LruMachine, ArcMachine, AdaptiveMachine)} == set(POLICIES)


TestLru = LruMachine.TestCase
TestLru.settings = settings(max_examples=600)
TestArc = ArcMachine.TestCase
TestArc.settings = settings(max_examples=600)
TestAdaptive = AdaptiveMachine.TestCase
TestAdaptive.settings = settings(max_examples=200)
