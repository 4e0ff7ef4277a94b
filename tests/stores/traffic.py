"""Calls in flight when something happens to the server, and memory that shows the bytes they wrote."""

import mmap
import random
import threading
import time

from cpu_prefix_cache.stores.keyed_store import Got

VALUES, PARTS = 16, (96, 1 << 20)  # of one call: 16 MiB
HANG_SECONDS = 60.0  # no call of these tests may last so long, whatever the machine does


class Traffic:
    """Batches of values, of which each thread has its own keys and buffers, from registered memory."""

    def __init__(self, store, name="v"):
        self.store, self.size = store, sum(PARTS)
        self.memory = memoryview(mmap.mmap(-1, VALUES * (self.size + 64)))
        store.register(self.memory)
        self.keys = [f"{name}:{at}" for at in range(VALUES)]
        self.values = [random.Random(key).randbytes(self.size) for key in self.keys]
        self.buffers = [self._buffers(at * (self.size + 64)) for at in range(VALUES)]

    def _buffers(self, begin):
        middle = begin + PARTS[0]
        return [self.memory[begin:middle], self.memory[middle : begin + self.size]]

    def poison(self):
        self.memory[:] = b"\xee" * len(self.memory)

    def is_poisoned(self):
        return self.memory == b"\xee" * len(self.memory)

    def put(self, timeout=30.0):
        for buffers, value in zip(self.buffers, self.values, strict=True):
            buffers[0][:], buffers[1][:] = value[: PARTS[0]], value[PARTS[0] :]
        return list(self.store.put_from(self.keys, self.buffers, timeout))

    def get(self, timeout=30.0):
        """Which values came, each of which must be right."""
        self.poison()
        there = [got is Got.READ for got in self.store.get_into(self.keys, self.buffers, timeout)]
        for is_there, buffers, value in zip(there, self.buffers, self.values, strict=True):
            assert not is_there or b"".join(buffers) == value, "wrong bytes"
        return there

    def get_all(self):
        return all(self.get())


class Under:
    """Runs a call again and again in a thread, until it raises OSError, which is then `raised`."""

    def __init__(self, call):
        self.calls = 0
        self.raised = None
        self.failed = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()
        while self.calls < 2 and self._thread.is_alive():
            time.sleep(0.001)

    def _run(self, call):
        try:
            while True:
                call()
                self.calls += 1
        except OSError as raised:
            self.raised = raised
        except BaseException as failed:
            self.failed = failed

    def end(self):
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive(), "the call hangs"
        assert self.failed is None, self.failed
        return self.raised
