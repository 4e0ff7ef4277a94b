"""A load and stores that overwrite what the other reads: each ends with the bytes that were there before all of them.

The model is two dictionaries of blocks, and takes what is read of both before it writes. The copier moves the bytes of
a portion when its event passes, in order within a direction and in any order between the two. So a portion that waits
for too little reads what was overwritten. Portions fail, transfers are cancelled, late or interrupted: all resolve, and
what is reported as done has its bytes.
"""

import random
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpu_prefix_cache.copier import exchange
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction, GroupCopy, Piece, PrefixGroup, StepPlan, TransferPlan
from cpu_prefix_cache.testing import MeddlingCopier
from tests.support.threads import eventually
from tests.unit.copier.bench import Shapes

LOAD = 100  # its id; those of the stores are numbers from 0
TROUBLES = ["raises", "fails on the link", "is interrupted"]


@dataclass
class Swap:
    """`host` and `device` are how many blocks each side has, and `load` and `stores` are copies between them."""

    host_blocks: int  # of a piece
    device_blocks: int
    host: int
    device: int
    load: GroupCopy
    stores: list[GroupCopy]
    load_first: bool  # in the plan

    def plan(self):
        read = set(self.load.host_blocks)
        follow = [(LOAD,) if not read.isdisjoint(copy.host_blocks) else () for copy in self.stores]
        of = zip(enumerate(self.stores), follow, strict=True)
        stores = [TransferPlan(id, Direction.STORE, (copy,), 1, after=after) for (id, copy), after in of]
        load = TransferPlan(LOAD, Direction.LOAD, (self.load,), 1, after=tuple(range(len(stores))))
        return [load, *stores] if self.load_first else [*stores, load]


