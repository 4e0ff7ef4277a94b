"""LayerWaits: SGLang's counter of layers, over the loads of a batch.

    begin       the loads of the next batch have begun; SGLang gives their number to the batch
    consume     the batch with this number computes now; -1: one without loads
    wait        before a layer is read, compute waits on the device until it has come
    finish      behind the forward: whether all of them have ended well

A load that fails does not stop the forward, which computes nonsense: SGLang asks for the outcome before it uses that.
"""

from collections.abc import Sequence
from contextlib import suppress

from cpu_prefix_cache.by_keys import CopyFailed, LoadHandle


class LayerWaits:
    def __init__(self) -> None:
        self.consumer_index = -1  # SGLang reads it
        self._loads: dict[int, Sequence[LoadHandle]] = {}
        self._begun = 0

    def begin(self, loads: Sequence[LoadHandle]) -> int:
        self._begun += 1
        self._loads[self._begun] = loads
        return self._begun

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        for load in self._loads.get(self.consumer_index, ()):
            with suppress(CopyFailed):
                load.hold_compute(layer)

    def finish(self, index: int) -> bool:
        """Wait for all of them, also behind one that has failed: then nothing writes to their blocks any more."""
        outcomes = [load.wait() for load in self._loads.pop(index, ())]
        return all(outcomes)
