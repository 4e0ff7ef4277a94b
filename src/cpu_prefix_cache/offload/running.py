"""A request that runs, from its admission until it ends, is preempted, or a reset makes it stale."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cpu_prefix_cache.messages.request import CheckpointAt, Request
from cpu_prefix_cache.offload.transfers import Transfer


@dataclass(slots=True, eq=False)
class Running:
    """An admitted request. `confirmed` counts its chunks that hold computed tokens.

    `resumed` is the depth, in chunks, from which it goes on, and `kept` are those at which checkpoints are wanted,
    ascending; `checkpoints` are those the device had there, and `unsaved` those of them that the host may lack.
    """

    request: Request
    n0: int  # tokens
    touch: Any
    resumed: int
    kept: Sequence[int]
    stale: bool  # it stores nothing: it does not want to, or what it computes is from before a reset
    checkpoints: list[CheckpointAt] = field(default_factory=list)
    unsaved: list[CheckpointAt] = field(default_factory=list)
    confirmed: int = 0
    due: int = 0  # the step in which it may have crossed a boundary again; 0: that is not asked
    decodes: bool = False  # by what was reported last
    load: Transfer | None = None

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def keys(self) -> Sequence[bytes]:
        return self.request.keys
