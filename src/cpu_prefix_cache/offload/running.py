"""An admitted request, until it ends or is preempted."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cpu_prefix_cache.messages.request import CheckpointAt, Request
from cpu_prefix_cache.offload.transfers import LoadTransfer


@dataclass(slots=True, eq=False)
class Running:
    """`confirmed` counts its chunks that hold computed tokens, `resumed` those it was given at admission.

    `kept` are the depths, in chunks, at which checkpoints are wanted, ascending; `checkpoints` are those the device had
    there, and `unsaved` those of them that the host may lack.
    """

    request: Request
    n0: int  # tokens
    touch: Any
    resumed: int
    kept: Sequence[int]
    stale: bool  # nothing is stored for it: it wants no stores, or was admitted before a reset
    checkpoints: list[CheckpointAt] = field(default_factory=list)
    unsaved: list[CheckpointAt] = field(default_factory=list)
    confirmed: int = 0
    due: int = 0  # the next step in which it may have crossed a boundary; 0: none
    decodes: bool = False  # when it was reported last
    load: LoadTransfer | None = None

    @property
    def id(self) -> Hashable:
        return self.request.id

    @property
    def keys(self) -> Sequence[bytes]:
        return self.request.keys
