"""Results of replaying a trace: counts, ratios and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cpu_prefix_cache.replay.traces import Trace, TraceRequest


@dataclass(slots=True)
class Tally:
    """Counts of one replay. A hit is contiguous from the beginning of the prompt.

    `hit_blocks` and `hit_tokens` are hits in any tier, `loaded_blocks` those that came from the host, also if it had
    them from the tier below, as it had `below_hit_blocks`. `below_loaded_blocks` were read from there, with what they
    hang below. `unsaved` blocks left the host before they could be written, and `declined` requests were told that
    reading takes longer than computing.
    """

    hit_blocks: int = 0
    hit_tokens: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    evictions: int = 0
    lost_before_store: int = 0
    below_hit_blocks: int = 0
    below_loaded_blocks: int = 0
    below_stored_blocks: int = 0
    unsaved: int = 0
    declined: int = 0

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
    """The result of one replay. `device_capacity` and `offload` are None without a device tier, and `below_capacity`
    and `below_offload` without one below the host. Capacities are blocks.

    `seconds` is the time of the replay loop alone, `seconds_saved` those of prefill; None without rates.
    """

    policy: str
    capacity: int
    device_capacity: int | None
    offload: str | None
    tally: Tally
    ratios: Ratios
    trace_blocks: int
    seconds: float
    below_capacity: int | None = None
    below_offload: str | None = None
    seconds_saved: float | None = None

    def as_json(self) -> dict[str, Any]:
        values = {
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
        if self.below_capacity is not None:
            values |= self._below_as_json()
        if self.seconds_saved is not None:
            values["prefill_seconds_saved"] = self.seconds_saved
        return values

    def _below_as_json(self) -> dict[str, Any]:
        tally, blocks = self.tally, max(1, self.trace_blocks)
        return {
            "below_capacity_blocks": self.below_capacity,
            "below_offload": self.below_offload,
            "block_hit_ratio_by_tier": {
                "device": (tally.hit_blocks - tally.loaded_blocks) / blocks,
                "host": (tally.loaded_blocks - tally.below_hit_blocks) / blocks,
                "below": tally.below_hit_blocks / blocks,
            },
            "loaded_from_below_blocks": tally.below_loaded_blocks,
            "stored_below_blocks": tally.below_stored_blocks,
            "unsaved_blocks": tally.unsaved,
            "requests_not_worth_reading": tally.declined,
        }


def as_json(trace: Trace, ideal: Ratios, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The contents of the file that `--json` writes."""
    return {
        "traces": trace.paths,
        "ideal": {"block_hit_ratio": ideal.block_hit_ratio, "token_hit_ratio": ideal.token_hit_ratio},
        "results": [outcome.as_json() for outcome in outcomes],
    }
