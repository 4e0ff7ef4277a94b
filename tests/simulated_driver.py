"""A CUDA driver that only keeps book, for host regions that are pinned where there is no CUDA."""

import threading

import torch

from cpu_prefix_cache.memory.driver import DriverError

CUDA = torch.device("cuda", 0)
SLICE = 1 << 16


class FakeDriver:
    """A CUDA driver that keeps book. It says no from byte `refuses_from` on."""

    has_batches = True

    def __init__(self):
        self.registered, self.order, self.gate = {}, [], threading.Semaphore(1000)
        self.refuses_after, self.beside = None, 0

    def working_in(self, device):
        assert device == CUDA.index
        return self

    def __enter__(self):
        self.beside += 1

    def __exit__(self, *_):
        self.beside -= 1

    def register(self, address, num_bytes):
        assert self.gate.acquire(timeout=10) and self.beside
        if self.refuses_after is not None and len(self.order) >= self.refuses_after:
            raise DriverError("pin host memory", 2)
        assert not any(start <= address < start + size for start, size in self.registered.items())
        self.registered[address] = num_bytes
        self.order.append(address)

    def unregister(self, address):
        assert self.beside
        del self.registered[address]

    def pci_address(self, device):
        return "0000:00:00.0"
