"""Slab against a dict from slots to what was written last.

Files are damaged, swapped, truncated and reopened in between, and the disk fails while a reset is kept or a process
ends. Whatever happens, what is served is what was written under that label, and is not below the floor: at once in this
process, and in later ones once the floor is kept. What was written and left alone is served, but not by the process
that follows a reset.
"""

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.slab import slab as slab_module
from cpu_prefix_cache.slab.folder import Folder
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.slab.tier import RankPart

SLOTS = 6
BLOCK = 4096
NAMED = Namespace((("model", "machine"),))
runs = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)
letters = st.sampled_from("abc")
slot_numbers = st.integers(0, SLOTS - 1)


@contextmanager
def failing(call: str, number: int) -> Iterator[None]:
    """A call to the system that fails."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, "the disk is read-only" if number == errno.EROFS else "the disk fails")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, fails)
        yield


@contextmanager
def read_only() -> Iterator[None]:
    with failing("fsync", errno.EROFS), failing("unlink", errno.EROFS):
        yield


@dataclass
class Written:
    """The last write to a slot. `intact`: nothing has happened to it since."""

    label: Label
    byte: int
    intact: bool = True


class SlabMachine(RuleBasedStateMachine):
    @initialize(per_call=st.sampled_from([BLOCK, 2 * BLOCK, 64 * BLOCK]))
    def build(self, per_call: int) -> None:
        slab_module.CALL_BYTES = per_call
        self.path = tempfile.mkdtemp()
        self.written: dict[int, Written] = {}
        self.history: list[tuple[int, Written]] = []  # what slots had before
        self.floor = 0
        self.kept = 0  # the floor that is on disk
        self.count = 0
        self.at_opening = 0  # the floor
        self.open()

    def open(self) -> None:
        self.slab = Slab(Folder(FileTier(self.path, 1, keep_others=True), NAMED, RankPart(SLOTS), BLOCK))
        assert all(each.label.generation < self.slab.next_generation for each in self.written.values())
        self.first = self.slab.next_generation

    def teardown(self) -> None:
        slab_module.CALL_BYTES = 8 << 20
        if hasattr(self, "slab"):
            self.slab.close()
            shutil.rmtree(self.path)

    @property
    def blocks(self) -> str:
        return os.path.join(self.slab.folder, "blocks")

    # actions of a decider

    @rule(slots=runs, letter=letters, block=st.sampled_from([CHUNK, 0, 1]))
    def write(self, slots: list[int], letter: str, block: int) -> None:
        self.count += 1
        labels = [Label(letter.encode() * 32, b"", 0, at, block, self.first + self.count) for at in range(len(slots))]
        for slot, label in zip(slots, labels, strict=True):
            if slot in self.written:
                self.history.append((slot, self.written[slot]))
            self.written[slot] = Written(label, (self.count * 7 + label.place) % 255)
        views = [self.page(self.written[slot].byte) for slot in slots]
        self.slab.write(slots, views, labels)
        self.kept = self.floor

    @precondition(lambda self: self.floor > self.kept)
    @rule(slots=runs)
    def write_before_the_floor_is_kept(self, slots: list[int]) -> None:
        """It fails if the floor cannot be kept, and changes nothing."""
        labels = [Label(b"k", b"", 0, 0, CHUNK, self.first)] * len(slots)
        with read_only(), pytest.raises(OSError, match="read-only"):
            self.slab.write(slots, [self.page(255)] * len(slots), labels)

    @rule(slots=runs)
    def read(self, slots: list[int]) -> None:
        slots = [slot for slot in slots if slot in self.written]
        views = [self.page(255) for _ in slots]
        refused = self.slab.read(slots, views, [self.written[slot].label for slot in slots])
        for slot, view in zip(slots, views, strict=True):
            written = self.written[slot]
            if slot in refused:
                assert not written.intact or written.label.generation < self.floor, "what is there is served"
                written.intact = False
            else:
                assert bytes(view) == bytes([written.byte]) * BLOCK
                assert written.label.generation >= self.floor

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def read_what_was_written_over(self, data: st.DataObject) -> None:
        """It is refused, unless somebody has put an older copy of the slot in place."""
        slot, before = data.draw(st.sampled_from(self.history))
        view = self.page(255)
        if self.slab.read([slot], [view], [before.label]) == []:
            assert not self.written[slot].intact and before.label.generation >= self.floor
            assert bytes(view) == bytes([before.byte]) * BLOCK

    @rule(slot=slot_numbers, letter=letters)
    def read_another_key(self, slot: int, letter: str) -> None:
        """It is refused, and its record cleared, as the decider was wrong about the slot."""
        if slot not in self.written:
            assert self.slab.read([slot], [self.page(255)], [Label(b"k", b"", 0, 0, CHUNK, self.first)]) == [slot]
            return
        label = self.written[slot].label._replace(key=letter.encode() * 31)
        assert self.slab.read([slot], [self.page(255)], [label]) == [slot]
        self.written[slot].intact = False

    @rule(ahead=st.integers(-3, 2))
    def advance(self, ahead: int) -> None:
        floor = max(0, self.first + self.count + ahead)
        self.slab.advance(floor)
        self.floor = max(self.floor, floor)
        assert self.slab.floor == self.floor

    @rule()
    def reset(self) -> None:
        """As the decider does: the next range of generations, from which on records are served."""
        self.first, self.count = ((self.first + self.count >> 32) + 1) << 32, 0
        self.slab.advance(self.first)
        self.floor = max(self.floor, self.first)

    @rule()
    def keep(self) -> None:
        self.slab.keep()
        self.kept = self.floor

    # events that befall it

    def follow(self) -> None:
        """The next process, after a reset or after none that was kept."""
        was_reset = self.kept > self.at_opening
        self.open()
        self.count = 0
        self.floor = self.kept = self.at_opening = self.first if was_reset else self.kept
        assert self.slab.floor == self.floor

    @rule()
    def reopen(self) -> None:
        self.slab.close()
        self.kept = self.floor
        self.follow()

    @rule()
    def end_on_a_read_only_disk(self) -> None:
        """The next process goes by the floor that was kept last."""
        with read_only():
            self.slab.close()
        self.follow()

    @precondition(lambda self: self.floor > self.kept)
    @rule()
    def end_on_a_full_disk(self) -> None:
        """The floor cannot be kept, but a file can be deleted: the next process begins anew."""
        with failing("fsync", errno.ENOSPC):
            self.slab.close()
        self.written, self.history = {}, []
        self.open()
        self.floor = 0
        self.kept = 0
        self.at_opening = 0
        self.count = 0
        assert self.slab.floor == 0 and not any(map(self.slab.record, range(SLOTS)))

    @rule(slot=slot_numbers, at=st.integers(0, BLOCK - 1), bit=st.integers(0, 7))
    def flip_a_bit(self, slot: int, at: int, bit: int) -> None:
        self.flip(self.blocks, slot * BLOCK + at, bit)
        self.spoil(slot)

    @rule(slot=slot_numbers, at=st.integers(0, 127), bit=st.integers(0, 7))
    def flip_a_bit_of_a_record(self, slot: int, at: int, bit: int) -> None:
        self.flip(os.path.join(self.slab.folder, "records"), slot * 128 + at, bit)
        self.spoil(slot)

    @rule(slot=slot_numbers, rest=st.integers(0, BLOCK - 1), reopens=st.booleans())
    def truncate(self, slot: int, rest: int, reopens: bool) -> None:
        os.truncate(self.blocks, slot * BLOCK + rest)
        for each in range(slot, SLOTS):
            self.spoil(each)
        if reopens:
            self.reopen()

    @rule(one=slot_numbers, other=slot_numbers)
    def swap_bytes(self, one: int, other: int) -> None:
        self.swap(self.blocks, BLOCK, one, other)

    @rule(one=slot_numbers, other=slot_numbers)
    def swap_records(self, one: int, other: int) -> None:
        self.swap(os.path.join(self.slab.folder, "records"), 128, one, other)

    @rule(one=slot_numbers, other=slot_numbers)
    def swap_both(self, one: int, other: int) -> None:
        self.swap_bytes(one, other)
        self.swap_records(one, other)

    @invariant()
    def a_restart_finds_intact_slots(self) -> None:
        for slot in range(SLOTS):
            written, record = self.written.get(slot), self.slab.record(slot)
            if written is not None and written.intact and written.label.generation >= self.floor:
                assert record is not None and record.label == written.label
            elif record is not None:
                assert record.label.generation >= self.floor
                had = [each.label for at, each in self.history if at == slot]
                assert written is not None and record.label in [written.label, *had]

    # its tools

    def page(self, byte: int) -> memoryview:
        memory = mmap.mmap(-1, BLOCK)
        memory[:] = bytes([byte]) * BLOCK
        return memoryview(memory)

    def spoil(self, slot: int) -> None:
        if slot in self.written:
            self.written[slot].intact = False

    def flip(self, path: str, at: int, bit: int) -> None:
        with open(path, "r+b") as file:
            file.seek(at)
            byte = (file.read(1) or b"\0")[0]  # behind a truncated end
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))

    def swap(self, path: str, width: int, one: int, other: int) -> None:
        with open(path, "r+b") as file:
            found = []
            for slot in (one, other):
                file.seek(slot * width)
                found.append(file.read(width).ljust(width, b"\0"))
            for slot, data in zip((other, one), found, strict=True):
                file.seek(slot * width)
                file.write(data)
        if one != other:
            self.spoil(one)
            self.spoil(other)


TestSlabMachine = pytest.mark.filterwarnings("ignore")(SlabMachine.TestCase)
TestSlabMachine.settings = settings(max_examples=60, stateful_step_count=30)
