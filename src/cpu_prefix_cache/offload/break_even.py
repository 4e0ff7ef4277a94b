"""From how many tokens on a load is faster than computing them again.

    seconds
      |            / computed: tokens / prefill rate
      |          /            ________ loaded: overhead + tokens * bytes / load rate
      |  ______/______-------
      |      /
      +-----+------------------> tokens
            `- least_tokens

Both rates are measured. Until both are known every load counts as faster. The load rate is that of the slowest rank,
the prefill rate that of `prefill_rate.py`.

>>> least_tokens(bytes_per_token=131_072, load_bytes_per_second=54e9, prefill_tokens_per_second=38_000)
335
>>> least_tokens(bytes_per_token=131_072, load_bytes_per_second=4e9, prefill_tokens_per_second=38_000) is None
True
"""

import logging
from math import ceil

from cpu_prefix_cache.offload.prefill_rate import PrefillRate

logger = logging.getLogger(__name__)

# Cost of a load besides its time on the link: a step each to begin, to report and to go on. Measured with the shape
# of Llama-3.1-8B on one H200, 8,192 tokens: 43 ms from the host, less 20 on the link, and 15 if they are on the device.
OVERHEAD_SECONDS = 0.008

USUAL_BYTES_PER_SECOND = 25e9  # assumed until a rank has reported its rate: PCIe 4.0 with 16 lanes
NEVER = 1 << 62  # tokens: more than any request has


def least_tokens(bytes_per_token: float, load_bytes_per_second: float, prefill_tokens_per_second: float) -> int | None:
    """The shortest prefix that is loaded sooner than computed; None if none is."""
    gained = 1 / prefill_tokens_per_second - bytes_per_token / load_bytes_per_second
    return ceil(OVERHEAD_SECONDS / gained) if gained > 0 else None


class BreakEven:
    """The shortest load that is faster than computing: the `fixed` one, or, if that is None, what both rates make it.

    `bytes_per_token` is how many bytes of chunks a token has on each of `ranks` ranks.
    """

    def __init__(self, fixed: int | None, bytes_per_token: float, ranks: int) -> None:
        self._fixed = fixed
        self._bytes_per_token = bytes_per_token
        self._ranks = ranks
        self._loads: dict[int, float] = {}  # rank -> bytes a second
        self._prefill = PrefillRate()
        self.least_tokens = fixed or 0
        self._has_warned = False

    @property
    def has_load_rate(self) -> bool:
        """Whether every rank has reported a rate."""
        return len(self._loads) == self._ranks

    @property
    def load_bytes_per_second(self) -> float:
        """The rate of the slowest rank that has reported one, or what is usual."""
        return min(self._loads.values(), default=USUAL_BYTES_PER_SECOND)

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """How fast prompts are computed; None until that was measured."""
        return self._prefill.tokens_per_second

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so many seconds."""
        if self._prefill.timed(tokens, seconds):
            self._weigh()

    def loads_at(self, rank: int, bytes_per_second: float) -> None:
        """A rank has measured its load rate."""
        if self._loads.get(rank) != bytes_per_second:
            self._loads[rank] = bytes_per_second
            self._weigh()

    def _weigh(self) -> None:
        prefill = self.prefill_tokens_per_second
        if self._fixed is not None or prefill is None or not self.has_load_rate:
            return
        least = least_tokens(self._bytes_per_token, self.load_bytes_per_second, prefill)
        self.least_tokens = NEVER if least is None else least
        if least is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "nothing is loaded from the host: at %.0f tokens a second prefixes are computed sooner than they are "
                "fetched at %.1f GB/s; min_load_tokens=0 loads them all the same",
                prefill,
                self.load_bytes_per_second / 1e9,
            )
