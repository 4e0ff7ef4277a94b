"""In what order things run: streams of work, and events in them that other streams wait for.

    submit        work runs after all that was submitted to, or waited for on, this stream before
    record        an event, here: it is passed when all that was submitted before has run. It can be recorded again
    wait          what is submitted to this stream later runs after the event was passed, whichever stream it is of
    synchronize   the caller waits until all that was submitted has run

On CUDA these are CUDA's streams and events. Host memory has work run as it is submitted and every event passed, so that
the same code runs on both. A test can give streams that put work off as long as these four sentences let them.

Of an engine's own stream a copier knows where it stands (`compute_event`), on any device that torch has streams for.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from cpu_prefix_cache.memory.driver import cuda_driver
from cpu_prefix_cache.messages.errors import MisuseError

NAP_SECONDS = 80e-6  # with what the system adds, a quarter of the time that a slice needs on the link


class Event(Protocol):
    def passed(self) -> bool: ...

    def until_passed(self) -> None:
        """The caller naps and looks again: CUDA's own wait takes 80 us of a processor."""
        while not self.passed():
            time.sleep(NAP_SECONDS)


class Stream(Protocol):
    def submit(self, work: Callable[[int], object]) -> None:
        """`work` is told the stream's handle: CUDA's, or 0."""

    def record(self) -> Event: ...

    def record_again(self, event: Event) -> None:
        """Move an event of this stream from where it was to where the stream is. Only if nobody waits for it."""

    def wait(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StreamPair:
    """The two streams of one direction: kernels that gather and scatter, and copies over the link."""

    kernels: Stream
    copies: Stream

    def record(self) -> Event:
        """Where both stand. Neither waits for the other because of it."""
        return _Both(self.kernels.record(), self.copies.record())

    def synchronize(self) -> None:
        """Leaves nothing under way, even if one of the two fails."""
        try:
            self.kernels.synchronize()
        finally:
            self.copies.synchronize()


@dataclass(frozen=True, slots=True)
class Streams:
    """What a staged copier works with. `compute` gives the stream that the engine computes in at the moment."""

    compute: Callable[[], Stream]
    stores: StreamPair
    loads: StreamPair


class Passed(Event):
    """The event of what has run already."""

    def passed(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _Both(Event):
    one: Event
    other: Event

    def passed(self) -> bool:
        return self.one.passed() and self.other.passed()

    def until_passed(self) -> None:
        self.one.until_passed()
        self.other.until_passed()


class ImmediateStream:
    """Runs work as it is submitted. For tensors in host memory."""

    def submit(self, work: Callable[[int], object]) -> None:
        work(0)

    def record(self) -> Event:
        return Passed()

    def record_again(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class DeviceEvent(Event):
    """On any device that torch has streams for; graphs that other threads capture are left alone."""

    def __init__(self, stream: torch.Stream) -> None:
        is_cuda = stream.device.type == "cuda"
        self.event = torch.cuda.Event() if is_cuda else torch.Event(stream.device)
        self.event.record(stream)
        self._working = partial(cuda_driver().working_in, None) if is_cuda else nullcontext  # beside captures

    def passed(self) -> bool:
        with self._working():
            return bool(self.event.query())


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._handle = stream, stream.cuda_stream

    def submit(self, work: Callable[[int], object]) -> None:
        work(self._handle)

    def record(self) -> DeviceEvent:
        return DeviceEvent(self._stream)

    def record_again(self, event: Event) -> None:
        if not isinstance(event, DeviceEvent):
            raise MisuseError("an event can only be recorded again in its own stream")
        event.event.record(self._stream)

    def wait(self, event: Event) -> None:
        if isinstance(event, DeviceEvent):
            self._stream.wait_event(event.event)
        elif isinstance(event, _Both):
            self.wait(event.one)
            self.wait(event.other)
        else:
            event.until_passed()

    def synchronize(self) -> None:
        self._stream.synchronize()


def compute_event(device: torch.device) -> Event:
    """Where the stream stands that is current on `device` for the calling thread. Host memory has none."""
    if device.type == "cpu":
        return Passed()
    is_cuda = device.type == "cuda"
    return DeviceEvent(torch.cuda.current_stream(device) if is_cuda else torch.accelerator.current_stream(device))


def streams_for(device: torch.device) -> Streams:
    """Streams of their own for stores and for loads of a CUDA device, behind compute; else streams that run at once.

    Compute is whatever stream is current when a copy is asked for.
    """
    if device.type != "cuda":
        at_once = StreamPair(ImmediateStream(), ImmediateStream())
        return Streams(ImmediateStream, at_once, at_once)
    stores, loads = (StreamPair(*(CudaStream(torch.cuda.Stream(device)) for _ in range(2))) for _ in range(2))
    return Streams(lambda: CudaStream(torch.cuda.current_stream(device)), stores, loads)
