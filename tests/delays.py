"""Streams that put work off as long as they may: what CUDA is allowed to do, a test can make them do.

Nothing runs before somebody synchronizes with a stream, and then the stream runs that comes first in `eager`, or that
`rng` picks, among all that may go on. A stream stops at a wait until its event is passed, wherever that is.
"""

import random
from collections import deque

from cpu_prefix_cache.copier.streams import StreamPair, Streams


class DelayedEvent:
    def __init__(self, stream):
        self.stream, self.has_passed = stream, False

    def passed(self):
        return self.has_passed

    def until_passed(self):
        while not self.has_passed:
            self.stream.world.step()


class DelayedStream:
    def __init__(self, world, name):
        self.world, self.name, self.entries, self.waited_for = world, name, deque(), []

    def submit(self, work):
        self.entries.append(work)

    def record(self, again=None):
        event = again or DelayedEvent(self)
        assert event.stream is self
        if event in self.entries:
            self.entries.remove(event)
        event.has_passed = False
        self.entries.append(event)
        return event

    def wait(self, event):
        self.entries.append(("wait", event))
        self.waited_for.append(event.stream)

    def synchronize(self):
        while self.entries:
            self.world.step()

    @property
    def may_go_on(self):
        return bool(self.entries) and not (isinstance(self.entries[0], tuple) and not self.entries[0][1].passed())

    def step(self):
        entry = self.entries.popleft()
        if isinstance(entry, DelayedEvent):
            entry.has_passed = True
        elif callable(entry):
            entry(0)
            self.world.ran.append(self.name)


class DelayedStreams:
    """`streams` is what a staged copier takes; `ran` names the stream of each piece of work, in the order it ran."""

    def __init__(self, eager=(), rng=None):
        self.eager, self.rng, self.ran = eager, rng or random.Random(0), []
        self.compute, *rest = [DelayedStream(self, name) for name in ("compute", "pack", "out", "in", "unpack")]
        pack, out, into, unpack = rest
        self.all = [self.compute, *rest]
        self.streams = Streams(lambda: self.compute, stores=StreamPair(pack, out), loads=StreamPair(unpack, into))

    def step(self):
        ready = {stream.name: stream for stream in self.all if stream.may_go_on}
        if not ready:
            raise RuntimeError("every stream waits for another")
        first = next((name for name in self.eager if name in ready), None)
        ready[first or self.rng.choice(sorted(ready))].step()
