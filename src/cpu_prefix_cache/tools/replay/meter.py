"""A progress bar for a replay, and a clock that does not count the time to draw it."""

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cpu_prefix_cache.tools.replay.traces import TraceRequest

if TYPE_CHECKING:
    from tqdm import tqdm

SLICES = 50  # updates of the bar in one replay


class Meter:
    """Measures one replay. `seconds` is the time of its loop so far, including garbage collections.

    Objects that exist before the loop, mostly the trace, are frozen (`gc.freeze`), which engines should do, too.
    """

    def __init__(self, label: str, blocks: int) -> None:
        self._label = label
        self._blocks = blocks
        self.seconds = 0.0

    def slices(self, requests: Sequence[TraceRequest]) -> Iterator[Sequence[TraceRequest]]:
        """The requests in order, in slices. The clock runs while the caller handles a slice."""
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

    def _bar(self) -> "tqdm":
        """Shown on terminals only."""
        from tqdm import tqdm  # here, since it takes its time, also that of commands without replays

        no_stderr = sys.stderr is None
        return tqdm(
            total=self._blocks, desc=self._label, unit="blocks", leave=False, disable=True if no_stderr else None
        )
