"""BlockPool with checkpoints against nodes in a list (property_tests/models/checkpoint_model.py).

Checkpoints of random pieces, some shared with those near them, over chunks of none to three blocks; stores that follow
each other and fail; pins on nodes and on blocks of pieces; everything withdrawn and stored again under the same keys.
Memory is a dict from block to what was written there, so a checkpoint that can be found and is not complete is seen.

Which of several nodes leaves is the policy's choice. What is held here: chunks that are of no use go before anything
else, checkpoints by the age of their touch, nobody who is pinned or has something below, and as much as was promised.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.deciding import BlockPool, PoolExhausted
from cpu_prefix_cache.index import nearest_checkpoint
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.states import BlockState
from property_tests.models.checkpoint_model import Node, Piece, SlowHybridPool
from property_tests.models.listener import Listener
from property_tests.strategies import pick, positions, prompts

LAYOUTS = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)), min_size=1, max_size=2)


def todays(each: list[Any]) -> list[Any]:
    """Nodes or pieces since the last reset."""
    return [one for one in each if not one.is_old]


@dataclass(eq=False)
class Store:
    """Nodes that are being written, each below the one before it, and the pieces it has to fill."""

    nodes: list[Node]
    parent: str
    pin: Any
    parent_node: Node | None
    touch: Any
    stamp: int
    fresh: list[Piece]
    follows: list["Store"]
    phase: str = "writing"  # then "committed" or "failed"


class CheckpointMachine(RuleBasedStateMachine):
    @initialize(
        per_chunk=st.integers(0, 3),
        blocks=st.integers(8, 30),
        late=st.booleans(),
        period=st.integers(1, 3),
        layout=LAYOUTS,
        segment=st.sampled_from([2, 3, 64]),
    )
    def build(
        self, per_chunk: int, blocks: int, late: bool, period: int, layout: list[tuple[int, int, int]], segment: int
    ) -> None:
        """`layout`: for each group, how many chunks a checkpoint reaches back, pieces to a chunk, blocks to a piece."""
        self.segment_before, nearest_checkpoint.SEGMENT = nearest_checkpoint.SEGMENT, segment
        self.layout = layout
        self.per_chunk = per_chunk
        self.ready = blocks // 2 if late else blocks
        self.model = SlowHybridPool(lambda depth: period == 1 or depth % period > 0)
        self.pool = BlockPool(
            blocks,
            blocks_per_chunk=per_chunk,
            ready=self.ready,
            needs_checkpoint=self.model.needs_checkpoint,
            log_boundaries=True,
        )
        self.listener = Listener()
        self.memory: dict[int, Any] = {}
        self.stores: list[Store] = []
        self.pins: list[tuple[Any, list[Node | Piece]]] = []
        self.epoch = 0
        self.widest = per_chunk

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        nearest_checkpoint.SEGMENT = self.segment_before
        while self.pins:
            self.a_pin_ends(0)
        while self.stores:
            self.give_up(self.stores[0])
        self.pool.reset()
        self.pool.check_valid()
        now = self.pool.statistics()
        assert now.free == now.ready and now.pinned == 0, "something was not given back"

    # needs of a checkpoint

    def needs(self, name: str) -> list[PieceNeed]:
        """Every piece of every group of the last chunks of `name`. A piece is known by the prompt up to its chunk."""
        return [
            PieceNeed((name[: end + 1], group, part), width)
            for group, (reach, parts, width) in enumerate(self.layout)
            for end in range(max(0, len(name) - reach), len(name))
            for part in range(parts)
        ]

    @property
    def free(self) -> int:
        return self.ready - sum(len(self.model.blocks(state)) for state in ("writing", "cached", "retired"))

    # stores

    @rule(prompt=prompts, chunks=st.integers(0, 6), checkpoint=st.booleans())
    def a_request_stores(self, prompt: str, chunks: int, checkpoint: bool) -> None:
        """Stores missing chunks of its prompt, up to so many, and a checkpoint at the end."""
        self.begin(prompt, chunks, checkpoint)

    @rule(prompt=prompts, ended=st.booleans())
    def a_request_stores_all_at_once(self, prompt: str, ended: bool) -> None:
        store = self.begin(prompt, len(prompt), True)
        if store is not None and all(each.phase == "committed" for each in store.follows):
            self.commit(store)
        if ended:
            self.a_request_ends(prompt)

    @rule(prompt=prompts)
    def a_request_leads_to_no_checkpoint(self, prompt: str) -> None:
        """Its chunks are the youngest there are, and of no use once it has ended."""
        store = self.begin(prompt, len(prompt), False)
        if store is not None:
            self.commit(store)
            self.a_request_ends(prompt)

    @rule(prompt=prompts)
    def a_request_keeps_every_boundary(self, prompt: str) -> None:
        """Checkpoints close to each other, so that they share pieces."""
        for end in range(1, len(prompt) + 1):
            self.a_request_stores_all_at_once(prompt[:end], False)

    @rule(
        prompt=st.text("ab", min_size=3, max_size=6), first=st.integers(1, 4), land=st.sampled_from([True, True, False])
    )
    def checkpoints_overlap(self, prompt: str, first: int, land: bool) -> None:
        """Each builds on pieces that the one before it is still writing."""
        if land:
            for store in list(self.stores):
                self.cancel(store)
                self.give_up(store)
        chunks = self.begin(prompt, len(prompt), False)
        if chunks is not None:
            self.commit(chunks)
        for end in range(first, len(prompt) + 1):
            self.begin(prompt[:end], 0, True)

    def begin(self, prompt: str, chunks: int, checkpoint: bool) -> Store | None:
        have = self.model.longest(prompt)
        deepest = self.model.cached(self.model.resumable(have) + "!")
        touch = self.pool.touch(None if deepest is None else deepest.number)
        stamp = self.model.touch(deepest)
        names = [prompt[:end] for end in range(len(have) + 1, len(prompt) + 1)][:chunks]
        last = names[-1] if names else have
        checkpoint = checkpoint and bool(last) and self.model.needs_checkpoint(len(last))
        writing = {node.name for store in self.stores for node in store.nodes if node.state == "writing"}
        if writing & {*names, last + "!"} or (checkpoint and self.model.cached(last + "!")):
            return None  # nothing is stored twice at once (rule 12)
        parent = self.model.cached(have)
        pin = None if parent is None else self.hold(parent)
        needs = self.needs(last) if checkpoint else []
        made = self.allocate(names, last + "!" if checkpoint else None, needs)
        if made is None:
            if pin is not None:
                self.let_go(pin, [parent])
            return None
        nodes, fresh = made
        used = {id(piece) for node in nodes for piece in node.pieces} - {id(piece) for piece in fresh}
        follows = [store for store in self.stores if any(id(piece) in used for piece in store.fresh)]
        store = Store(nodes, have, pin, parent, touch, stamp, fresh, follows)
        self.stores.append(store)
        return store

    def allocate(
        self, names: list[str], checkpoint: str | None, needs: list[PieceNeed]
    ) -> tuple[list[Node], list[Piece]] | None:
        """As a store does it: the chunks and their checkpoint, or neither; chunks alone, as far as there is room."""
        fresh: list[Piece] = []
        if checkpoint is not None:
            if not self.fits(len(names), needs):
                self.is_refused(len(names), needs)
                return None
            chunks, nodes, fresh = self.allocate_checkpoint(checkpoint, needs, len(names))
        else:
            room = (self.free + self.model.can_free()) // self.per_chunk if self.per_chunk else len(names)
            before = self.free
            chunks, nodes = self.pool.take(len(names)), []
            assert len(chunks) == min(room, len(names)), "room is miscounted (rule 4)"
            self.evict_for(len(chunks) * self.per_chunk - before, len(names) * self.per_chunk - before)
            if names and not chunks:
                return None
        for name, number in zip(names, chunks, strict=checkpoint is not None):
            blocks = self.pool.blocks_of([number])
            self.take(blocks)
            nodes.insert(len(nodes) - (checkpoint is not None), Node(number, name, blocks))
            self.memory.update(dict.fromkeys(blocks, "unfinished"))
        self.model.nodes += [node for node in nodes if node not in self.model.nodes]
        return nodes, fresh

    def fits(self, chunks: int, needs: list[PieceNeed]) -> bool:
        """Whether new chunks and pieces fit beside those that are there already and would be shared."""
        shared = [(need, self.model.shared(need.key)) for need in needs]
        missing = sum(need.num_blocks for need, piece in shared if piece is None)
        self.model.nodes.append(Node(-1, "to come", pieces=[piece for _, piece in shared if piece is not None]))
        room = self.free + self.model.can_free()
        self.model.nodes.pop()
        return room >= chunks * self.per_chunk + missing

    def is_refused(self, chunks: int, needs: list[PieceNeed]) -> None:
        """A checkpoint that finds no room changes nothing."""
        before = self.pool.statistics(), list(self.pool.soonest_evicted())
        assert self.pool.take(chunks, needs=needs) == []
        with pytest.raises(PoolExhausted) as refusal:
            self.pool.allocate(chunks, needs=needs)
        assert (refusal.value.wanted, refusal.value.available) == (chunks + 1, 0)
        assert before == (self.pool.statistics(), list(self.pool.soonest_evicted()))

    def allocate_checkpoint(
        self, name: str, needs: list[PieceNeed], chunks: int
    ) -> tuple[list[int], list[Node], list[Piece]]:
        pieces = [self.model.shared(need.key) for need in needs]
        node = Node(-1, name, pieces=[piece for piece in pieces if piece is not None])
        self.model.nodes.append(node)  # what it shares is protected from now on
        missing = sum(need.num_blocks for need, piece in zip(needs, pieces, strict=True) if piece is None)
        *above, node.number = self.pool.allocate(chunks, needs=needs)
        short = missing + chunks * self.per_chunk - self.free
        self.evict_for(short, short)
        made = self.pool.checkpoints.to_write(node.number)
        fresh = []
        for at, (need, piece) in enumerate(zip(needs, pieces, strict=True)):
            new = made[at]
            assert (new is None) == (piece is not None), f"piece {need.key} is copied twice, or not at all"
            if new is not None:
                assert len(new) == need.num_blocks
                self.take(new)
                self.memory.update(dict.fromkeys(new, "unfinished"))
                pieces[at] = Piece(need.key, new, node)
                fresh.append(pieces[at])
        node.pieces = [piece for piece in pieces if piece is not None]
        assert self.pool.checkpoints.pieces(node.number) == [piece.blocks for piece in node.pieces]
        self.widest = max(self.widest, sum(len(piece.blocks) for piece in node.pieces))
        return above, [node], fresh

    def take(self, blocks: tuple[int, ...]) -> None:
        """Blocks are handed out that are nobody's."""
        taken = set().union(*(self.model.blocks(state) for state in ("writing", "cached", "retired")))
        assert taken.isdisjoint(blocks) and len(set(blocks)) == len(blocks) and all(b < self.ready for b in blocks)

    def evict_for(self, short: int, wanted: int) -> None:
        """Nodes left for `short` blocks, where `wanted` were: were they the right ones, and no more than needed?"""
        before = self.model.in_state("cached")
        gone = [node for node in before if self.pool.find(self.key(node.name)) is None]
        able, useless = self.model.evictable(), self.model.useless()
        assert all(node in able for node in gone), "a pinned node left, or one above it (rules 2, 3)"
        assert all(each in gone or each.state != "cached" for node in gone for each in self.model.below(node)), (
            "a parent left before its child (rule 3)"
        )
        if any(node not in useless for node in gone):
            assert all(node in gone for node in useless), "a chunk of no use stayed while something else left (rule 9)"
        left = [node.touch for node in gone if node.is_checkpoint]
        stayed = [node.touch for node in able if node.is_checkpoint and node not in gone]
        assert not left or not stayed or max(left) <= min(stayed), "a younger checkpoint left before an older one"
        held = {block for node in self.model.nodes if node not in gone for each in node.pieces for block in each.blocks}
        held |= {block for piece in self.model.orphans for block in piece.blocks}
        freed = {block for node in gone for each in node.pieces for block in each.blocks} - held
        num_freed = len(freed) + sum(len(node.blocks) for node in gone)
        assert num_freed >= max(0, short), "more was handed out than there was"
        assert wanted > 0 or not gone, "something left while there was room"
        assert num_freed < max(1, wanted) + max(1, self.widest), "more left than was needed"
        self.model.leave(gone)

    @precondition(lambda self: any(store.phase == "writing" for store in self.stores))
    @rule(which=positions)
    def a_store_ends_well(self, which: int) -> None:
        store = pick([store for store in self.stores if store.phase == "writing"], which)
        if all(each.phase == "committed" for each in store.follows):
            self.commit(store)

    def commit(self, store: Store) -> None:
        """A shared piece that somebody else was to write is right by now: whoever builds on it waits for that."""
        for node in store.nodes:
            for block in node.blocks:
                self.memory[block] = (self.epoch, node.name)
        for piece in store.fresh:
            self.memory.update(dict.fromkeys(piece.blocks, (self.epoch, piece.key)))
        parent = self.pool.root if store.parent_node is None else store.parent_node.number
        self.pool.commit(
            [node.number for node in store.nodes], [self.key(node.name) for node in store.nodes], parent, store.touch
        )
        for node in store.nodes:
            self.model.commit(node, store.stamp)
        store.phase = "committed"
        self.stores.remove(store)
        if store.pin is not None:
            self.let_go(store.pin, [store.parent_node])

    @precondition(lambda self: any(store.phase == "writing" for store in self.stores))
    @rule(which=positions)
    def a_store_is_cancelled(self, which: int) -> None:
        """Its writer goes on; who built on it is cancelled too."""
        self.cancel(pick([store for store in self.stores if store.phase == "writing"], which))

    def cancel(self, store: Store) -> None:
        if store.phase != "writing":
            return
        store.phase = "failed"
        self.pool.retire([node.number for node in store.nodes])
        for node in store.nodes:
            node.state = "retired"
        for each in self.stores:
            if store in each.follows:
                self.cancel(each)

    @precondition(lambda self: self.stores)
    @rule(which=positions)
    def a_writer_gives_up(self, which: int) -> None:
        self.give_up(pick(self.stores, which))

    def give_up(self, store: Store) -> None:
        if store.phase == "writing":
            for each in list(self.stores):
                if store in each.follows:
                    self.cancel(each)
        store.phase = "failed"
        self.stores.remove(store)
        self.pool.abort([node.number for node in store.nodes])
        for node in store.nodes:
            node.state, node.has_writer = "retired", False
        self.model.free_unneeded()
        if store.pin is not None:
            self.let_go(store.pin, [store.parent_node])

    @rule(prompt=prompts)
    def a_request_ends(self, prompt: str) -> None:
        node = self.model.cached(self.model.longest(prompt))
        if node is not None:
            self.pool.resume_points.may_be_useless(node.number)
            node.over = True

    @rule(prompt=prompts)
    def a_prefix_is_used(self, prompt: str) -> None:
        name = self.model.resumable(self.model.longest(prompt))
        node = self.model.cached(name + "!") or self.model.cached(name)
        self.pool.touch(None if node is None else node.number)
        self.model.touch(node)

    # pins

    def hold(self, *nodes: Node) -> Any:
        for node in nodes:
            node.pins += 1
        return self.pool.pin(*(node.number for node in nodes))

    def let_go(self, pin: Any, held: list[Any]) -> None:
        self.pool.unpin(pin)
        for each in held:
            each.pins -= 1
            if isinstance(each, Node):
                each.over = True
        self.model.free_unneeded()
        with pytest.raises(MisuseError):
            self.pool.unpin(pin)  # exactly once (rule 2)

    @precondition(lambda self: todays(self.model.nodes))
    @rule(which=positions, also=positions)
    def nodes_are_pinned(self, which: int, also: int) -> None:
        nodes = [pick(todays(self.model.nodes), which), pick(todays(self.model.nodes), also)]
        self.pins.append((self.hold(*nodes), list(nodes)))

    @precondition(lambda self: todays(self.model.pieces()))
    @rule(which=positions, also=positions)
    def bytes_of_pieces_are_pinned(self, which: int, also: int) -> None:
        """As the device holds what a store reads: by its blocks, and not by the checkpoint they belong to."""
        pieces = [pick(todays(self.model.pieces()), which), pick(todays(self.model.pieces()), also)]
        pin = self.pool.pin(*(block for piece in pieces for block in piece.blocks))
        for piece in pieces:
            self.model.pin_piece(piece)
        self.pins.append((pin, list(pieces)))

    @precondition(lambda self: self.pins)
    @rule(which=positions)
    def a_pin_ends(self, which: int) -> None:
        self.let_go(*self.pins.pop(which % len(self.pins)))

    # events that take keys away or add room

    @precondition(lambda self: self.model.in_state("cached"))
    @rule(which=positions)
    def a_node_is_withdrawn(self, which: int) -> None:
        node = pick(sorted(self.model.in_state("cached"), key=lambda node: -len(node.name)), which)
        self.pool.withdraw(node.number)
        self.model.withdraw(node.name)
        self.cancel_orphans()

    @precondition(lambda self: len(self.model.in_state("cached")) > 4)
    @rule(sure=st.integers(0, 3))
    def everything_is_withdrawn(self, sure: int) -> None:
        if sure == 3:
            for store in list(self.stores):
                self.cancel(store)
            self.pool.reset()
            self.model.withdraw("")
            for each in (*self.model.nodes, *self.model.pieces()):
                each.is_old = True
            self.epoch += 1
            assert self.pool.statistics().cached == self.pool.statistics().writing == 0

    def cancel_orphans(self) -> None:
        for store in list(self.stores):
            if store.parent_node is not None and store.parent_node.state != "cached":
                self.cancel(store)

    @rule(more=st.integers(0, 4))
    def the_pool_grows(self, more: int) -> None:
        self.ready = min(self.ready + more, self.pool.capacity)
        self.pool.grow(self.ready)

    # invariants

    @staticmethod
    def key(name: str) -> bytes:
        return name.encode()

    @invariant()
    def the_pool_keeps_its_own_rules(self) -> None:
        self.pool.check_valid()

    @invariant()
    def blocks_are_counted_by_state(self) -> None:
        now = self.pool.statistics()
        for state, blocks in (("writing", now.writing), ("cached", now.cached), ("retired", now.retired)):
            assert blocks == len(self.model.blocks(state)), f"{state} blocks"
        assert now.free == self.free and now.ready == self.ready  # rule 1

    @invariant()
    def the_room_is_what_eviction_can_free(self) -> None:
        blocks = self.free + self.model.can_free()
        assert self.pool.least_available <= self.pool.num_available == blocks

    @invariant()
    def pins_hold_no_more_than_is_said(self) -> None:
        now = self.pool.statistics()
        assert now.cached - self.model.can_free() <= now.protected <= now.cached
        assert self.pins or self.stores or not now.protected

    @invariant()
    def found_chunks_are_complete(self) -> None:
        for node in self.model.in_state("cached"):
            assert self.pool.find(self.key(node.name)) == node.number
            assert self.pool.state(node.number) is BlockState.CACHED
            assert (node.number in self.pool.checkpoints) == node.is_checkpoint
            assert all(self.memory[block] == (self.epoch, node.name) for block in node.blocks)
            for piece in node.pieces:
                assert {self.memory[block] for block in piece.blocks} == {(self.epoch, piece.key)}, "torn (rule 9)"
        for node in self.model.in_state("writing", "retired"):
            is_known = not node.is_old or node.pins or node.has_writer  # else its number may be another node's
            assert not is_known or self.pool.key(node.number) is None

    @invariant()
    def pinned_chunks_keep_their_bytes(self) -> None:
        for _, held in self.pins:
            for each in held:
                if isinstance(each, Piece) and each.writer.ever_cached:
                    assert all(self.memory[block][1] == each.key for block in each.blocks)
                elif isinstance(each, Node) and each.ever_cached:
                    assert all(self.memory[block][1] == each.name for block in each.blocks)
                    assert all(self.memory[block][1] == p.key for p in each.pieces for block in p.blocks)

    @invariant()
    def the_nearest_checkpoint_is_found(self) -> None:
        for node in self.model.in_state("cached"):
            if not node.is_checkpoint:
                found = self.pool.resume_points.nearest(node.number)
                name = self.model.resumable(node.name)
                assert found == (self.model.cached(name).number if name else self.pool.root)
                assert self.pool.depth(node.number) == len(node.name)

    @invariant()
    def the_log_lists_the_boundaries_that_can_be_hit(self) -> None:
        names = {node.name for node in self.model.in_state("cached") if not node.is_checkpoint}
        could = {name for name in names if not self.model.needs_checkpoint(len(name)) or self.model.cached(name + "!")}
        assert self.listener.hear(self.pool.take_events()) == could

    @invariant()
    def all_that_may_leave_is_in_the_order(self) -> None:
        order = list(self.pool.soonest_evicted())
        assert set(order) == {node.number for node in self.model.evictable()} and len(set(order)) == len(order)


class LongSearch(CheckpointMachine):
    """The same machine, for which `make test` has no time."""


TestCheckpoints = CheckpointMachine.TestCase
TestCheckpoints.settings = settings(max_examples=150)
TestCheckpointsForLong = pytest.mark.slow(LongSearch.TestCase)
TestCheckpointsForLong.settings = settings(max_examples=600)
