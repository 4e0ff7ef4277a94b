"""How an engine steps: what one step can allocate, and how long it takes until a copy is heard of.

    step N        allocates up to `blocks`; its plan tells the ranks to store
    step N + R    hears that they have, if the copy took no longer than step N; R is `report_steps`

From that follows how far lazy offload looks ahead: what steps N to N + R can hand out has to be covered before.
"""

from dataclasses import dataclass

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.planner import HybridChunkPlanner


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSteps:
    """What bounds a step of an engine.

    One step computes at most `max_tokens` tokens, and moves a decoding request by at most `decode_tokens`. A copy that
    ends with its step is reported `report_steps` steps after it.

    An engine that allocates chunks whole leaves `groups` at 0. One that allocates a block in each of so many groups as
    tokens come says so: each request may then begin some. `blocks_per_chunk` is how many blocks of theirs a chunk takes
    (default: one of each).

    With `asks_in_decode` false, and where no checkpoints are needed, a decoding request is not asked for its progress
    before its end. (What it computes cannot be evicted before, so that nothing is lost by it.)

    `ahead_blocks` is how many device blocks lazy looks at, for who knows better than what follows from the rest: at
    most as many as the device has.

    Raises ConfigurationError for numbers that no engine has.
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
            *(("max_tokens", 1), ("decode_tokens", 1), ("report_steps", 1)),
            *(("groups", 0), ("blocks_per_chunk", 1), ("ahead_blocks", 1)),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"{name} must be at least {least}, got {value}")

    def blocks(self, planner: HybridChunkPlanner, running: int) -> int:
        """How many device blocks a step can allocate while so many requests run."""
        chunks = -(-self.max_tokens // planner.grid_tokens)
        if not self.groups:
            return chunks * max(1, planner.device_blocks_per_chunk)
        return chunks * (self.blocks_per_chunk or self.groups) + running * self.groups

    def stretch(self, step_blocks: int, device_blocks: int) -> int:
        """How many device blocks have to be covered, where a step allocates so many.

        So many that what the next step and all until a store is heard of can allocate is left when a quarter of them
        is gone, before which lazy does not look again; at most half of the device.
        """
        steps = -(-4 * (1 + self.report_steps) * step_blocks // 3)
        return max(1, min(steps, device_blocks // 2))


USUAL_STEPS = EngineSteps()
