"""Queues that put work off as long as they may: what a stream is allowed to do, a test can make them do.

Nothing runs before somebody drains a queue, and then the queue runs that comes first in `eager`, or that `rng` picks,
among all that may go on. A queue stops at a wait until its mark is passed, wherever that is.
"""

import random
from collections import deque

from cpu_prefix_cache.copier.queues import Lane, Queues


class DelayedMark:
    def __init__(self, queue):
        self.queue, self.has_passed = queue, False

    def passed(self):
        return self.has_passed

    def until_passed(self):
        while not self.has_passed:
            self.queue.world.step()


class DelayedQueue:
    def __init__(self, world, name):
        self.world, self.name, self.entries, self.waited_for = world, name, deque(), []

    def submit(self, work):
        self.entries.append(work)

    def mark(self):
        mark = DelayedMark(self)
        self.entries.append(mark)
        return mark

    def move(self, mark):
        assert mark.queue is self
        if mark in self.entries:
            self.entries.remove(mark)
        mark.has_passed = False
        self.entries.append(mark)

    def wait(self, mark):
        self.entries.append(("wait", mark))
        self.waited_for.append(mark.queue)

    def drain(self):
        while self.entries:
            self.world.step()

    @property
    def may_go_on(self):
        return bool(self.entries) and not (isinstance(self.entries[0], tuple) and not self.entries[0][1].passed())

    def step(self):
        entry = self.entries.popleft()
        if isinstance(entry, DelayedMark):
            entry.has_passed = True
        elif callable(entry):
            entry(0)
            self.world.ran.append(self.name)


class DelayedQueues:
    """`queues` is what a staged copier takes; `ran` names the queue of each piece of work, in the order it ran."""

    def __init__(self, eager=(), rng=None):
        self.eager, self.rng, self.ran = eager, rng or random.Random(0), []
        self.compute, *rest = [DelayedQueue(self, name) for name in ("compute", "pack", "out", "in", "unpack")]
        pack, out, into, unpack = rest
        self.all = [self.compute, *rest]
        self.queues = Queues(self.compute.mark, stores=Lane(pack, out), loads=Lane(unpack, into))

    def step(self):
        ready = {queue.name: queue for queue in self.all if queue.may_go_on}
        if not ready:
            raise RuntimeError("every queue waits for another")
        first = next((name for name in self.eager if name in ready), None)
        ready[first or self.rng.choice(sorted(ready))].step()
