"""In what order things run: queues of work, and marks in them that other queues wait for.

    submit   work runs after all that was submitted to, or waited for on, this queue before
    mark     a point in this queue: passed when all that was submitted before it has run; it can be moved on
    wait     what is submitted to this queue later runs after the mark was passed, wherever the mark is from
    drain    the caller waits until all that was submitted has run

On CUDA a queue is a stream and a mark an event. Without a GPU work runs as it is submitted and every mark is passed, so
that the same code runs on both. A test can give queues that put work off as long as these four sentences let them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from cpu_prefix_cache.memory.driver import cuda_driver
from cpu_prefix_cache.messages.errors import MisuseError

NAP_SECONDS = 80e-6  # with what the system adds, a quarter of the time that a slice needs on the link


class Mark(Protocol):
    def passed(self) -> bool: ...

    def until_passed(self) -> None:
        """The caller sleeps until then."""


class Queue(Protocol):
    def submit(self, work: Callable[[int], object]) -> None:
        """`work` is told the queue's handle: of its CUDA stream, or 0."""

    def mark(self) -> Mark: ...

    def move(self, mark: Mark) -> None:
        """Take a mark of this queue from where it was to where the queue is. Only if nobody waits for it any more."""

    def wait(self, mark: Mark) -> None: ...

    def drain(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Lane:
    """The two queues of one direction: kernels that pack and unpack, and copies over the link."""

    kernels: Queue
    copies: Queue

    def mark(self) -> Mark:
        """Where both stand. Neither waits for the other because of it."""
        return _Both(self.kernels.mark(), self.copies.mark())

    def drain(self) -> None:
        """Leaves nothing under way, even if one of the two fails."""
        try:
            self.kernels.drain()
        finally:
            self.copies.drain()


@dataclass(frozen=True, slots=True)
class Queues:
    """What a staged copier works with. Of the engine's own it sees where it stands, `compute`, and can have it wait."""

    compute: Callable[[], Mark]
    stores: Lane
    loads: Lane
    hold_compute: Callable[[Mark], None] = lambda mark: mark.until_passed()


class Passed:
    """The mark of what has run already."""

    def passed(self) -> bool:
        return True

    def until_passed(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Both:
    one: Mark
    other: Mark

    def passed(self) -> bool:
        return self.one.passed() and self.other.passed()

    def until_passed(self) -> None:
        self.one.until_passed()
        self.other.until_passed()


class ImmediateQueue:
    """Runs work as it is submitted. For tensors in host memory."""

    def submit(self, work: Callable[[int], object]) -> None:
        work(0)

    def mark(self) -> Mark:
        return Passed()

    def move(self, mark: Mark) -> None:
        pass

    def wait(self, mark: Mark) -> None:
        pass

    def drain(self) -> None:
        pass


class CudaMark:
    """An event. Whoever waits for it naps and looks again: CUDA's own blocking wait takes 80 us of a processor."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)
        self._driver = cuda_driver()

    def passed(self) -> bool:
        with self._driver.beside_captures():
            return bool(self.event.query())

    def until_passed(self) -> None:
        while not self.passed():
            time.sleep(NAP_SECONDS)


class CudaQueue:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._handle = stream, stream.cuda_stream

    def submit(self, work: Callable[[int], object]) -> None:
        work(self._handle)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)

    def move(self, mark: Mark) -> None:
        if not isinstance(mark, CudaMark):
            raise MisuseError("a mark can only be moved within its queue")
        mark.event.record(self._stream)

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, CudaMark):
            self._stream.wait_event(mark.event)
        elif isinstance(mark, _Both):
            self.wait(mark.one)
            self.wait(mark.other)
        else:
            mark.until_passed()

    def drain(self) -> None:
        self._stream.synchronize()


def compute_mark(device: torch.device) -> Mark:
    """Where the stream stands that is current on `device`."""
    return CudaMark(torch.cuda.current_stream(device)) if device.type == "cuda" else Passed()


def hold_compute(device: torch.device, mark: Mark) -> None:
    """What the stream that is current on `device` is given from here on runs after `mark`."""
    if device.type == "cuda":
        CudaQueue(torch.cuda.current_stream(device)).wait(mark)
    else:
        mark.until_passed()


def queues_for(device: torch.device) -> Queues:
    """Streams of their own for the stores and the loads of a CUDA device, behind compute; else queues that run at once.

    Compute is whatever stream is current when a copy is asked for.
    """

    def queue() -> Queue:
        return CudaQueue(torch.cuda.Stream(device)) if device.type == "cuda" else ImmediateQueue()

    stores, loads = (Lane(queue(), queue()) for _ in range(2))
    return Queues(lambda: compute_mark(device), stores, loads, partial(hold_compute, device))