@pytest.fixture(autouse=True, scope="module")
def small_portions():
    """Stores that only save go in portions too, of one piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "PORTION_BYTES", 0)
        yield


@st.composite
def swaps(draw):
    """Any pieces are saved, aligned with those of the load or not, some of blocks that nobody overwrites, in any blocks
    that are free or were read `lag` pieces before."""
    host_blocks = draw(st.integers(1, 3))
    device_blocks = draw(st.integers(1, 3))
    count = draw(st.integers(1, 12))
    lag, saved = draw(st.integers(1, count + 1)), draw(st.integers(1, count + 2))
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    device = rng.sample(range((count + 3) * device_blocks), (count + 3) * device_blocks)
    host = rng.sample(range((count + saved) * host_blocks), (count + saved) * host_blocks)
    load = GroupCopy(0, tuple(host[: count * host_blocks]), tuple(device[: count * device_blocks]))
    free = host[count * host_blocks :]
    read = [(at // host_blocks, block) for at, block in enumerate(load.host_blocks)]
    if not draw(st.booleans()):  # pieces of the stores are not pieces of the load
        rng.shuffle(device)
    sources = [device[at : at + device_blocks] for at in range(0, len(device), device_blocks)]
    pieces = []
    for source in rng.sample(sources, saved):
        first = min(
            (load.device_blocks.index(each) // device_blocks for each in source if each in load.device_blocks),
            default=count,
        )
        fit = [each for each in read if each[0] + lag <= first]
        taken = rng.sample(fit, min(len(fit), rng.choice([0, 1, host_blocks, host_blocks])))[:host_blocks]
        read = [each for each in read if each not in taken]
        goal = [block for _, block in taken] + [free.pop() for _ in range(host_blocks - len(taken))]
        pieces.append((rng.sample(goal, len(goal)), source))
    if draw(st.booleans()):
        rng.shuffle(pieces)
    stores = [pieces[at::3] for at in range(3) if pieces[at::3]] if draw(st.booleans()) else [pieces]
    copies = [joined(store) for store in stores]
    return Swap(host_blocks, device_blocks, len(host), len(device), load, copies, draw(st.booleans()))


def joined(pieces):
    return GroupCopy(0, tuple(b for host, _ in pieces for b in host), tuple(b for _, device in pieces for b in device))


class Delaying(MeddlingCopier):
    """`troubles` are what becomes of which submissions, by their number."""

    def __init__(self, copier, rng, troubles=()):
        super().__init__(copier)
        self.rng = rng
        self.troubles = dict(troubles)
        self.lock = threading.RLock()
        self.waiting = {direction: deque() for direction in Direction}
        self.submitted = 0

    def submit(self, direction, copies, after):
        with self.lock:
            trouble = self.troubles.get(self.submitted)
            self.submitted += 1
            if trouble == "raises":
                raise RuntimeError("out of resources")
            if trouble == "is interrupted":
                raise KeyboardInterrupt
            moving = Moving(self, direction, copies, trouble is not None)
            self.waiting[direction].append(moving)
            return moving

    def step(self):
        """Move what was submitted first in some direction."""
        moving = self.waiting[self.rng.choice([each for each in Direction if self.waiting[each]])]
        if not moving[0].fails:
            self.copy(moving[0].direction, moving[0].copies)
        moving.popleft()

    def may_still_move(self, host_blocks):
        """Whether something is in flight that has some of these host blocks."""
        with self.lock:
            moving = [each for waiting in self.waiting.values() for each in waiting]
            return any(not host_blocks.isdisjoint(copy.host_blocks) for each in moving for copy in each.copies)


class Moving(Event):
    """An event that raises once if it `fails`. Whoever looks at it has something move."""

    def __init__(self, copier, direction, copies, fails):
        self.copier = copier
        self.direction = direction
        self.copies = copies
        self.fails = fails

    def passed(self):
        with self.copier.lock:
            if self.copier.rng.random() < 0.7 and any(self.copier.waiting.values()):
                self.copier.step()
            if self in self.copier.waiting[self.direction]:
                return False
            fails, self.fails = self.fails, False
            if fails:
                raise RuntimeError("the device is gone")
            return True

    def until_passed(self):
        while not self.passed():
            pass


class Memory:
    """Both sides, with bytes that are all different, and what a swap makes of them."""

    def __init__(self, swap):
        widths = 2 * swap.device_blocks, 2 * swap.host_blocks  # so a piece fills its blocks
        self.host, self.device = (
            torch.arange(first, first + blocks * width, dtype=torch.int16).view(blocks, width)
            for first, blocks, width in zip((0, 10_000), (swap.host, swap.device), widths, strict=True)
        )
        block_bytes = 2 * widths[1]
        group = PrefixGroup(name="a", block_tokens=1, block_bytes=block_bytes)
        piece = Piece(group, swap.device_blocks, swap.host_blocks, swap.device_blocks * block_bytes)
        host = self.host.view(torch.uint8)
        self.copier = ReferenceCopier(Shapes([piece], host.shape[1]), [[self.device]], host)
        self.before = self.now()

    def now(self):
        return {"host": self.host.tolist(), "device": self.device.tolist()}

    def brought(self, direction, copy):
        """The blocks that a transfer writes, and what it should write there."""
        of, to = ("device", "host") if direction is Direction.STORE else ("host", "device")
        ids = {"host": copy.host_blocks, "device": copy.device_blocks}
        width = len(self.before[to][0])
        values = [value for block in ids[of] for value in self.before[of][block]]
        return {(to, block): values[at * width : (at + 1) * width] for at, block in enumerate(ids[to])}


def run(swap, memory, copier, threads, cancelled=(), late=False):
    """The report, when all has resolved."""
    now = [0.0]
    worker = CopyWorker(0, copier, threads=threads, load_seconds=30, clock=lambda: now[0])
    plans = swap.plan()
    with suppress(KeyboardInterrupt):
        worker.run(StepPlan(0, tuple(plans), cancelled))
    now[0] += 31 * late
    seen = set()

    def all_resolved():
        report = worker.report()
        for plan in plans:
            if plan.id in (report.done | report.failed) - seen:
                seen.add(plan.id)
                blocks = set(plan.copies[0].host_blocks)
                others = {b for each in plans if each is not plan for b in each.copies[0].host_blocks}
                assert not copier.may_still_move(blocks - others), f"transfer {plan.id} is over and still moves"
        return len(seen) == len(plans)

    assert eventually(all_resolved)
    report = worker.report()
    worker.close()
    return report


@pytest.mark.parametrize("threads", [False, True])
@given(swaps(), st.integers(0, 1 << 30))
def test_each_has_the_bytes_that_were_there_before_all_of_them(threads, swap, seed):
    memory = Memory(swap)
    report = run(swap, memory, Delaying(memory.copier, random.Random(seed)), threads)
    assert report.done == {plan.id for plan in swap.plan()}
    expected = {side: [list(block) for block in blocks] for side, blocks in memory.before.items()}
    for plan in swap.plan():
        for (side, block), values in memory.brought(plan.direction, plan.copies[0]).items():
            expected[side][block] = values
    assert memory.now() == expected


@pytest.mark.parametrize("threads", [False, True])
@given(
    swaps(),
    st.integers(0, 1 << 30),
    st.dictionaries(st.integers(0, 8), st.sampled_from(TROUBLES), max_size=3),
    st.sets(st.sampled_from([0, 1, LOAD]), max_size=2),
    st.booleans(),
)
def test_whatever_goes_wrong_all_resolve_and_what_is_done_has_its_bytes(threads, swap, seed, troubles, cancelled, late):
    memory = Memory(swap)
    copier = Delaying(memory.copier, random.Random(seed), troubles)
    report = run(swap, memory, copier, threads, tuple(cancelled), late)
    now, written = memory.now(), set()
    for plan in swap.plan():
        brought = memory.brought(plan.direction, plan.copies[0])
        written |= brought.keys()
        if plan.id in report.done:
            assert all(now[side][block] == values for (side, block), values in brought.items()), plan.id
    for side, blocks in memory.before.items():
        assert all(now[side][at] == was for at, was in enumerate(blocks) if (side, at) not in written)
