"""The tier of one rank as a dict: the contract of slab.py for files, of keyed_values.py and asker.py for a store.

Bytes are served under exactly their label, or refused. The slots of files are reported in portions when they are
opened, in the order of generations; a store is queried.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cpu_prefix_cache.deciding import HybridChunkPlanner
from cpu_prefix_cache.messages.generations import RANGE
from cpu_prefix_cache.messages.plan import CHUNK, Direction, Label, TransferPlan
from cpu_prefix_cache.messages.tier import Ask, Found, TierPlan, Told

Slots = tuple[int, ...]
Name = tuple[bytes, int, int, int]  # of a value in a store: key, group, place, block


@dataclass(eq=False)
class Record:
    label: Label
    content: Any
    is_intact: bool = True


class RankSlots:
    """The tier of one rank: its files, and its reports of them since it was opened."""

    def __init__(self, planner: HybridChunkPlanner) -> None:
        pieces = list(enumerate(planner.pieces))
        self.shapes = {  # by group: groups and places of a node's slots
            group: [(group, place) for place in range(piece.host_blocks)] for group, piece in pieces
        }
        self.shapes[CHUNK] = [each for group, piece in pieces if piece.in_chunk for each in self.shapes[group]]
        self.records: dict[int, Record] = {}
        self.floor = self.last = 0
        self.open(portion=1, scans=False)

    def open(self, *, portion: int, scans: bool) -> None:
        self.last += 1
        self.next_generation = self.last * RANGE
        self.lost = {slot for slot, record in self.records.items() if not record.is_intact}
        self.portion_size = portion
        self.number = 0
        self.taken = 0
        self.old = sorted(
            {record.label.generation for record in self.records.values() if record.label.generation >= self.floor}
        )
        self.scans = scans
        self.found: tuple[Found, ...] = ()

    def advance(self, plan: TierPlan) -> None:
        floor = max(plan.first_generation, self.next_generation if plan.step.epoch else 0)
        self.floor = max(self.floor, floor)
        self.last = max(self.last, floor // RANGE)

    def portion(self) -> tuple[int, tuple[Found, ...], bool]:
        if not self.scans:
            return 0, (), True
        if self.taken >= self.number and self.old:
            generations, self.old = self.old[: self.portion_size], self.old[self.portion_size :]
            self.number += 1
            self.found = tuple(node for each in generations for node in self.nodes(each))
        return self.number, self.found, not self.old

    def nodes(self, generation: int) -> Iterator[Found]:
        """Chunks and pieces of this generation of which all slots are here."""
        slots: dict[tuple[bytes, int, int], dict[tuple[int, int], int]] = {}
        for slot, record in self.records.items():
            label = record.label
            if label.generation == generation:
                group = CHUNK if label.block == CHUNK else label.group
                slots.setdefault((label.key, label.block, group), {})[label.group, label.place] = slot
        for (_, _, group), places in slots.items():
            if sorted(places) == self.shapes[group]:
                ordered = tuple(places[each] for each in self.shapes[group])
                yield Found(self.records[ordered[0]].label, ordered)

    def read(self, slot: int, label: Label) -> Any:
        """Contents of the slot; None: refused, and then its record is cleared."""
        record = self.records.get(slot)
        is_served = record is not None and record.is_intact and label.generation >= self.floor
        if is_served and record.label._replace(parent=label.parent) == label:
            return record.content
        self.records.pop(slot, None)
        self.lost.add(slot)
        return None

    def write(self, slot: int, label: Label, content: Any) -> None:
        self.records[slot] = Record(label, content)
        self.last = max(self.last, label.generation // RANGE)
        self.lost.discard(slot)


class RankStore:
    """The store as one rank sees it, with others: a value under the name that its label gives it, in any slot.

    The store forgets, and others put things there, until a reset: then nobody else knows the names.
    """

    next_generation = RANGE

    def __init__(self, planner: HybridChunkPlanner) -> None:
        self.planner = planner
        self.records: dict[Name, Record] = {}
        self.had: set[Name] = set()  # at some time
        self.lost: set[Any] = set()
        self.floor = self.taken = 0

    def open(self, **_: Any) -> None:
        """Values stored under names that nobody knows are lost."""
        if self.floor:
            self.forget_all()
        self.floor = 0

    def forget_all(self) -> None:
        self.records, self.had = {}, set()

    def advance(self, plan: TierPlan) -> None:
        floor = max(plan.first_generation, self.next_generation if plan.step.epoch else 0)
        if floor > self.floor:
            self.forget_all()
            self.floor = floor

    def portion(self) -> tuple[int, tuple[Found, ...], bool]:
        return 0, (), True

    def read(self, slot: int, label: Label) -> Any:
        """The value under that name; None: refused, and then it is deleted."""
        record = self.records.get(_name(label))
        if record is not None and record.is_intact and label.generation >= self.floor:
            return record.content
        self.records.pop(_name(label), None)
        return None

    def write(self, slot: int, label: Label, content: Any) -> None:
        if label.generation >= self.floor:
            self.records[_name(label)] = Record(label, content)
            self.had.add(_name(label))

    def others_write(self, label: Label, content: Any) -> None:
        if not self.floor:
            self.write(0, label, content)

    def answer(self, ask: Ask) -> Told:
        """Searches piece by piece in all that is there."""
        chunks = 0
        for key in ask.keys:
            if not all(
                self.has(key, group, CHUNK) for group, piece in enumerate(self.planner.pieces) if piece.in_chunk
            ):
                break
            chunks += 1
        there = {(key, group, block) for key, group, _, block in self.records if block != CHUNK}
        pieces = (each for each in there if each[0] in ask.keys[:chunks] and self.has(*each))
        return Told(ask.id, True, chunks, tuple(sorted(pieces)))

    def has(self, key: bytes, group: int, block: int) -> bool:
        places = range(self.planner.pieces[group].host_blocks)
        return all((key, group, place, block) in self.records for place in places)


def _name(label: Label) -> Name:
    return label.key, label.group, label.place, label.block


def carry_out(rank: RankSlots | RankStore, transfer: TransferPlan, host: dict[int, Any], well: bool = True) -> Slots:
    """Copy between the blocks of the host and a tier: the slots of a load that are refused. Not `well`: half of it."""
    places = [
        place
        for copy in transfer.copies
        for place in zip(copy.host_blocks, copy.device_blocks, copy.labels, strict=True)
    ]
    refused = []
    for slot, block, label in places if well else places[: len(places) // 2]:
        if transfer.direction is Direction.STORE:
            rank.write(slot, label, host.get(block))
        elif (content := rank.read(slot, label)) is not None:
            host[block] = content
        else:
            host[block] = "anything"
            refused.append(slot)
    return tuple(refused)
