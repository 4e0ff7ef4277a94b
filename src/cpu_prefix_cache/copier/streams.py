"""Streams of work. The events in them are in events.py.

On CUDA and HIP devices, which torch calls both "cuda", these are the device's streams and events. In host memory work
runs when it is submitted and every event is passed. Tests use streams that delay work as long as the four sentences in
`Stream` allow.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from cpu_prefix_cache.copier.events import AllOf, Event, Passed, ReadsOf
from cpu_prefix_cache.memory.driver import Driver, accelerator_driver


class Stream(Protocol):
    def submit(self, work: Callable[[int], object]) -> None:
        """Run `work` after all that was submitted before. It is called with the stream's handle: the driver's, or 0."""

    def record(self, again: Event | None = None) -> Event:
        """An event that is passed when all that was submitted before has run. To make none, an event of this stream may
        be given `again` for which nothing waits any more."""

    def wait(self, event: Event) -> None:
        """Run what is submitted from now on after `event`, whichever stream it is of."""

    def synchronize(self) -> None:
        """Return when all that was submitted has run."""


@dataclass(frozen=True, slots=True)
class LinkStreams:
    """The streams of one direction: for the kernels of each slot, which gather or scatter, and for copies over the
    link.

    A kernel waits until a long matrix product of compute leaves it a multiprocessor. Those of several slots wait at the
    same time: beside prefill loads of small fragments are 1.8 times as fast as with one stream (one H200).
    """

    kernels: Sequence[Stream]
    copies: Stream

    def record(self) -> "AllOf":
        """The end of what all have been given. None waits for another."""
        return AllOf([stream.record() for stream in (*self.kernels, self.copies)])

    def synchronize(self) -> None:
        """Wait for all, even if some fail."""
        with ExitStack() as waits:
            for stream in (self.copies, *self.kernels):  # the last first
                waits.callback(stream.synchronize)


@dataclass(frozen=True, slots=True)
class Streams:
    """Streams of a staged copier. `compute` returns the engine's current stream. Host memory has no `driver`."""

    compute: Callable[[], Stream]
    stores: LinkStreams
    loads: LinkStreams
    driver: Driver | None = None


class ImmediateStream:
    """Runs work as it is submitted. For tensors in host memory."""

    def submit(self, work: Callable[[int], object]) -> None:
        work(0)

    def record(self, again: Event | None = None) -> Event:
        return Passed()

    def wait(self, event: Event) -> None:
        event.until_passed()

    def synchronize(self) -> None: ...


class DeviceEvent(Event):
    """Event of any device that torch has streams for."""

    def __init__(self, stream: torch.Stream) -> None:
        self.event = torch.Event(stream.device)
        self.event.record(stream)

    def passed(self) -> bool:
        return bool(self.event.query())


class CudaEvent(Event):
    """Event of a device that torch calls "cuda". Graphs that other threads capture are left alone. Who waits for it has
    given Python's lock back until then: naps and looks took it from the engine several times for each slice."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._working = partial(accelerator_driver().working_in, None)
        self.event = torch.cuda.Event(blocking=True)
        self.event.record(stream)

    @property
    def handle(self) -> int:
        return int(self.event.cuda_event)

    def passed(self) -> bool:
        with self._working():
            return bool(self.event.query())

    def until_passed(self) -> None:
        with self._working():
            self.event.synchronize()


class CudaStream:
    """Stream of a device that torch calls "cuda": CUDA's or HIP's."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._handle = stream, stream.cuda_stream

    def submit(self, work: Callable[[int], object]) -> None:
        work(self._handle)

    def record(self, again: Event | None = None) -> Event:
        if not isinstance(again, CudaEvent):
            return CudaEvent(self._stream)
        again.event.record(self._stream)
        return again

    def wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            accelerator_driver().wait(self._handle, event.handle)
        elif isinstance(event, AllOf):
            for each in event.events:
                self.wait(each)
        elif isinstance(event, ReadsOf):
            self.wait(event.store.reads)
        else:
            event.until_passed()

    def synchronize(self) -> None:
        self._stream.synchronize()


def compute_event(device: torch.device) -> Event:
    """An event in the stream of `device` that is current in the calling thread. Host memory has none."""
    if device.type == "cpu":
        return Passed()
    if device.type == "cuda":
        return CudaEvent(torch.cuda.current_stream(device))
    return DeviceEvent(torch.accelerator.current_stream(device))


def streams_for(device: torch.device, num_slots: int) -> Streams:
    """New streams for the stores and the loads of a CUDA or HIP device, each with so many slots; for host memory such
    that run work at once."""
    if device.type != "cuda":
        at_once = LinkStreams([ImmediateStream()] * num_slots, ImmediateStream())
        return Streams(ImmediateStream, at_once, at_once)

    def new() -> LinkStreams:
        kernels = [CudaStream(torch.cuda.Stream(device)) for _ in range(num_slots)]
        return LinkStreams(kernels, CudaStream(torch.cuda.Stream(device)))

    return Streams(lambda: CudaStream(torch.cuda.current_stream(device)), new(), new(), accelerator_driver())
