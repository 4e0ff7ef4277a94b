"""A kind of group that the library does not have: a window, and the first tokens of the prompt (attention sinks).

It is all that an engine with such layers would write. What it needs has a hole, which no kind of the library has.
"""

from dataclasses import dataclass
from typing import ClassVar

from cpu_prefix_cache.deciding import Group


@dataclass(frozen=True, kw_only=True)
class SinkGroup(Group):
    """A token sees `window_tokens` tokens, its own included, and the first `sink_tokens`."""

    kind: ClassVar[str] = "sink"
    window_tokens: int
    sink_tokens: int

    def needed(self, boundary: int) -> list[int]:
        end = boundary // self.block_tokens
        sinks = min(end, -(-self.sink_tokens // self.block_tokens))
        first = max(0, boundary - self.window_tokens + 1) // self.block_tokens
        return [*range(sinks), *range(max(sinks, first), end)]

    @property
    def spelled(self) -> dict[str, str | int]:
        return super().spelled | {"window tokens": self.window_tokens, "sink tokens": self.sink_tokens}
