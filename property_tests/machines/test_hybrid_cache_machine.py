"""The machine of test_prefix_cache_machine for models with windows, local chunks and states.

The device is one BlockPool of chunks and checkpoints. A request has windows and states in working memory of its own,
filled from the checkpoint it resumes at, and writes them to a checkpoint on the device at the boundaries the cache
wants. So whatever it resumes from must be exactly what the groups need there, token by token, on every rank.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from cpu_prefix_cache import POLICIES, Hit, Miss, Pending
from cpu_prefix_cache.deciding import (
    ChunkLocalGroup,
    CPUPrefixCache,
    EngineSteps,
    Group,
    HybridChunkPlanner,
    PoolExhausted,
    PrefixGroup,
    Request,
    StateGroup,
    WindowGroup,
)
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.testing.engine import cache_options
from cpu_prefix_cache.testing.slots import PoolSlots
from property_tests.machines.test_prefix_cache_machine import (
    ALL_NAMES,
    FAILURES,
    GRID,
    NOTHING,
    PrefixCacheMachine,
    Sequence,
)
from property_tests.strategies import chain, pick, positions, prompts
from tests.support.sinks import SinkGroup


def prefix(name: str = "full", tokens: int = GRID, size: int = 3_000, ahead: int = 0) -> Group:
    return PrefixGroup(name=name, block_tokens=tokens, block_bytes=size, lookahead_tokens=ahead)


def window(tokens: int, block: int = 2, size: int = 1_000, extra: int = 0, blocks: int = 1) -> Group:
    return WindowGroup(
        name="window",
        block_tokens=block,
        block_bytes=size,
        window_tokens=tokens,
        extra_tokens=extra,
        device_blocks=blocks,
    )


def local(tokens: int, block: int = 2) -> Group:
    return ChunkLocalGroup(name="local", block_tokens=block, block_bytes=900, window_tokens=tokens)


STATE = StateGroup(name="state", block_tokens=GRID, block_bytes=2_000)
LAYOUTS = {
    "full, window": [prefix(), window(6)],
    "full, state": [prefix(), STATE],
    "full, window, state": [prefix(), window(9, extra=2), STATE],
    "state": [STATE],
    "window": [window(10, block=4, blocks=2)],
    "full, chunk-local": [prefix(), local(3 * GRID)],
    "full, sinks": [
        prefix(),
        SinkGroup(name="sinks", block_tokens=2, block_bytes=1_000, window_tokens=6, sink_tokens=3),
    ],
    "draft, target, state": [prefix("draft", tokens=2), prefix("target", size=12_000, ahead=3), STATE],
}


@dataclass(eq=False)
class Hybrid(Sequence):
    """`work[rank]` is what the request has of windows and states: (group, chunk, block) -> patterns."""

    work: list[dict[tuple[int, int, int], Any]] = field(default_factory=list)
    stage: int | None = None
    staged: list[tuple[Any, tuple[int, ...]]] = field(default_factory=list)


HYBRID = dict(  # `host_room` and `device_room` are in tenths of what a prompt of 6 chunks takes with a few checkpoints
    mode=st.sampled_from(["eager", "lazy"]),
    ranks=st.sampled_from([1, 2, 3]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    host_room=st.integers(5, 25),
    device_room=st.integers(12, 25),
    portion=st.sampled_from([0, 0, 0, 1, 3, 100]),
    interval=st.sampled_from([None, None, 1, 2]),
    policy=st.sampled_from(sorted(POLICIES)),
    failures=FAILURES,
)


class HybridCacheMachine(PrefixCacheMachine):
    @initialize(**HYBRID)
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
    ) -> None:
        self.plan(layout, host_room, device_room)
        assert self.planner.grid_tokens == GRID
        self.slots = PoolSlots(self.planner, self.device_blocks)
        self.cache = CPUPrefixCache(
            self.planner,
            self.slots.device,
            host_blocks=self.host_blocks,
            ready_blocks=0 if portion else None,
            **cache_options(
                policy=policy,
                offload=mode,
                ranks=ranks,
                steps=EngineSteps(max_tokens=3 * GRID),
                checkpoint_interval=interval and interval * GRID,
                log_boundaries=True,
            ),
        )
        self.begin_with_nothing(ranks, portion, failures)
        self.stages = 0

    def plan(self, layout: str, host_room: int, device_room: int, in_pages: bool = False) -> None:
        self.planner = HybridChunkPlanner(LAYOUTS[layout], max_model_len=1_000, in_pages=in_pages)
        checkpoint = [self.planner.pieces[at.group].device_blocks for at in self.planner.checkpoint(5)]
        prompt_blocks = 6 * self.planner.device_blocks_per_chunk + 3 * sum(checkpoint)
        self.device_blocks = device_room * prompt_blocks // 10
        prompt_blocks = 6 * self.planner.host_blocks_per_chunk + 2 * self.planner.checkpoint_blocks(5)
        self.host_blocks = host_room * prompt_blocks // 10

    # expected bytes

    def pattern(self, epoch: Any, key: bytes) -> list[tuple[Any, ...]]:
        return [
            (epoch, key, piece.group.name, part)
            for piece in self.planner.pieces
            if piece.in_chunk
            for part in range(piece.device_blocks)
        ]

    def piece_pattern(self, epoch: Any, key: bytes, group: int, block: int) -> tuple[tuple[Any, ...], ...]:
        return tuple((epoch, key, group, block, part) for part in range(self.planner.pieces[group].device_blocks))

    def needed(self, b: int) -> list[tuple[int, int, int]]:
        """Every block of windows, local chunks and states that tokens from b on read, token by token."""
        found: set[tuple[int, int, int]] = set()
        for at, group in enumerate(self.planner.groups):
            tokens: set[int] = set()
            if isinstance(group, WindowGroup):
                tokens = {token for token in range(b) if token > b - group.window_tokens - group.extra_tokens}
            elif isinstance(group, ChunkLocalGroup):
                tokens = {token for token in range(b) if token // group.window_tokens == b // group.window_tokens}
            elif isinstance(group, SinkGroup):
                seen = {token for token in range(b) if token > b - group.window_tokens}
                tokens = seen | set(range(min(b, group.sink_tokens)))
            elif group.is_state and b:
                tokens = {b - 1}
            found |= {(at, token // GRID, token % GRID // group.block_tokens) for token in tokens}
        return sorted(found)

    def resumed(self, name: str) -> int:
        """The token from which a request resumes that finds the chunks up to `name`: groups may look ahead."""
        there = len(name) * GRID - max(group.lookahead_tokens for group in self.planner.groups)
        return max((b for b in range(0, len(name) * GRID + 1, GRID) if b <= there), default=0)

    def kept_on_host(self) -> set[str]:
        return {name.decode() for name in ALL_NAMES if self.cache.pool.find(checkpoint_key(name)) is not None}

    def can_be_hit(self) -> set[str]:
        kept = self.kept_on_host()
        return {name for name in self.on_host() if name in kept or not self.needed(self.resumed(name))}

    def slow_boundary(self, prompt: str, n0: int, num_tokens: int) -> int:
        on_host, kept = self.on_host(), self.kept_on_host()
        able = [n0]
        for depth in range(n0 // GRID + 1, len(prompt) + 1):
            if prompt[:depth] not in on_host:
                break
            b = self.resumed(prompt[:depth])
            if b < num_tokens and (not self.needed(b) or prompt[:depth] in kept):
                able.append(b)
        return max(able)

    # requests

    def begin(self, id: str, prompt: str, partial: int, cut: int) -> bool:
        keys, num_tokens = chain(prompt), len(prompt) * GRID + partial
        n0 = self.slots.coordinator.longest_boundary(keys, 0, num_tokens)
        request = Request(id, keys, num_tokens)
        before = self.cache.statistics()
        answer = self.cache.lookup(request, n0, self.now)
        assert self.cache.statistics() == before  # rule 5
        could = self.slow_boundary(prompt, n0, num_tokens)
        if isinstance(answer, Pending):
            self.check_pending(id, keys, answer.deadline, n0, could)
            return False
        assert answer == (Hit(could, n0) if could > n0 else Miss())
        assert self.cache.lookup(request, n0 + 1, self.now) == answer  # rule 8
        node = self.slots.coordinator.resume_node(keys, n0 // GRID) if n0 else None
        work = self.working_memory(n0, node)
        holding = self.slots.take(keys, n0 // GRID, -(-num_tokens // GRID))
        if holding is None:
            return False
        for slot in holding.slots[n0 // GRID :]:
            self.write(slot, [("left by", id)] * len(self.slots.blocks_of(slot)))
        sequence = Hybrid(id, prompt, request, holding, n0, self.epoch, n0, work=work)
        self.running[id] = sequence
        boundary = could
        if boundary > n0:
            depth = self.planner.chunks_to_resume(boundary // GRID)
            pieces = [at for at in self.planner.checkpoint(depth) if at.chunk >= n0 // GRID]
            self.stages += 1
            widths = [self.planner.pieces[at.group].device_blocks for at in pieces]
            staged = self.slots.stage(f"stage {self.stages}", widths)
            if staged is None:
                boundary = n0
            else:
                sequence.stage = staged[0]
                sequence.staged = list(zip(pieces, staged[1], strict=True))
        ends = self.cache.boundaries_of(request, boundary)
        self.cache.admit(request, n0, boundary if boundary > n0 else None, self.now)
        assert self.cache.boundaries(id) == ends
        assert all(n0 < b < num_tokens for b in ends)
        if boundary > n0:
            self.start_load(sequence, boundary)
        return True

    def check_pending(self, id: str, keys: list[bytes], deadline: float, n0: int, could: int) -> None:
        assert self.now < deadline and could > n0

    def working_memory(self, n0: int, node: int | None) -> list[dict[tuple[int, int, int], Any]]:
        work: list[dict[tuple[int, int, int], Any]] = [{} for _ in self.ranks]
        if node is not None and self.needed(n0):
            places = self.planner.checkpoint(self.planner.chunks_to_resume(n0 // GRID))
            for at, blocks in zip(places, self.slots.pool.checkpoints.pieces(node), strict=True):
                for rank in self.ranks:
                    work[rank][tuple(at)] = tuple(self.device[rank].get(block, NOTHING) for block in blocks)
        return work

    def start_load(self, sequence: Hybrid, boundary: int) -> None:
        slots = sequence.holding.slots[sequence.n0 // GRID : boundary // GRID]
        destinations: list[list[int]] = [[] for _ in self.planner.pieces]
        for slot in slots:
            blocks = list(self.slots.blocks_of(slot))
            for lane, piece in zip(destinations, self.planner.pieces, strict=True):
                if piece.in_chunk:
                    lane += blocks[: piece.device_blocks]
                    del blocks[: piece.device_blocks]
            self.write(slot, ["poison"] * len(self.slots.blocks_of(slot)))
        for at, blocks in sequence.staged:
            destinations[at.group] += blocks
            for memory in self.device:
                memory.update(dict.fromkeys(blocks, "poison"))
        sequence.loading = self.cache.load(sequence.id, boundary, destinations, self.now)
        sequence.boundary = boundary
        sequence.destinations = list(sequence.holding.slots)
        self.loads[sequence.loading] = sequence

    def compute(self, sequence: Hybrid, tokens: int, step_between: bool) -> None:
        """A step ends at every boundary at which the cache wants a checkpoint."""
        last = min(sequence.computed + tokens, sequence.request.num_tokens)
        ends = [b for b in self.cache.boundaries(sequence.id) if sequence.computed < b < last]
        for end in [*ends, last]:
            self.compute_to(sequence, end, step_between)

    def compute_to(self, sequence: Hybrid, end: int, step_between: bool) -> None:
        if step_between:
            self.one_step_begins()
        self.read_everything_before(sequence)
        epoch = sequence.epoch if not sequence.stale else "an old one"
        for at in range(sequence.computed // GRID, end // GRID):
            key = sequence.request.keys[at]
            self.write(sequence.holding.slots[at], self.pattern(epoch, key))
            for group, each in enumerate(self.planner.groups):
                for block in range(GRID // each.block_tokens):
                    for work in sequence.work:
                        work[group, at, block] = self.piece_pattern(epoch, key, group, block)
        sequence.computed = end
        if not sequence.stale:
            self.slots.publish(sequence.holding, sequence.request.keys, end // GRID)
            for b in {sequence.boundary, *self.cache.boundaries(sequence.id)}:
                if self.planner.chunks_to_resume(b // GRID) <= end // GRID:
                    self.keep(sequence, self.planner.chunks_to_resume(b // GRID))
        self.cache.computed(sequence.id, end)

    def keep(self, sequence: Hybrid, depth: int) -> None:
        """Put a checkpoint on the device, if there is room, and the request has what it takes. Another request may have
        done so.

        It hangs below the chunks that must be there to resume from it, so it is put there when these are computed.
        """
        pool = self.slots.pool
        if sequence.stale or not self.needed(self.resumed("x" * depth)):
            return
        key = sequence.request.keys[depth - 1]
        has_all = all(tuple(at) in work for at in self.planner.checkpoint(depth) for work in sequence.work)
        if pool.find(checkpoint_key(key)) is not None or not has_all:
            return
        needs = self.slots.coordinator.needs(self.slots.coordinator.checkpoint_at(sequence.request.keys, depth))
        try:
            [node] = pool.allocate(0, [checkpoint_key(key)], needs)
        except PoolExhausted:
            return
        for at, blocks in zip(self.planner.checkpoint(depth), pool.checkpoints.to_write(node), strict=True):
            for rank in self.ranks:
                if blocks is not None:
                    self.device[rank].update(zip(blocks, sequence.work[rank][tuple(at)], strict=True))
        pool.commit([node], [checkpoint_key(key)], sequence.holding.slots[depth - 1], sequence.holding.touch)

    def read_everything_before(self, sequence: Hybrid) -> None:
        super().read_everything_before(sequence)
        if sequence.stale or sequence.computed % GRID:
            return
        for at in self.needed(sequence.computed):
            group, chunk, block = at
            right = self.piece_pattern(sequence.epoch, sequence.request.keys[chunk], group, block)
            for rank in self.ranks:
                assert sequence.work[rank].get(at) == right, "a window or a state is somebody else's"

    def end(self, sequence: Hybrid) -> None:
        if sequence.loading is None and sequence.computed % GRID == 0:
            self.keep(sequence, sequence.computed // GRID)
        super().end(sequence)

    def leave(self, sequence: Hybrid) -> None:
        self.unstage(sequence)
        super().leave(sequence)

    def unstage(self, sequence: Hybrid) -> None:
        if sequence.stage is not None:
            self.slots.pool.abort([sequence.stage])
            sequence.stage = None

    def was_loaded(self, sequence: Hybrid) -> None:
        super().was_loaded(sequence)
        for at, blocks in sequence.staged:
            right = self.piece_pattern(sequence.epoch, sequence.request.keys[at.chunk], at.group, at.block)
            for rank in self.ranks:
                found = tuple(self.device[rank].get(block, NOTHING) for block in blocks)
                assert found == right, "a load brought another window or state"
                sequence.work[rank][tuple(at)] = found

    def loaded(self, sequence: Hybrid, id: int, ok: bool) -> None:
        super().loaded(sequence, id, ok)
        if self.running.get(sequence.id) is sequence:
            self.unstage(sequence)
            if ok and sequence.computed >= self.planner.chunks_to_resume(sequence.boundary // GRID) * GRID:
                self.keep(sequence, sequence.boundary // GRID)

    # events in between

    def flood(self, slots: int) -> None:
        for count in range(3 * slots, 0, -1):
            staged = self.slots.stage("flood", [1] * count)
            if staged is not None:
                for (block,) in staged[1]:
                    for memory in self.device:
                        memory[block] = "flood"
                self.slots.pool.abort([staged[0]])
                return

    @precondition(lambda self: self.slots.pool.statistics().cached)
    @rule(which=positions, checkpoint=st.booleans())
    def a_block_goes_bad(self, which: int, checkpoint: bool) -> None:
        """One of a chunk that no running request uses, or of a checkpoint: then all who share it are wrong."""
        pool = self.slots.pool
        if checkpoint:
            nodes = [pool.find(checkpoint_key(name)) for name in ALL_NAMES]
            nodes = [node for node in nodes if node is not None]
            if not nodes:
                return
            pieces = pool.checkpoints.pieces
            bad = set(pick(pieces(pick(nodes, which)), which))
            nodes = [node for node in nodes if any(bad & set(piece) for piece in pieces(node))]
        else:
            running = [each.request.keys for each in self.running.values()]
            free = [pool.find(name) for name in ALL_NAMES if not any(name in keys for keys in running)]
            nodes = [node for node in free if node is not None]
            if not nodes:
                return
            nodes = [pick(nodes, which)]
            bad = set(self.slots.blocks_of(nodes[0]))
        for node in nodes:
            pool.withdraw(node)
        for memory in self.device:
            memory.update(dict.fromkeys(bad, "bad"))
        self.cache.invalidated(bad)

    @rule(prompt=prompts)
    def a_prefix_is_reserved(self, prompt: str) -> None:
        b = self.resumed(prompt)
        if not b:
            return
        lease = self.cache.reserve(Request("lease", chain(prompt), 100), b)
        name = prompt if self.needed(b) else prompt[: b // GRID]
        assert (lease is not None) == (name in (self.kept_on_host() if self.needed(b) else self.on_host()))
        if lease is not None:
            self.leases.append((lease, name, self.epoch))

    # invariants

    @invariant()
    def bytes_are_those_of_the_key(self) -> None:
        super().bytes_are_those_of_the_key()
        for name in self.kept_on_host():
            node = self.cache.pool.find(checkpoint_key(name.encode()))
            pieces = self.cache.pool.checkpoints.pieces(node)
            needed = self.needed(self.resumed(name))
            assert len(pieces) == len(needed), "a checkpoint is not complete (rule 9)"
            for (group, chunk, block), blocks in zip(needed, pieces, strict=True):
                content = self.piece_pattern(self.epoch, name[: chunk + 1].encode(), group, block)
                for part, at in enumerate(blocks):
                    for rank in self.ranks:
                        assert self.host[rank].get(at) == (content, part), f"rank {rank}: another piece at {name}"

    @invariant()
    def the_device_is_right(self) -> None:
        """A load wrote into no block that the device's own cache uses."""
        pool = self.slots.pool
        for name in ALL_NAMES:
            slot, node = pool.find(name), pool.find(checkpoint_key(name))
            for rank in self.ranks:
                if slot is not None:
                    assert self.on_device(rank, slot) == self.pattern(self.epoch, name)
                for at, blocks in enumerate(() if node is None else pool.checkpoints.pieces(node)):
                    group, chunk, block = self.needed(self.resumed(name))[at]
                    found = tuple(self.device[rank][each] for each in blocks)
                    assert found == self.piece_pattern(self.epoch, name[: chunk + 1], group, block)

    @invariant()
    def bytes_that_move_are_held(self) -> None:
        free = set(self.slots.pool.free)
        for id, copy in self.copies.items():
            if id not in self.resolved:
                assert free.isdisjoint(block for group in copy.plan.copies for block in group.device_blocks)

    @invariant()
    def reserved_chunks_stay(self) -> None:
        if self.late or not all(self.resolved.values()):
            return
        for _, prompt, epoch in self.leases:
            if epoch == self.epoch:
                assert prompt in self.on_host()
                assert not self.needed(self.resumed(prompt)) or prompt in self.kept_on_host()


class LongSearch(HybridCacheMachine):
    """The same machine, for which `make test` has no time."""


TestHybridCache = HybridCacheMachine.TestCase
TestHybridCache.settings = settings(max_examples=150)
TestHybridCacheForLong = pytest.mark.slow(LongSearch.TestCase)
TestHybridCacheForLong.settings = settings(max_examples=600)
