"""LayerWaits: SGLang's counter of layers, over the loads that have begun for a forward.

    wait_until   before a layer is read, compute waits on the device until it has come
    finish       behind that forward: whether all of them have ended well

SGLang finishes the loads of a batch before it builds the next one. A load that fails does not stop the forward, which
computes nonsense: SGLang asks for the outcome before it uses that.
"""

from collections.abc import Sequence
from contextlib import suppress

from cpu_prefix_cache.by_keys import CopyFailed, LoadHandle


class LayerWaits:
    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers  # SGLang waits for the last of them before a forward in one CUDA graph
        self.consumer_index = -1  # at least 0 where a forward has loads
        self.loads: Sequence[LoadHandle] = ()

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        for load in self.loads:
            with suppress(CopyFailed):
                load.hold_compute(layer)

    def finish(self) -> bool:
        """Wait for all of them, also behind one that has failed: then nothing writes to their blocks any more."""
        outcomes = [load.wait() for load in self.loads]
        self.loads = ()
        return all(outcomes)
