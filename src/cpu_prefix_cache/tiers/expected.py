"""Prompts that hints expect, the oldest first. A hint may be wrong, and many may come.

    expected    --first, when nobody waits for the tier--> read
      `--- it is SECONDS old --> forgotten

While there are MOST of them, no other is noted.

What is read for hints in SECONDS takes at most the blocks that wants may hold at once.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from cpu_prefix_cache.messages.request import Request

SECONDS, MOST = 60.0, 64


@dataclass(frozen=True, slots=True)
class ExpectedPrompt(Request):
    """Prompt that a hint expects: nobody has requested it yet."""


class Expected:
    """`blocks` are the most that are promoted for hints in SECONDS."""

    def __init__(self, blocks: int) -> None:
        self._blocks = self._left = blocks
        self._since = -inf  # when all of them were left
        self._numbers = count()
        self._prompts = deque[tuple[ExpectedPrompt, float]]()  # with the time of the hint

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def add(self, keys: Sequence[bytes], num_tokens: int, now: float) -> None:
        if len(self._prompts) < MOST:
            self._prompts.append((ExpectedPrompt(("expected", next(self._numbers)), keys, num_tokens), now))

    def first(self, now: float) -> ExpectedPrompt | None:
        """The first prompt that is not too old; those before it are forgotten."""
        if now >= self._since + SECONDS:
            self._since, self._left = now, self._blocks
        while self._prompts and now >= self._prompts[0][1] + SECONDS:
            self._prompts.popleft()
        return self._prompts[0][0] if self._prompts else None

    def has_room(self, blocks: int) -> bool:
        return blocks <= self._left

    def promoted(self, blocks: int) -> None:
        """So many blocks are on the host for a hint."""
        self._left -= blocks

    def done(self, request: Request) -> None:
        """Nothing more is read for this prompt, which is the first, or forgotten."""
        if self._prompts and self._prompts[0][0] is request:
            self._prompts.popleft()
