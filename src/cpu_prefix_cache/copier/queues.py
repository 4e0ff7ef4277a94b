"""In what order things run: queues of work, and marks in them that other queues wait for.

    submit   work runs after all that was submitted to, or waited for on, this queue before
    mark     a point in this queue: passed when all that was submitted before it has run
    wait     what is submitted to this queue later runs after the mark was passed, wherever the mark is from
    drain    the caller waits until all that was submitted has run

On CUDA a queue is a stream and a mark an event. Without a GPU work runs as it is submitted and every mark is passed, so
that the same code runs on both. A test can give queues that put work off as long as these four sentences let them.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Mark = Any  # only the queues look inside


class Queue(Protocol):
    def submit(self, work: Callable[[], object]) -> None: ...

    def mark(self) -> Mark: ...

    def wait(self, mark: Mark) -> None: ...

    def drain(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Lane:
    """The two queues of one direction: kernels that pack and unpack, and copies over the link."""

    kernels: Queue
    copies: Queue


@dataclass(frozen=True, slots=True)
class Queues:
    """What a staged copier works with. `compute` is the engine's own: it is only marked, never made to wait."""

    compute: Queue
    stores: Lane
    loads: Lane


class ImmediateQueue:
    """Runs work as it is submitted. For tensors in host memory."""

    def submit(self, work: Callable[[], object]) -> None:
        work()

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        pass

    def drain(self) -> None:
        pass


class CudaQueue:
    """A CUDA stream; without one, whichever is current on `device` when the queue is used."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream

    def submit(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._current()):
            work()

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._current())
        return event

    def wait(self, mark: Mark) -> None:
        self._current().wait_event(mark)

    def drain(self) -> None:
        self._current().synchronize()

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if self._stream is None else self._stream


def queues_for(device: torch.device) -> Queues:
    """Streams of their own for the stores and the loads of a CUDA device, behind compute; else queues that run at once.

    Compute is whatever stream is current when a copy is asked for.
    """
    if device.type != "cuda":
        return Queues(ImmediateQueue(), *(Lane(ImmediateQueue(), ImmediateQueue()) for _ in range(2)))

    def lane() -> Lane:
        streams = [torch.cuda.Stream(device) for _ in range(2)]
        return Lane(*(CudaQueue(device, stream) for stream in streams))

    return Queues(CudaQueue(device), lane(), lane())


@contextlib.contextmanager
def drained(*queues: Queue) -> Iterator[None]:
    """Leaves nothing under way, however the block ends: whoever hears of an error may use the memory again at once."""
    with contextlib.ExitStack() as stack:
        for queue in queues:
            stack.callback(queue.drain)
        yield
