"""When is a load worth its while? A few tokens are computed sooner than they are fetched.

    seconds
      |            / computed: tokens / prefill rate
      |          /            ________ loaded: overhead + tokens * bytes / load rate
      |  ______/______-------
      |      /
      +-----+------------------> tokens
            `- least_tokens

Both rates are facts of the machine and of the model. While one of them is not known every load counts as worth it.

>>> least_tokens(bytes_per_token=131_072, load_bytes_per_second=54e9, prefill_tokens_per_second=38_000)
335
>>> least_tokens(bytes_per_token=131_072, load_bytes_per_second=4e9, prefill_tokens_per_second=38_000) is None
True
"""

from math import ceil

# What a load costs beside its time on the link: a step to begin it, one to hear of it, one to go on. In the shape of
# Llama-3.1-8B on one H200, 8,192 tokens: 43 ms from the host, less 20 on the link, and 15 when they are on the device.
OVERHEAD_SECONDS = 0.008

# Steps of fewer tokens say nothing of the rate: they take what a step takes at least.
TELLING_TOKENS = 1024


def least_tokens(bytes_per_token: float, load_bytes_per_second: float, prefill_tokens_per_second: float) -> int | None:
    """The shortest prefix that is loaded sooner than computed; None if none is."""
    gained = 1 / prefill_tokens_per_second - bytes_per_token / load_bytes_per_second
    return ceil(OVERHEAD_SECONDS / gained) if gained > 0 else None


class PrefillRate:
    """Tokens per second, of the fastest step so far: what slows a step down is mostly not its tokens."""

    def __init__(self) -> None:
        self.tokens_per_second: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens >= TELLING_TOKENS and seconds > 0:
            self.tokens_per_second = max(self.tokens_per_second or 0.0, tokens / seconds)
