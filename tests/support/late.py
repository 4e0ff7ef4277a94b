"""A plugin of pytest: host caches behave on a CPU as on a CUDA device.

    python -m pytest -p tests.support.late tests/unit/keys

regions    have nothing ready until the first plan, or call, begins to pin them; a simulated driver does that
copies     are submitted by threads, and end up to 2 ms later, in order in each direction

It fails the session if a copy takes a host block that is not ready. Tests that count on a copy at once fail here, and
those may: what is listed in the Makefile (`test-late`) waits for its copies.
"""

import random
import threading
import time
import weakref
from collections import deque

from cpu_prefix_cache.copier import choose
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.host_cache.options import USUAL_HOST, HostOptions
from cpu_prefix_cache.memory import arena, registration
from cpu_prefix_cache.messages.plan import Direction

SLICES = 8
COPY_SECONDS = 2e-3
PAGE = 4096
LATE = weakref.WeakSet()  # the registrations of regions that are late
UNREADY = []  # copies of host blocks that were not ready


class LateEvent(Event):
    def __init__(self):
        self.over, self.error, self.inner = threading.Event(), None, None

    def end(self, inner=None, error=None):
        self.inner, self.error = self.inner or inner, self.error or error
        self.over.set()

    def passed(self):
        if not self.over.is_set():
            return False
        if self.error is not None:
            raise self.error
        return True

    def until_passed(self):
        self.over.wait()
        self.passed()

    def unfit(self):
        return self.inner.unfit() if self.inner is not None else ()


class Stream:
    """Does jobs in order, in a thread that lives while there are some."""

    def __init__(self):
        self.jobs, self.lock, self.is_running = deque(), threading.Lock(), False

    def put(self, job):
        with self.lock:
            self.jobs.append(job)
            if not self.is_running:
                self.is_running = True
                threading.Thread(target=self.run, daemon=True, name="late-stream").start()

    def run(self):
        while True:
            with self.lock:
                if not self.jobs:
                    self.is_running = False
                    return
                job = self.jobs.popleft()
            job()


class StreamCopier(Copier):
    """Carries out the copies of `copier` later, each direction in order, as streams of a device do."""

    def __init__(self, copier, pinned):
        self.copier, self.pinned, self.knows_pieces = copier, pinned, copier.knows_pieces
        self.streams = {direction: Stream() for direction in Direction}
        self.draw = random.Random(1)

    def here(self):
        return self.copier.here()

    def num_pieces(self, direction, copy):
        return self.copier.num_pieces(direction, copy)

    def part_pieces(self, copy):
        return self.copier.part_pieces(copy)

    def sections(self, group):
        return self.copier.sections(group)

    def submit(self, direction, copies, after):
        self._check(direction, copies)
        event = LateEvent()

        def job():
            time.sleep(self.draw.random() * COPY_SECONDS)
            try:
                inner = self.copier.submit(direction, copies, after)
                inner.until_passed()
                event.end(inner)
            except BaseException as error:
                event.end(error=error)

        self.streams[direction].put(job)
        return event

    def submit_sections(self, copies, after, submitted):
        self._check(Direction.LOAD, copies)
        count = 1 + max((section for copy in copies for section in self.sections(copy.group)), default=0)
        events = [LateEvent() for _ in range(count)]
        rest = deque(events)

        def one(inner):
            time.sleep(self.draw.random() * COPY_SECONDS)
            inner.until_passed()
            (rest.popleft() if len(rest) > 1 else rest[0]).end(inner)

        def job():
            try:
                self.copier.submit_sections(copies, after, one)
            except BaseException as error:
                for event in rest:
                    event.end(error=error)
            else:
                for event in rest:
                    event.end()

        self.streams[Direction.LOAD].put(job)
        for event in events:
            submitted(event)

    def _check(self, direction, copies):
        if self.pinned is not None:
            ready = self.pinned.ready_blocks
            UNREADY.extend((direction, block, ready) for copy in copies for block in copy.host_blocks if block >= ready)


def _start(self):
    """All of it is pinned when this returns, so that a test need not wait."""
    _registration_start(self)
    if self in LATE:
        self.wait(30)


_registration_start = registration.Registration.start
_arena_init, _choose = arena.HostArena.__init__, choose.choose_copier


def _late_arena(self, num_blocks, block_bytes, *, pinned_for=None, region=None, driver=None, slice_bytes=None):
    from tests.support.simulated_driver import CUDA, SimulatedDriver

    if driver is not None or pinned_for is None or pinned_for.type != "cpu":
        slice_bytes = {} if slice_bytes is None else {"slice_bytes": slice_bytes}
        _arena_init(self, num_blocks, block_bytes, pinned_for=pinned_for, region=region, driver=driver, **slice_bytes)
        return

    slice_bytes = -(-num_blocks * block_bytes // (SLICES * PAGE)) * PAGE
    late = {"pinned_for": CUDA, "driver": SimulatedDriver(), "slice_bytes": slice_bytes}
    _arena_init(self, num_blocks, block_bytes, region=region, **late)
    LATE.add(self.registration)


def _late_copier(*args, pinned=None, **others):
    chosen = _choose(*args, pinned=pinned, **others)
    return choose.ChosenCopier(StreamCopier(chosen.copier, pinned), chosen.name, chosen.reason)


def pytest_configure(config):
    arena.HostArena.__init__ = _late_arena
    choose.choose_copier = _late_copier
    registration.Registration.start, registration.PAUSE_SECONDS = _start, 0
    HostOptions.__init__.__kwdefaults__["threads"] = True
    object.__setattr__(USUAL_HOST, "threads", True)  # made before


def pytest_sessionfinish(session):
    if UNREADY:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    for each in UNREADY[:10]:
        terminalreporter.write_line(f"a host block was touched that is not ready: {each}")
