"""Prefill seconds that a cache saves in a replay, by arithmetic with rates that somebody has measured or estimated.

    saved = seconds to compute what was loaded - loaded bytes / host rate - bytes read from below / below rate
    seconds to compute = (tokens + pairs / even depth) / prefill rate

Pairs and the even depth are those of `prefill_work.py`. The prefill rate is that at the beginning of a prompt.

Checked with vLLM 0.32 on an H200 (docs/policies.md): from 214 ms for 8,224 tokens follow 1,194 for 32,800; measured
1,188.

What is loaded crosses the link from the host to the device, also if it came from below. What the device has already
saves nothing by the host. Requests come one after the other, so nothing waits; the fixed cost of a load is left out.

A tier is not read where that takes longer than computing (`tiers/time_saved.py`): its blocks then count as missed.

>>> prompt, end = Work(), Work()
>>> prompt.add(0, 8192), end.add(8192 - 512, 8192)
(None, None)
>>> rates = Rates(prefill_tokens=44_000, even_depth=26_600, host_bytes=54e9, block_bytes=512 * 131_072)
>>> [round(rates.seconds(work) / work.tokens * 1e6, 1) for work in (prompt, end)]  # microseconds a token
[26.2, 29.5]
>>> round(rates.saved(prompt, loaded=16), 3)
0.195
"""

import math
from dataclasses import dataclass

from cpu_prefix_cache.tiers.time_saved import Candidate, best
from cpu_prefix_cache.tools.replay.prefill_work import Work

SECONDS_AN_HOUR = 3600


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens and bytes a second, and the bytes of a block.

    If the even depth is not known, every token takes as long; if a rate of bytes is not, they take no time.
    `gpu_price` is that of an hour of what computes at this rate, and `source` is the origin of the rate.
    """

    prefill_tokens: float
    even_depth: float = math.inf
    host_bytes: float = math.inf
    below_bytes: float | None = None
    block_bytes: int = 0
    block_tokens: int = 1
    gpu_price: float | None = None
    source: str = "given"

    def seconds(self, work: Work) -> float:
        """To compute this."""
        return work.at_start(self.even_depth) / self.prefill_tokens

    def saved(self, work: Work, loaded: int, read: int = 0) -> float:
        """Seconds. `work` was not done, because `loaded` blocks came to the device, `read` of them from below."""
        seconds = self.seconds(work) - loaded * self.block_bytes / self.host_bytes
        return seconds if self.below_bytes is None else seconds - read * self.block_bytes / self.below_bytes

    def money(self, seconds: float) -> float | None:
        return None if self.gpu_price is None else seconds / SECONDS_AN_HOUR * self.gpu_price

    @property
    def below_blocks(self) -> float | None:
        """Blocks a second that are read from below."""
        return None if self.below_bytes is None else self.below_bytes / self.block_bytes

    def mean_tokens(self, work: Work) -> float:
        """Tokens a second that a cache in service measures, which has computed all this."""
        return work.tokens / self.seconds(work)

    def even_bytes(self, work: Work) -> float:
        """Bytes a second at which reading is as fast as computing, on average."""
        return self.block_bytes / self.block_tokens * self.mean_tokens(work)

    def is_worth_reading(self, blocks: int, mean_tokens: float) -> bool:
        """Whether reading so many blocks from below takes less time than computing them."""
        candidate = Candidate(blocks, blocks * self.block_tokens, blocks * self.block_bytes)
        return best([candidate], prefill=mean_tokens, rate=self.below_bytes, queue_bytes=0) is not None
