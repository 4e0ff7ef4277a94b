"""Prefill seconds that a cache saves in a replay, by arithmetic with rates that somebody has measured.

    saved = loaded tokens / prefill rate - loaded bytes / host rate - bytes read from below / below rate

What is loaded crosses the link from the host to the device, also if it came from below. What the device has already
saves nothing by the host. Requests come one after the other, so nothing waits; the fixed cost of a load is left out.

A tier is not read where that takes longer than computing (`tiers/time_saved.py`): its blocks then count as missed.

>>> rates = Rates(prefill_tokens=38_000, host_bytes=54e9, below_bytes=7e9, block_bytes=512 * 131_072, block_tokens=512)
>>> round(rates.saved(loaded=100, read=0), 2), round(rates.saved(loaded=100, read=100), 2)
(1.22, 0.26)
>>> rates.is_worth_reading(100), rates.is_worth_reading(1)
(True, False)
"""

from dataclasses import dataclass

from cpu_prefix_cache.tiers.time_saved import Candidate, best


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens and bytes a second, and what a block has of both. `below_bytes` is None without a tier below."""

    prefill_tokens: float
    host_bytes: float
    below_bytes: float | None
    block_bytes: int
    block_tokens: int

    def saved(self, loaded: int, read: int) -> float:
        """Seconds. `loaded` blocks came to the device, `read` blocks to the host from below."""
        seconds = loaded * (self.block_tokens / self.prefill_tokens - self.block_bytes / self.host_bytes)
        return seconds if self.below_bytes is None else seconds - read * self.block_bytes / self.below_bytes

    @property
    def below_blocks(self) -> float | None:
        """Blocks a second that are read from below."""
        return None if self.below_bytes is None else self.below_bytes / self.block_bytes

    @property
    def even(self) -> float:
        """Bytes a second at which reading is as fast as computing."""
        return self.block_bytes / self.block_tokens * self.prefill_tokens

    def is_worth_reading(self, blocks: int) -> bool:
        """Whether reading so many blocks from below takes less time than computing them."""
        candidate = Candidate(blocks, blocks * self.block_tokens, blocks * self.block_bytes)
        return best([candidate], prefill=self.prefill_tokens, rate=self.below_bytes, queue_bytes=0) is not None
