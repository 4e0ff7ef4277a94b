"""A load and the stores that save what it overwrites: both go in portions, so that both directions move.

    a store    saves device blocks that the load overwrites; in an *exchange* in host blocks that the load has read
    the load   overwrites device blocks that stores have saved, and reads host blocks that they may overwrite later

Portion n of the load is its n-th run of pieces. Portion n of a store are its pieces of which that run is the first to
overwrite a device block; pieces of which the load overwrites nothing come last.

    stores   0   1   2   3   4
    load         0   1   2   3

Portion n of the load waits for portions 0 to n of the stores, and one of a store for those of the load that read what
it overwrites. The *lag* is how many pieces of the load lie between, at least. A run is half of it, so portion n of a
store waits for n - 2 of the load at most, and both directions move; if the lag is 1, for n - 1, and they take turns.
The first of those that are left never waits for another. Where no store overwrites what the load reads, a run is what
the copier takes at once, or has PORTION_BYTES. What no store touches goes as one portion: each costs a thread Python's
lock several times, and loads of which a fifth is saved reached 20 GB/s in a busy engine (one H200).

To wait is to wait for an end, well or not. A portion that fails ends its own transfer: what is left of that is not
submitted.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event, Passed, raise_failure
from cpu_prefix_cache.copier.record import CopyRecord, await_ended
from cpu_prefix_cache.copier.shared_events import Shared
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, TransferPlan

PORTION_BYTES = 64 << 20  # 1.2 ms of a link of 55 GB/s; a load that is smaller begins when its stores have ended


def exchanges(transfers: Sequence[TransferPlan], knows_pieces: bool) -> dict[int, list[int]]:
    """The loads of a plan that go in portions with stores of it, each with these stores, by their ids. A copier that
    does not know pieces can do so only in an exchange, which fails then.
    """
    named = [load for load in transfers if load.after and load.direction is Direction.LOAD]
    saved_by = {store: load for load in named if load.copies and not load.failed for store in load.after}
    found = defaultdict[int, list[int]](list)
    for store in transfers:
        load = saved_by.get(store.id)
        if load is None or not store.copies or store.direction is not Direction.STORE:
            continue
        if load.id in store.after or (knows_pieces and _go_in_portions(load, store)):
            found[load.id].append(store.id)
    return found


def _go_in_portions(load: TransferPlan, store: TransferPlan) -> bool:
    """Whether that pays for a store that overwrites nothing which the load reads, and can be had."""
    groups = {copy.group for copy in (*load.copies, *store.copies)}
    is_one = len(load.copies) == len(store.copies) == len(groups) == 1
    is_free = not (load.holds_compute or store.holds_compute or store.after)
    return is_one and load.num_bytes > PORTION_BYTES and is_free


@dataclass(slots=True, eq=False)
class Whole(Event):
    """A transfer that goes in portions, and the event of its end. It has failed if one of them has."""

    transfer: TransferPlan
    left: deque["Portion"] = field(default_factory=deque)  # portions that are not known to have ended
    error: BaseException | None = None  # why one of them failed
    found: list[int] = field(default_factory=list)  # host blocks of pieces that did not fit

    def unfit(self) -> Sequence[int]:
        return self.found

    def passed(self) -> bool:
        while self.left and self.left[0].passed():
            self.found += () if self.error is not None else self.left[0].end.unfit()
            self.left.popleft()  # last: whatever interrupts this, it is asked again
        if self.left:
            return False
        raise_failure(self.error)
        return True

    def until_passed(self) -> None:
        while not self.passed():  # or another thread asks a portion just then
            for portion in list(self.left):
                portion.until_passed()


@dataclass(slots=True, eq=False)
class Portion(Event):
    """Some pieces of a transfer. As an event it is passed when it has ended, well or not, and raises nothing."""

    whole: Whole
    number: int
    copy: GroupCopy
    before: list["Portion"]  # which must have ended, beside those that earlier portions of the transfer waited for
    over: threading.Event = field(default_factory=threading.Event)  # set when it is submitted or never will be
    end: Event = field(default_factory=Passed)  # the one that is submitted is Shared

    @property
    def reads(self) -> Event:
        """Waits until it is submitted, or never will be."""
        self.over.wait()
        return self.end.reads

    def submit(self, copier: Copier, after: Event) -> None:
        try:
            self.end = Shared(copier.submit_part(self.whole.transfer.direction, self.copy, after))
        except BaseException as error:
            self.whole.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self.over.set()

    def give_up(self) -> None:
        """It is never submitted, unless it has been."""
        if not self.over.is_set():
            self.whole.error = self.whole.error or RuntimeError("not all of it was submitted")
            self.over.set()

    def passed(self) -> bool:
        try:
            return self.over.is_set() and self.end.passed()
        except Exception as error:
            self.whole.error = self.whole.error or error
            return True

    def until_passed(self) -> None:
        self.over.wait()
        try:
            self.end.until_passed()
        except Exception as error:
            self.whole.error = self.whole.error or error


class Exchange:
    """A load and its stores. The load waits for the transfers `before` as well.

    They fail with MisuseError for ids that the copier refuses, for more than one group, and where the load would
    overwrite what a store saves before it has read what that store overwrites.
    """

    def __init__(
        self,
        load: CopyRecord,
        stores: Iterable[CopyRecord],
        before: Sequence[CopyRecord],
        copier: Copier,
    ) -> None:
        self._copies = {copy.transfer.id: copy for copy in (load, *stores)}
        self._wholes = [Whole(copy.transfer) for copy in self._copies.values()]
        self._before, self._copier = before, copier
        self._portions: list[Portion] = []
        self._cutting = threading.Lock()

    def submit(self, *directions: Direction) -> None:
        """Submit all portions of these directions. Called once for each direction, by the thread that submits it. What
        is no Exception is raised, and then all has failed that was left."""
        wholes = [whole for whole in self._wholes if whole.transfer.direction in directions]
        mine = list[Portion]()
        try:
            with self._cutting:
                self._portions = self._portions or cut(*self._wholes, copier=self._copier)
            mine = [portion for portion in self._portions if portion.whole.transfer.direction in directions]
            for portion in mine:
                portion.whole.left.append(portion)
            # stores do not pause for the load that they exchange blocks with, even while it is submitted
            with self._copier.awaiting_stores() if Direction.LOAD in directions else nullcontext():
                if Direction.LOAD in directions:
                    await_ended(self._before)
                for portion in mine:
                    self._submit(portion)
        except BaseException as error:
            for whole in wholes:
                whole.error = whole.error or error
            if not isinstance(error, Exception):
                raise
        finally:
            for portion in mine:
                portion.give_up()
            for whole in wholes:
                self._copies[whole.transfer.id].take_up(whole)

    def _submit(self, portion: Portion) -> None:
        whole = portion.whole
        copy = self._copies[whole.transfer.id]
        after = copy.after
        if whole.error is None and whole.transfer.direction is Direction.LOAD:
            after = self._copier.behind(after, portion.before)
        elif whole.error is None:
            for each in portion.before:
                each.until_passed()
        if whole.error is None and copy.take_up(whole):
            portion.submit(self._copier, after)
        else:
            portion.give_up()


class _Pieces:
    """The pieces of a transfer: of each its host blocks and its device blocks."""

    def __init__(self, whole: Whole, copier: Copier) -> None:
        transfer = whole.transfer
        if len(transfer.copies) != 1:
            raise MisuseError(
                f"transfer {transfer.id} exchanges blocks of one group, and copies {len(transfer.copies)}"
            )
        (copy,) = transfer.copies
        count = copier.num_pieces(transfer.direction, copy)
        if not count:
            raise MisuseError(f"transfer {transfer.id} exchanges blocks, and has none")
        self.whole, self.group = whole, copy.group
        self.host, self.device = _split(copy.host_blocks, count), _split(copy.device_blocks, count)

    def portion(self, number: int, which: Sequence[int], before: list[Portion]) -> Portion:
        host, device = (tuple(chain.from_iterable(each[at] for at in which)) for each in (self.host, self.device))
        return Portion(self.whole, number, GroupCopy(self.group, host, device), before)


def cut(*wholes: Whole, copier: Copier) -> list[Portion]:
    """All portions of a load and its stores, each behind those that it waits for. Raises MisuseError."""
    load, *stores = (_Pieces(whole, copier) for whole in wholes)
    count = len(load.host)
    overwritten = {block: at for at, blocks in enumerate(load.device) for block in blocks}
    read = {block: at for at, blocks in enumerate(load.host) for block in blocks}
    # of each piece of a store: which piece of the load is the first to overwrite a block of it on the device (`count`:
    # none), and which the last to read one on the host (-1: none)
    firsts = [[min(overwritten.get(block, count) for block in blocks) for blocks in store.device] for store in stores]
    lasts = [[max(read.get(block, -1) for block in blocks) for blocks in store.host] for store in stores]
    pairs = zip(chain.from_iterable(firsts), chain.from_iterable(lasts), strict=True)
    fastest = copier.part_pieces(load.whole.transfer.copies[0])
    usual = fastest or max(1, PORTION_BYTES * count // max(1, load.whole.transfer.num_bytes))
    lag = min((first - last for first, last in pairs if last >= 0), default=2 * usual)
    if lag < 1 or any(store.group != load.group for store in stores):
        raise MisuseError(f"load {load.whole.transfer.id} and its stores cannot exchange these blocks")
    size = max(1, lag // 2)
    if fastest:
        size -= size % min(size, fastest)
    runs = _runs(count, size, {piece // size for each in (*firsts, *lasts) for piece in each if 0 <= piece < count})
    number_of = [number for number, run in enumerate(runs) for _ in run] + [len(runs)]
    loads = [load.portion(number, run, []) for number, run in enumerate(runs)]
    portions = list(loads)
    for store, first, last in zip(stores, firsts, lasts, strict=True):
        numbered = defaultdict[int, list[int]](list)
        for at, piece in enumerate(first):
            numbered[number_of[piece]].append(at)
        waited = 0
        for number, which in sorted(numbered.items()):
            needed = max((number_of[last[at]] + 1 for at in which if last[at] >= 0), default=0)
            portions.append(store.portion(number, which, loads[waited:needed]))
            waited = max(waited, needed)
            for portion in loads[number : number + 1]:
                portion.before.append(portions[-1])
    return sorted(portions, key=lambda portion: (portion.number, portion.whole is load.whole))


def _runs(count: int, size: int, touched: Container[int]) -> list[range]:
    """The pieces of the load's portions: `size` pieces for each of the `touched`, and all between these as one."""
    runs = list[range]()
    for number, begin in enumerate(range(0, count, size)):
        run = range(begin, min(begin + size, count))
        if runs and number not in touched and number - 1 not in touched:
            run = range(runs.pop().start, run.stop)
        runs.append(run)
    return runs


def _split(ids: Sequence[int], count: int) -> list[Sequence[int]]:
    width = len(ids) // count
    return [ids[at : at + width] for at in range(0, len(ids), width)]
