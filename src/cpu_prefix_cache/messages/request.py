"""A request as the cache sees it, a checkpoint of it, and the answers it can get."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Request:
    """`keys[i]` is the chained key of chunk i, `num_tokens` the tokens the engine must have computed before decoding.

    `keys` is the engine's own list and may grow as the request decodes; it is read, never changed. With `stores` off,
    only what other requests have too is stored.

    `next_use` is a hint, if the client knows it: the seconds from the end of the request until a prompt that begins
    with its keys comes; infinity: never. It may be wrong (next_use.py). Policies count from when it was admitted, and
    learn the difference.
    """

    id: Hashable
    keys: Sequence[bytes]
    num_tokens: int
    stores: bool = True
    next_use: float | None = None


class CheckpointAt(NamedTuple):
    """The checkpoint that resuming with `depth` chunks present takes. Its boundary is their end, or before that what
    prefix groups look ahead to. `tail` are the keys of the chunks that it reaches back over, up to that depth.
    """

    depth: int
    tail: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """The host has tokens [start, boundary), where `start` is n0 rounded down to a boundary (rule 8).

    `lookup` finds that they can be loaded, `HostCache.start` has begun to load them.
    """

    boundary: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing is loaded: the host has nothing beyond what the device has, or the engine has no room for it."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Ask again when a load has ended (rule 12). At `deadline` at the latest the answer will be another: in seconds, of
    `time.monotonic` where the cache has a clock.
    """

    deadline: float


Answer = Hit | Miss | Pending
MISS = Miss()
