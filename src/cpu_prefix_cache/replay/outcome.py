"""Results of replaying a trace: counts, ratios and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpu_prefix_cache.replay.traces import Trace, TraceRequest


@dataclass(slots=True)
class Tally:
    """Counts of one replay. A hit is contiguous from the beginning of the prompt.

    `hit_blocks` and `hit_tokens` are hits in any tier, `loaded_blocks` those that came from the host.
    """

    hit_blocks: int = 0
    hit_tokens: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evictions: int = 0
    lost_before_store: int = 0

    def count(self, request: TraceRequest, hit: int, block_tokens: int) -> None:
        """Add a request whose first `hit` blocks were found."""
        self.hit_blocks += hit
        self.hit_tokens += min(hit * block_tokens, request.tokens)


@dataclass(frozen=True, slots=True)
class Ratios:
    """The shares of all blocks and of all tokens of a trace that were found."""

    block_hit_ratio: float
    token_hit_ratio: float

    @classmethod
    def of(cls, tally: Tally, trace: Trace) -> "Ratios":
        return cls(tally.hit_blocks / max(1, trace.blocks), tally.hit_tokens / max(1, trace.tokens))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one replay. `device_capacity` and `offload` are None without a device tier. Capacities are blocks.

    `seconds` is the time of the replay loop alone.
    """

    policy: str
    capacity: int
    device_capacity: int | None
    offload: str | None
    tally: Tally
    ratios: Ratios
    trace_blocks: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity,
            "device_capacity_blocks": self.device_capacity,
            "offload": self.offload,
            "block_hit_ratio": self.ratios.block_hit_ratio,
            "token_hit_ratio": self.ratios.token_hit_ratio,
            "stored_blocks": self.tally.stored_blocks,
            "loaded_blocks": self.tally.loaded_blocks,
            "evictions": self.tally.evictions,
            "trace_blocks": self.trace_blocks,
            "seconds": self.seconds,
        }


def as_json(trace: Trace, ideal: Ratios, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The contents of the file that `--json` writes."""
    return {
        "traces": trace.paths,
        "ideal": {"block_hit_ratio": ideal.block_hit_ratio, "token_hit_ratio": ideal.token_hit_ratio},
        "results": [outcome.as_json() for outcome in outcomes],
    }
