"""A progress bar for a replay, and a clock that stands still while the bar moves."""

import gc
import sys
import time
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from cpu_prefix_cache.replay.traces import TraceRequest

SLICES = 50  # of one replay: the bar moves so often


class Meter:
    """Of one replay. `seconds` is the time its loop has taken so far, with the garbage collector at work.

    What is there before the loop begins, mostly the trace, is frozen out of the collector's sight: the README advises
    engines to do the same.
    """

    def __init__(self, label: str, blocks: int) -> None:
        self._label = label
        self._blocks = blocks
        self.seconds = 0.0

    def slices(self, requests: Sequence[TraceRequest]) -> Iterator[Sequence[TraceRequest]]:
        """The requests in order, slice by slice. The clock runs while the caller has one."""
        size = max(1, -(-len(requests) // SLICES))
        gc.collect()
        gc.freeze()
        try:
            with self._bar() as bar:
                for start in range(0, len(requests), size):
                    some = requests[start : start + size]
                    began = time.perf_counter()
                    yield some
                    self.seconds += time.perf_counter() - began
                    bar.update(sum(len(request.keys) for request in some))
        finally:
            gc.unfreeze()

    def _bar(self) -> tqdm:
        """Shown on terminals only."""
        no_stderr = sys.stderr is None
        return tqdm(
            total=self._blocks, desc=self._label, unit="blocks", leave=False, disable=True if no_stderr else None
        )
