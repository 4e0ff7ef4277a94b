"""Results of replaying a trace: counts and ratios."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest


@dataclass(slots=True)
class Tally:
    """Counts of one replay. A hit is contiguous from the beginning of the prompt.

    `hit_blocks` and `hit` are hits in any tier, `loaded_blocks` and `loaded` those that came from the host, also if it
    had them from the tier below, as it had `below_hit_blocks`. `below_loaded_blocks` were read from there, with what
    they hang below. `unsaved` blocks left the host before they could be written, and `declined` requests were told that
    reading takes longer than computing.
    """

    hit_blocks: int = 0
    hit: Work = field(default_factory=Work)
    stored_blocks: int = 0
    loaded_blocks: int = 0
    loaded: Work = field(default_factory=Work)
    evictions: int = 0
    lost_before_store: int = 0
    below_hit_blocks: int = 0
    below_loaded_blocks: int = 0
    below_stored_blocks: int = 0
    unsaved: int = 0
    declined: int = 0

    def count_all(self, trace: Trace, meter: Meter, serve: Callable[[TraceRequest], int]) -> None:
        """Add the requests of a trace, one after the other: `serve` has how many first blocks of one were found."""
        for requests in meter.slices(trace.requests):
            for request in requests:
                self.count(request, serve(request), trace.block_tokens)

    def count(self, request: TraceRequest, hit: int, block_tokens: int) -> None:
        """Add a request whose first `hit` blocks were found."""
        self.hit_blocks += hit
        self.hit.add(0, min(hit * block_tokens, request.tokens))

    def all_hits_were_loaded(self) -> None:
        """Sentence for replays without a device."""
        self.loaded_blocks, self.loaded = self.hit_blocks, self.hit


@dataclass(frozen=True, slots=True)
class Ratios:
    """The shares of all blocks, of all tokens, and of the time to compute them, that were found; the last if known."""

    block_hit_ratio: float = 0.0
    token_hit_ratio: float = 0.0
    time_hit_ratio: float | None = 0.0

    @classmethod
    def of(cls, tally: Tally, trace: Trace, even_depth: float = math.inf) -> "Ratios":
        return cls(
            tally.hit_blocks / max(1, trace.blocks),
            tally.hit.share_of(trace.work, math.inf),
            None if math.isinf(even_depth) else tally.hit.share_of(trace.work, even_depth),
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one replay. `device_capacity` and `offload` are None without a device tier, and `below_capacity`
    and `below_offload` without one below the host. Capacities are blocks.

    `seconds` is the time of the replay loop alone, `seconds_saved` those of prefill, `share_saved` what that is of all
    prefill, and `money_saved` what it costs; None without rates, or without a price.
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
    share_saved: float | None = None
    money_saved: float | None = None
