"""Slots of a slab from before a restart: read once, and reported in portions, the youngest last.

A thread reads the magic and the generation of every record and orders them, RUN_RECORDS at a time: to sort all at once
would keep Python's lock for tenths of a second. These are merged as they are reported. Each portion then parses its
records as they are by now, so what was written over since is not in it.

A node, which is a chunk or a piece of a checkpoint, is the records of one generation with the same key and block. It
is found if all its slots are there. Records of one generation are never split between portions.
"""

import heapq
import logging
import threading
from array import array
from collections.abc import Iterator, Sequence

from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.messages.tier import Found, TierPlan, TierReport
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab import records
from cpu_prefix_cache.slab.records import GENERATION_AT, SIZE, Record
from cpu_prefix_cache.slab.slab import Slab

logger = logging.getLogger(__name__)

PORTION_RECORDS = 64  # 1.2 ms of the decider where no two slots are neighbours (of a million), 0.2 ms where all are

RUN_RECORDS = 4096  # one millisecond

Shape = list[tuple[int, ...]]  # group and place of every slot of a node


class RestartScan:
    """Scan of one slab, as it was opened: the source of a RankTier, whose thread calls it. The number of a portion is 1
    or more; 0: there is none yet.
    """

    def __init__(self, slab: Slab, pieces: Sequence[Piece]) -> None:
        self._slab, self._first_new = slab, slab.next_generation
        self._chunk: Shape = [
            (group, place) for group, piece in enumerate(pieces) if piece.in_chunk for place in range(piece.host_blocks)
        ]
        self._pieces: list[Shape] = [
            [] if piece.in_chunk else [(group, place) for place in range(piece.host_blocks)]
            for group, piece in enumerate(pieces)
        ]
        self._ordered: Iterator[tuple[int, int]] = iter(())  # generations and slots that are not reported yet
        self._next: tuple[int, int] | None = None  # the first of them
        self._number = self._taken = 0  # portions
        self._found: tuple[Found, ...] = ()  # the last portion
        self._thread = threading.Thread(target=self._order, daemon=True, name="slab-scan")
        self._thread.start()

    def begin(self, plan: TierPlan) -> None:
        """Portions up to `plan.taken` are taken in."""
        self._taken = plan.taken

    def told(self, report: TierReport) -> TierReport:
        if self._taken >= self._number:
            self._found = ()
            if self.is_ordered and not self.is_over:
                self._found = self.portion(PORTION_RECORDS)
                self._number += 1
        return report._replace(portion=self._number, found=self._found, is_scanned=self.is_over)

    @property
    def is_busy(self) -> bool:
        return False  # whoever waits for the scan steps until it is over

    @property
    def is_ordered(self) -> bool:
        """Whether there are portions yet."""
        return not self._thread.is_alive()

    @property
    def is_over(self) -> bool:
        """Whether there is no other portion."""
        return self.is_ordered and self._next is None

    def portion(self, num_records: int) -> tuple[Found, ...]:
        """Nodes of the next records: so many, and the rest of the last one's generation. Once `is_ordered`."""
        slots, last = list[int](), 0
        while self._next is not None and (len(slots) < num_records or self._next[0] == last):
            last, slot = self._next
            slots.append(slot)
            self._next = next(self._ordered, None)
        return tuple(self._nodes(self._read(slots)))

    def close(self) -> None:
        """Wait until the records are ordered."""
        self._thread.join()

    def _order(self) -> None:
        try:
            self._ordered = heapq.merge(*self._runs())
            self._next = next(self._ordered, None)
        except Exception:  # then nothing is found, and everything is overwritten in time
            logger.exception("what is in %s from before cannot be read", self._slab.folder)

    def _runs(self) -> list[Iterator[tuple[int, int]]]:
        """Generations and slots of what is from before, some records at a time, each in order."""
        whole, runs = memoryview(self._slab.records.memory), list[Iterator[tuple[int, int]]]()
        magics, generations = whole.cast("I")[:: SIZE // 4], whole.cast("Q")[GENERATION_AT // 8 :: SIZE // 8]
        for begin in range(0, self._slab.slots, RUN_RECORDS):
            part = slice(begin, begin + RUN_RECORDS)
            numbered = zip(generations[part].tolist(), range(begin, self._slab.slots), strict=False)
            old = sorted(
                each
                for each, magic in zip(numbered, magics[part].tolist(), strict=True)
                if magic == records.MAGIC and self._slab.floor <= each[0] < self._first_new
            )
            columns = array("Q", [each for each, _ in old]), array("L", [slot for _, slot in old])
            runs.append(zip(*columns, strict=True))
        return runs

    def _read(self, slots: list[int]) -> list[Record]:
        """Their records that are whole, and from before."""
        found, first_new = map(self._slab.record, slots), self._first_new
        return [record for record in found if record is not None and record.label.generation < first_new]

    def _nodes(self, taken: list[Record]) -> Iterator[Found]:
        nodes: dict[tuple[int, bytes, int, int], list[Record]] = {}  # in the order of generations
        for record in taken:
            key, _, group, _, block, generation = record.label
            node = generation, key, block, CHUNK if block == CHUNK else group
            if (there := nodes.get(node)) is None:
                nodes[node] = [record]
            else:
                there.append(record)
        for records_of in nodes.values():
            if len(records_of) > 1:
                records_of.sort(key=_place_of)
            first = records_of[0].label
            if [_place_of(record) for record in records_of] == self._shape(first):
                yield Found(first, tuple([record.slot for record in records_of]))

    def _shape(self, label: Label) -> Shape:
        """The slots that a node with this label has."""
        if label.block == CHUNK:
            return self._chunk
        return self._pieces[label.group] if label.group < len(self._pieces) else []


def _place_of(record: Record) -> tuple[int, ...]:
    """Group and place."""
    return record.label[2:4]
