"""Cost of prefill, as a count of tokens at the beginning of a prompt.

A *pair* is a token and one that it attends to, so tokens deep in a prompt have many. At the *even depth* a token's
attention takes as long as everything else of it: 26,624 tokens in Llama 3.1 8B (`flops.py`).

>>> end = Work()
>>> end.add(26_623, 26_624)
>>> end.at_start(even_depth=26_624)
2.0
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Work:
    """Cost of computing tokens of prompts: `pairs` of such a token with one that it attends to, itself included."""

    tokens: int = 0
    pairs: int = 0

    def add(self, start: int, stop: int) -> None:
        """Add the tokens [start, stop) of a prompt."""
        self.tokens += stop - start
        self.pairs += (stop * (stop + 1) - start * (start + 1)) // 2

    def at_start(self, even_depth: float) -> float:
        """As many tokens at the beginning of a prompt take as long."""
        return self.tokens + self.pairs / even_depth

    def share_of(self, whole: "Work", even_depth: float) -> float:
        return self.at_start(even_depth) / max(1.0, whole.at_start(even_depth))
