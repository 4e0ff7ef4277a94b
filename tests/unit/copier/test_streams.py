"""The streams of a direction are all waited for, whatever becomes of one; and every device has a place of compute."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from cpu_prefix_cache.copier import events, streams
from cpu_prefix_cache.copier.streams import compute_event
from tests.support.simulated_streams import SimulatedStreams

NAMES = ("pack", "out")  # of the stores: kernels, copies


def streams_of(direction):
    return [*direction.kernels, direction.copies]


@pytest.mark.parametrize("broken", range(3))
def test_a_stream_that_cannot_be_waited_for_does_not_keep_the_others_from_it(broken):
    def gone(handle):
        raise RuntimeError("gone")

    stores = SimulatedStreams(eager=NAMES).streams.stores
    for at, stream in enumerate(streams_of(stores)):
        stream.submit(gone if at == broken else lambda handle: None)
    with pytest.raises(RuntimeError, match="gone"):
        stores.synchronize()
    assert not any(stream.entries for stream in streams_of(stores))


@pytest.mark.parametrize("eager", [NAMES, NAMES[::-1]])
def test_the_event_of_a_direction_is_passed_when_all_its_streams_have_come_there(eager):
    streams = SimulatedStreams(eager)
    event = streams.streams.stores.record()
    seen = [event.passed()]
    for _ in streams_of(streams.streams.stores):
        streams.step()
        seen.append(event.passed())
    assert seen == [False, False, False, True]


class Event:
    """One of torch's, that is passed when it has been looked at three times."""

    def __init__(self, device):
        self.device, self.looks = device, 0

    def record(self, stream):
        self.stream = stream

    def query(self):
        self.looks += 1
        return self.looks > 3


@pytest.mark.parametrize("kind", ["xpu", "mps", "hpu"])
def test_compute_on_a_device_that_is_not_cuda_has_an_event_too(monkeypatch, kind):
    """It runs behind the host's back, as CUDA does: a store would read what was not written yet."""
    device = torch.device(kind, 0)
    current = SimpleNamespace(device=device)
    monkeypatch.setattr(torch.accelerator, "current_stream", {device: current}.__getitem__)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(events, "NAP_SECONDS", 0)
    event = compute_event(device)
    assert not event.passed()
    event.until_passed()
    assert event.passed()
    assert (event.event.device, event.event.stream, event.event.looks) == (device, current, 5)


def test_host_memory_has_no_stream_to_wait_for():
    assert compute_event(torch.device("cpu")).passed()


def test_a_wait_for_a_device_leaves_the_processor_and_pythons_lock_to_others(monkeypatch):
    """torch gives Python's lock back in `synchronize`, and a blocking event sleeps."""
    calls = []

    class TorchEvent:
        def __init__(self, blocking=False):
            calls.append(("made", blocking))

        def __getattr__(self, name):
            return lambda *_: calls.append(name)

    @contextmanager
    def working_in(device):
        calls.append("within")
        yield
        calls.append("without")

    monkeypatch.setattr(torch.cuda, "Event", TorchEvent)
    monkeypatch.setattr(streams, "accelerator_driver", lambda: SimpleNamespace(working_in=working_in))
    streams.CudaEvent(None).until_passed()
    assert calls == [("made", True), "record", "within", "synchronize", "without"]
