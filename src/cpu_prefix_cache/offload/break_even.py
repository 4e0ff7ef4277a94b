"""When is a load worth its while? A few tokens are computed sooner than they are fetched.

    seconds
      |            / computed: tokens / prefill rate
      |          /            ________ loaded: overhead + tokens * bytes / load rate
      |  ______/______-------
      |      /
      +-----+------------------> tokens
            `- least_tokens

Both rates are facts of the machine and of the model. While one of them is not known every load counts as worth it. The
load rate is that of the slowest rank. The prefill rate is that of the second fastest of the last steps: what slows a
step down is mostly not its tokens, and a step that was timed wrongly, and seems to be the fastest, counts for nothing.

>>> least_tokens(bytes_per_token=131_072, load_bytes_per_second=54e9, prefill_tokens_per_second=38_000)
335
>>> least_tokens(bytes_per_token=131_072, load_bytes_per_second=4e9, prefill_tokens_per_second=38_000) is None
True
"""

import logging
from collections import deque
from math import ceil

from cpu_prefix_cache.messages.errors import ConfigurationError

logger = logging.getLogger(__name__)

# What a load costs beside its time on the link: a step to begin it, one to hear of it, one to go on. In the shape of
# Llama-3.1-8B on one H200, 8,192 tokens: 43 ms from the host, less 20 on the link, and 15 when they are on the device.
OVERHEAD_SECONDS = 0.008

# Steps of fewer tokens say nothing of the rate: they take what a step takes at least.
TELLING_TOKENS = 1024
STEPS_REMEMBERED = 32  # of those that tell: some seconds of prefill

# What a link is taken to carry before a rank has said what it loads at: PCIe 4.0 with 16 lanes.
USUAL_BYTES_PER_SECOND = 25e9
NEVER = 1 << 62  # more tokens than anybody has


def least_tokens(bytes_per_token: float, load_bytes_per_second: float, prefill_tokens_per_second: float) -> int | None:
    """The shortest prefix that is loaded sooner than computed; None if none is."""
    gained = 1 / prefill_tokens_per_second - bytes_per_token / load_bytes_per_second
    return ceil(OVERHEAD_SECONDS / gained) if gained > 0 else None


class BreakEven:
    """From how many tokens on a load is worth its while: `said`, or what follows from both rates if that is None.

    `bytes_per_token` is what a token's chunks weigh on each of `ranks` ranks.

    Raises ConfigurationError for a negative number of tokens.
    """

    def __init__(self, said: int | None, bytes_per_token: float, ranks: int) -> None:
        if said is not None and said < 0:
            raise ConfigurationError(f"min_load_tokens must be at least 0, got {said}")
        self._said = said
        self._bytes_per_token = bytes_per_token
        self._ranks = ranks
        self._loads: dict[int, float] = {}  # bytes a second of the ranks that know theirs
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)  # tokens a second
        self._least = said or 0
        self._has_warned = False

    @property
    def least_tokens(self) -> int:
        """The shortest load that is worth it, in tokens."""
        return self._least

    @property
    def load_bytes_per_second(self) -> float:
        """What the slowest rank is known to load at, or what is usual."""
        return min(self._loads.values(), default=USUAL_BYTES_PER_SECOND)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens in so many seconds."""
        if tokens >= TELLING_TOKENS and seconds > 0:
            self._steps.append(tokens / seconds)
            self._weigh()

    def loads_at(self, rank: int, bytes_per_second: float) -> None:
        """A rank knows what it loads at."""
        if self._loads.get(rank) != bytes_per_second:
            self._loads[rank] = bytes_per_second
            self._weigh()

    def _weigh(self) -> None:
        if self._said is not None or len(self._steps) < 2 or len(self._loads) < self._ranks:
            return
        prefill = sorted(self._steps)[-2]
        least = least_tokens(self._bytes_per_token, self.load_bytes_per_second, prefill)
        self._least = NEVER if least is None else least
        if least is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "nothing is loaded from the host: at %.0f tokens a second prefixes are computed sooner than they are "
                "fetched at %.1f GB/s; min_load_tokens=0 loads them all the same",
                *(prefill, self.load_bytes_per_second / 1e9),
            )
