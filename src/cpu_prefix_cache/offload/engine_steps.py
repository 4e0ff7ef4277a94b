"""How an engine steps: how many blocks one step can allocate, and after how many steps a copy is reported.

    step N        allocates up to `blocks`; its plan has the ranks store
    step N + R    gets their report, if the copy took no longer than step N; R is `report_steps`

So what steps N to N + R can hand out has to be covered before: that is how far lazy offload looks ahead.
"""

from dataclasses import dataclass

from cpu_prefix_cache.messages.numbers import check_whole
from cpu_prefix_cache.model.planner import HybridChunkPlanner


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSteps:
    """Bounds on one step of an engine.

    A step computes at most `max_tokens` tokens, and at most `decode_tokens` of a decoding request. A copy that ends
    with its step is reported `report_steps` steps later.

    `groups` is 0 for an engine that allocates whole chunks. For one that allocates blocks as tokens come, it is the
    number of groups, in each of which every request may begin a block, and `blocks_per_chunk` is how many of these
    blocks a chunk takes (default: one in each group).

    With `asks_in_decode` false, and if the model needs no checkpoints, a decoding request is not due before its end.
    Nothing is lost by that: its blocks cannot be evicted before.

    `ahead_blocks` overrides how many device blocks lazy looks at: at most as many as the device has.

    Raises ConfigurationError for numbers below 1 (`groups`: below 0).
    """

    max_tokens: int = 8192
    decode_tokens: int = 1
    report_steps: int = 1
    groups: int = 0
    blocks_per_chunk: int | None = None
    asks_in_decode: bool = True
    ahead_blocks: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("max_tokens", 1),
            ("decode_tokens", 1),
            ("report_steps", 1),
            ("groups", 0),
            ("blocks_per_chunk", 1),
            ("ahead_blocks", 1),
        ):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, least)

    def blocks(self, planner: HybridChunkPlanner, running: int) -> int:
        """How many device blocks a step can allocate while `running` requests run."""
        chunks = -(-self.max_tokens // planner.grid_tokens)
        if not self.groups:
            return chunks * max(1, planner.device_blocks_per_chunk)
        return chunks * (self.blocks_per_chunk or self.groups) + running * self.groups

    def stretch(self, step_blocks: int, device_blocks: int) -> int:
        """How many device blocks have to be covered, if a step can allocate `step_blocks`; at most half of the device.

        They last for the next step, and for those until a store that is planned in it is reported.
        """
        return max(1, min((1 + self.report_steps) * step_blocks, device_blocks // 2))


USUAL_STEPS = EngineSteps()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """Traits of an engine that a cache cannot find out.

    It has so many `ranks`, each with a host region, and `steps` bounds its steps.

    With `waits_for_loads` off, no lookup is Pending because others load (rule 12): for an engine in which a request
    that waits has its device blocks already.

    With `exchanges` a load may take the place of the blocks that it overwrites (exchange.py). The ranks must do so: a
    CopyWorker does, where no two share a host region. Lazy makes use of it, in models with one group and no
    checkpoints.

    With `log_boundaries`, `take_events` tells which boundaries can be hit on the host; lazy without checkpoints, behind
    those of the device (rule 3). It does not take off what groups that look ahead drop from the end of a hit.
    """

    ranks: int = 1
    steps: EngineSteps = USUAL_STEPS
    waits_for_loads: bool = True
    exchanges: bool = False
    log_boundaries: bool = False


USUAL_ENGINE = EngineTraits()
