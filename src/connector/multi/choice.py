"""Choice of the hit that is loaded, if several caches stand beside each other: that which saves most time.

    saved = tokens / prefill rate - (queue + bytes) / load rate - overhead        (cpu_prefix_cache/tiers/time_saved.py)

Computing saves nothing, and wins where loading would take longer. If two save the same, the first one loads.

A cache may not know yet what it has. It is waited for as long as it could win, and no longer than

    its patience                 what the operator allows for it; 0 for one that has not kept to it
    what waiting could bring     what it would save at most, less what the best of the known hits saves

The second means that waiting is a cost, too: a hit that comes after as much time as it could save is no better than
what was known at once.

>>> near = Speed(rate=50e9, overhead=0.008)
>>> far = Speed(rate=5e9, overhead=0.030)
>>> prompt = Prompt(most_tokens=8192, bytes_per_token=131_072, prefill=38_000)
>>> decide([Answer(1024, near), Answer(8192, far)], prompt)  # 16 and -29 ms
Decision(winner=0, waits_for=())
>>> decide([Answer(256, near), Answer(8192, far)], prompt)  # both take longer than computing
Decision(winner=None, waits_for=())

>>> asked = [Answer(1024, near), Answer(None, near, patience=0.5)]
>>> decide(asked, prompt, waited=0.0)  # the second could save 186 ms
Decision(winner=0, waits_for=(1,))
>>> decide(asked, prompt, waited=0.2)
Decision(winner=0, waits_for=())
"""

from collections.abc import Sequence
from typing import NamedTuple

from cpu_prefix_cache.deciding import seconds_saved


class Speed(NamedTuple):
    """How fast a cache loads: bytes a second, seconds that each load takes besides, and bytes that are before it."""

    rate: float
    overhead: float
    queue_bytes: float = 0


class Answer(NamedTuple):
    """How many tokens a cache has of a prompt beyond what the device has; None if it does not know yet."""

    tokens: int | None
    speed: Speed
    patience: float = 0  # seconds


class Prompt(NamedTuple):
    """Limit of a hit on a prompt, what is loaded for a token, and how many are computed in a second."""

    most_tokens: int
    bytes_per_token: float
    prefill: float

    def saved(self, tokens: int, speed: Speed) -> float:
        """Seconds."""
        num_bytes = tokens * self.bytes_per_token
        return seconds_saved(tokens, num_bytes, prefill=self.prefill, **speed._asdict())


class Decision(NamedTuple):
    """The cache that saves most of those that know, and the one that is waited for; None: computing does.

    As long as somebody is waited for, nothing is loaded.
    """

    winner: int | None
    waits_for: tuple[int, ...]


def decide(answers: Sequence[Answer], prompt: Prompt, waited: float = 0) -> Decision:
    """`waited` is the time since the first query of the caches."""
    winner, best = None, 0.0
    for at, answer in enumerate(answers):
        if answer.tokens and (saved := prompt.saved(answer.tokens, answer.speed)) > best:
            winner, best = at, saved
    waits_for = (
        at
        for at, answer in enumerate(answers)
        if answer.tokens is None
        and waited < min(answer.patience, prompt.saved(prompt.most_tokens, answer.speed) - best)
    )
    return Decision(winner, tuple(waits_for))
