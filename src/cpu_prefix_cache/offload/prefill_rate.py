"""How fast an engine computes prompts, from the steps that it has timed.

The rate is that of the second fastest of the last steps: most slow steps are slow for other reasons than their tokens,
and the fastest may have been timed wrongly.

>>> rate = PrefillRate()
>>> rate.tokens_per_second is None
True
>>> [rate.timed(4_000, seconds) for seconds in (0.5, 0.25, 0.125)], rate.timed(20, 0.001)
([True, True, True], False)
>>> rate.tokens_per_second
16000.0
"""

from collections import deque

MIN_TIMED_TOKENS = 1024  # a step of fewer tokens takes as long as a step takes at least, so it measures no rate
STEPS_REMEMBERED = 32  # some seconds of prefill


class PrefillRate:
    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=STEPS_REMEMBERED)  # tokens a second

    @property
    def tokens_per_second(self) -> float | None:
        """None until two steps were measured."""
        return sorted(self._steps)[-2] if len(self._steps) >= 2 else None

    def timed(self, tokens: int, seconds: float) -> bool:
        """A step has computed so many tokens in so many seconds. Whether that is enough to measure a rate."""
        tells = tokens >= MIN_TIMED_TOKENS and seconds > 0
        if tells:
            self._steps.append(tokens / seconds)
        return tells
