"""Streams of a device that is not there: what a device is allowed to do, a test can make them do.

Nothing runs before somebody waits, unless there is `hurry`: then some is done as it is submitted. Of all streams that
may go on, the one runs that comes first in `eager`, or that `rng` picks. A stream stops at a wait until its event is
passed, wherever that is. (Hypothesis draws the seed of `rng` and not its picks: a copier that is dropped when a test is
over has its streams run to the end.)
"""

import random
import threading
from collections import deque
from functools import partial

from cpu_prefix_cache.copier.events import Event, ReadsOf
from cpu_prefix_cache.copier.streams import LinkStreams, Streams

HANDLES = 0x7F5C << 32  # as large as those of a driver, so that one that was cut is no stream's


class SimulatedEvent(Event):
    def __init__(self, stream):
        self.stream, self.has_passed = stream, False

    def passed(self):
        return self.has_passed

    def until_passed(self):
        with self.stream.world.lock:  # or another thread may have done it when this one steps
            while not self.has_passed:
                self.stream.world.step()


class SimulatedStream:
    def __init__(self, world, name, handle):
        self.world = world
        self.name = name
        self.handle = handle
        self.entries = deque()
        self.waited_for = []

    def submit(self, work):
        """Calls of a driver are made now, as on a device, and the driver puts the work here. A kernel runs when it is
        its turn; Triton's interpreter would run it at once."""
        asks = getattr(getattr(work, "func", None), "__self__", None)
        if getattr(asks, "_driver", None) is None:
            self.put(partial(work, self.handle))
        else:
            work(self.handle)

    def put(self, entry):
        """Work, an event that is recorded, or a wait, after all that was put here before."""
        with self.world.lock:
            self.entries.append(entry)
            self.world.hurries()

    def record(self, again=None):
        event = again or SimulatedEvent(self)
        assert event.stream is self
        with self.world.lock:
            if event in self.entries:
                self.entries.remove(event)
            event.has_passed = False
        self.put(event)
        return event

    def wait(self, event):
        if isinstance(event, ReadsOf):
            event = event.store.reads
        if not isinstance(event, SimulatedEvent):
            for each in getattr(event, "events", ()):  # else it is Passed
                self.wait(each)
            return
        self.waited_for.append(event.stream)
        self.put(("wait", event))

    def synchronize(self):
        with self.world.lock:
            while self.entries:
                self.world.step()

    @property
    def may_go_on(self):
        return bool(self.entries) and not (isinstance(self.entries[0], tuple) and not self.entries[0][1].passed())

    def step(self):
        entry = self.entries.popleft()
        if isinstance(entry, SimulatedEvent):
            entry.has_passed = True
        elif callable(entry):
            entry()
            self.world.ran.append(self.name)


class SimulatedStreams:
    """`streams` is what a staged copier takes; `ran` names the stream of each piece of work, in the order it ran."""

    def __init__(self, eager=(), rng=None, hurry=0.0):
        self.eager = eager
        self.rng = rng or random.Random(0)
        self.hurry = hurry
        self.ran = []
        self.lock = threading.RLock()
        names = ("compute", "pack", "out", "in", "unpack", "pack", "unpack")  # kernels of two slots have one name
        self.all = [SimulatedStream(self, name, HANDLES + at) for at, name in enumerate(names)]
        self.by_handle = {stream.handle: stream for stream in self.all}
        self.compute, pack, out, into, unpack, pack_too, unpack_too = self.all
        stores, loads = LinkStreams([pack, pack_too], out), LinkStreams([unpack, unpack_too], into)
        self.streams = Streams(lambda: self.compute, stores, loads)

    def step(self):
        with self.lock:
            if not self._ready():
                raise RuntimeError("every stream waits for another")
            self._run_one()

    def hurries(self):
        """Do some of what may be done, sometimes."""
        while self.hurry and self._ready() and self.rng.random() < self.hurry:
            self._run_one()

    def _ready(self):
        return [stream for stream in self.all if stream.may_go_on]

    def _run_one(self):
        ready = self._ready()
        first = next((name for name in self.eager if any(stream.name == name for stream in ready)), None)
        self.rng.choice([stream for stream in ready if first in (None, stream.name)]).step()
