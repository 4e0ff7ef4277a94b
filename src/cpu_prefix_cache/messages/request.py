"""A request as the cache sees it, a checkpoint of it, how far it is, and the answers it can get."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """`keys[i]` is the chained key of chunk i, `num_tokens` the tokens the engine must have computed before decoding.

    `keys` is the engine's own list and may grow as the request decodes; it is read, never changed. With `stores` off,
    nothing is stored for its sake; what others store too can be.
    """

    id: str
    keys: Sequence[bytes]
    num_tokens: int
    stores: bool = True


class CheckpointAt(NamedTuple):
    """The checkpoint after `depth` chunks. `tail` are the keys of the chunks it reaches back over, up to that depth."""

    depth: int
    tail: tuple[bytes, ...]


class Progress(Protocol):
    """What a running request has computed for certain. `confirmed` counts chunks."""

    @property
    def id(self) -> str: ...

    @property
    def keys(self) -> Sequence[bytes]: ...

    @property
    def confirmed(self) -> int: ...

    @property
    def resumed(self) -> int:
        """From which chunk on it computes: what is before was on the device or is loaded."""

    @property
    def touch(self) -> Any: ...

    @property
    def checkpoints(self) -> Sequence[CheckpointAt]:
        """Those of this request that the device had when they were confirmed."""

    @property
    def unsaved(self) -> list[CheckpointAt]:
        """Those of them that the host may lack. Whoever finds one there takes it out."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Every token before `boundary` can be had: those before n0 from the device, the rest from the host."""

    boundary: int


@dataclass(frozen=True, slots=True)
class Miss:
    """The host has nothing beyond what the device has."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Ask again when a load has ended, or at `deadline` at the latest: another request is loading this prefix (rule
    13), or something else, and one more load would take device blocks that may still have to be stored."""

    deadline: float


Answer = Hit | Miss | Pending
MISS = Miss()
