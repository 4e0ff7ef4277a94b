"""Messages between the two halves, within ATOM's own.

    scheduler -> ranks    StepMetadata: the plan of a step, in a step with news for them
    ranks -> scheduler    completions on the connector's channel; ATOM passes one on when all ranks have reported it

    operation of a completion        succeeded
    a transfer's id                  it is done; else it has failed, if any rank reports it
    "block bytes 2097152"            always: what blocks take (geometry.py), until the first plan has come
    "ready blocks 4096"              always: so many host blocks are ready, until the metadata has it
    an Unfit                         always: what of a store does not fit on one rank, beside its failure
    an Unpinned                      always: what one rank could not pin of its host memory, with its last ready blocks
    a TierReport                     always: one rank's report of its tier

A rank's report of itself is passed on as it is (unjoined.py).

A rank repeats what has not been answered, since ATOM drops reports when a rank takes long. The blocks of different
ranks become ready at different times, so each reports the same numbers, READY_PARTS of them, as it reaches them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from atom.kv_transfer.disaggregation.types import ConnectorMetadata

from cpu_prefix_cache.deciding import StepPlan
from cpu_prefix_cache.tier import TierPlan

READY_PARTS = 16
_READY = "ready blocks "


class Unpinned(NamedTuple):
    """How many bytes of its host memory the driver would not pin for this rank: they are copied more slowly."""

    rank: int
    num_bytes: int


class Unfit(NamedTuple):
    """The first host blocks of pieces of a store that do not fit their coded form on this rank."""

    rank: int
    store: int
    host_blocks: tuple[int, ...]


class StepMetadata(ConnectorMetadata):
    """The plan of one step, how many host blocks the scheduler side knows to be ready on all ranks, and what the ranks
    do with their tiers after that plan.

    ATOM sends metadata from an idle engine only if `requests` is not empty.
    """

    def __init__(self, plan: StepPlan, ready_blocks: int, tier: TierPlan | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.ready_blocks = ready_blocks
        self.tier = tier
        self.requests = (plan,)

    @property
    def moves(self) -> bool:
        """Whether anything begins to be copied, or is cancelled."""
        return any(plan.transfers or plan.cancelled for plan in self._plans)

    @property
    def said(self) -> tuple[Any, ...]:
        """The rest of the message."""
        tier = self.tier
        below = None if tier is None else (tier.first_generation, tier.taken, tier.asks, tier.told_below, tier.revision)
        return self.ready_blocks, below, *((plan.epoch, plan.resolved_below, plan.resolved) for plan in self._plans)

    @property
    def _plans(self) -> tuple[StepPlan, ...]:
        return (self.plan,) if self.tier is None else (self.plan, self.tier.step)


def ready_operations(known: int, ready: int, host_blocks: int) -> Iterator[str]:
    """Reports of a rank that has `ready` of its host blocks, and of whom `known` are known.

    >>> list(ready_operations(known=8, ready=30, host_blocks=64))
    ['ready blocks 12', 'ready blocks 16', 'ready blocks 20', 'ready blocks 24', 'ready blocks 28']
    """
    for part in range(1, READY_PARTS + 1):
        if known < (blocks := host_blocks * part // READY_PARTS) <= ready:
            yield f"{_READY}{blocks}"


def ready_blocks_of(operation: object) -> int:
    """The number that an operation reports, 0 if it reports something else.

    >>> ready_blocks_of("ready blocks 12"), ready_blocks_of(12)
    (12, 0)
    """
    is_ready = isinstance(operation, str) and operation.startswith(_READY)
    return int(str(operation).removeprefix(_READY)) if is_ready else 0
