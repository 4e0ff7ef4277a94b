"""How far a tier is read for a request: to the boundary where most time is saved.

    saved = tokens / prefill rate - (queue + bytes / read rate) - overhead

A tier is often slower than the GPU: with 131,072 bytes and 38,000 tokens a second (Llama 3.1 8B on an H200) reading
pays from 5 GB/s on. While one of the rates is not known, everything is read, and so the rates are measured.

>>> far = Candidate(boundary=8192, tokens=8192, num_bytes=1 << 30)
>>> best([far], prefill=38_000, rate=7e9, queue_bytes=0) == far, best([far], prefill=38_000, rate=2e9, queue_bytes=0)
(True, None)
>>> best([far], prefill=38_000, rate=7e9, queue_bytes=2 << 30)  # others are read first
>>> best([far], prefill=None, rate=2e9, queue_bytes=0) == far
True
"""

from collections.abc import Sequence
from typing import NamedTuple

# Cost of a promotion besides its time: two steps until it is planned and seen to have ended, and then what a load
# from the host costs (break_even.py).
OVERHEAD_SECONDS = 0.016


class Candidate(NamedTuple):
    """A boundary up to which the tier could be read: what that brings beyond the host, and what is read for it."""

    boundary: int
    tokens: int
    num_bytes: int


def best(
    candidates: Sequence[Candidate], *, prefill: float | None, rate: float | None, queue_bytes: int
) -> Candidate | None:
    """The one that saves most; None if none saves anything. `prefill` is in tokens a second, `rate` in bytes."""
    if prefill is None or rate is None:
        return max(candidates, key=lambda each: each.tokens, default=None)

    def saved(candidate: Candidate) -> float:
        return seconds_saved(
            candidate.tokens,
            candidate.num_bytes,
            prefill=prefill,
            rate=rate,
            queue_bytes=queue_bytes,
            overhead=OVERHEAD_SECONDS,
        )

    winner = max(candidates, key=saved, default=None)
    return winner if winner is not None and saved(winner) > 0 else None


def seconds_saved(
    tokens: int, num_bytes: float, *, prefill: float, rate: float, queue_bytes: float, overhead: float
) -> float:
    """Seconds saved by reading so many bytes in place of computing so many tokens; negative if it takes longer."""
    return tokens / prefill - (queue_bytes + num_bytes) / rate - overhead
