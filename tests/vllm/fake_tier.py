"""The tier of a pretended rank (`engine.py`): its slots hold what its host blocks held, with their labels.

It reads a source when it gets a plan and again just before it reports: both must be the same. It writes at the one
moment or the other. Reads come late, fail, and now and then a slot holds something else, which a rank refuses.
"""

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from cpu_prefix_cache.deciding import Direction, RankReport
from cpu_prefix_cache.messages.tier import TierPlan, TierReport

SPOILT = "spoilt"
OPENING_REPORTS = 5


class Slot(NamedTuple):
    label: object
    content: object


@dataclass
class Move:
    plan: object
    epoch: int
    sources: list[object]
    is_early: bool
    fails: bool
    steps_left: int
    refused: tuple[int, ...] = ()

    @property
    def is_store(self) -> bool:
        return self.plan.direction is Direction.STORE

    def triples(self):
        """Slot, host block and label."""
        for copy in self.plan.copies:
            yield from zip(copy.host_blocks, copy.device_blocks, copy.labels, strict=True)


@dataclass
class FakeTier:
    rank: int
    random: random.Random
    host: dict[int, object]
    failure_rate: float = 0.0
    refusal_rate: float = 0.0
    slowest: int = 6
    slots: dict[int, Slot] = field(default_factory=dict)
    moves: dict[int, Move] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    refusals: dict[int, tuple[int, ...]] = field(default_factory=dict)
    generations: set[int] = field(default_factory=set)  # that were given
    reports: int = 0
    first_generation: int = 0

    def run(self, plan: TierPlan) -> None:
        step = plan.step
        self.first_generation = plan.first_generation
        for ended in (self.done, self.failed):
            ended.difference_update([id for id in ended if id < step.resolved_below or id in step.resolved])
        self.refusals = {id: slots for id, slots in self.refusals.items() if id in self.done}
        for transfer in step.transfers:
            self._begin(transfer, step.epoch)

    def report(self) -> TierReport:
        """Let time pass: finish what is due."""
        for id, move in list(self.moves.items()):
            move.steps_left -= 1
            if move.steps_left < 0:
                del self.moves[id]
                self._end(id, move)
        self.reports += 1
        refused = tuple(self.refusals.items())
        transfers = RankReport(self.rank, frozenset(self.done), frozenset(self.failed), unfit=refused)
        return TierReport(transfers, is_scanned=self.reports > OPENING_REPORTS)

    @property
    def written_by_loads(self) -> set[int]:
        """Host blocks."""
        return {block for move in self.moves.values() if not move.is_store for _, block, _ in move.triples()}

    @property
    def read_by_stores(self) -> set[int]:
        return {block for move in self.moves.values() if move.is_store for _, block, _ in move.triples()}

    def _begin(self, transfer: object, epoch: int) -> None:
        is_early, fails = self.random.random() < 0.5, transfer.failed or self.random.random() < self.failure_rate
        move = Move(transfer, epoch, [], is_early, fails, self.random.randrange(self.slowest))
        self._check_apart(move)
        move.sources = self._sources(move)
        if move.is_store:
            self._check_new(move)
        self.moves[transfer.id] = move
        if is_early:
            self._write(move)

    def _check_apart(self, new: Move) -> None:
        """No slot is written that another transfer uses, none is read that another writes; host blocks alike."""
        for other in self.moves.values():
            for at in (0, 1):
                here, there = ({each[at] for each in move.triples()} for move in (new, other))
                both_read = new.is_store is other.is_store and at == (1 if new.is_store else 0)
                assert both_read or here.isdisjoint(there), "used while it is written"

    def _check_new(self, move: Move) -> None:
        """A generation is never given twice: to one chunk, with all of its slots."""
        given = {label.generation for _, _, label in move.triples()}
        assert not given & self.generations, "a generation was given twice"
        assert all(generation >= self.first_generation for generation in given)
        self.generations |= given

    def _sources(self, move: Move) -> list[object]:
        if move.is_store:
            return [self.host[block] for _, block, _ in move.triples()]
        return [self.slots.get(slot) for slot, _, _ in move.triples()]

    def _end(self, id: int, move: Move) -> None:
        assert self._sources(move) == move.sources or (move.is_store and move.is_early), "a source has changed"
        if not move.is_early:
            self._write(move)
        (self.failed if move.fails else self.done).add(id)
        if move.refused and not move.fails:
            self.refusals[id] = move.refused

    def _write(self, move: Move) -> None:
        if move.fails:
            return
        refused = []
        for (slot, block, label), source in zip(move.triples(), move.sources, strict=True):
            if move.is_store:
                self.slots[slot] = Slot(label, source)
            elif self._fits(source, label) and self.random.random() >= self.refusal_rate:
                self.host[block] = source.content
            else:
                self.host[block] = SPOILT, move.epoch
                refused.append(slot)
        move.refused = tuple(refused)

    def _fits(self, source: Slot | None, label: object) -> bool:
        if source is None or label.generation < self.first_generation:
            return False
        return source.label.key == label.key and source.label[2:] == label[2:]  # all but the parent
