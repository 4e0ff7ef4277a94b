"""What every copier does, and the checks none of them may skip."""

from collections.abc import Sequence
from typing import Protocol

from cpu_prefix_cache.errors import MisuseError
from cpu_prefix_cache.plan import Direction, GroupCopy


class Copier(Protocol):
    """Moves pieces between device tensors and the host region. Bound to both when it is built."""

    def copy(self, direction: Direction, copies: Sequence[GroupCopy]) -> None:
        """Carry out one transfer. All ids are checked before any byte moves; MisuseError otherwise (rule 16)."""


def check_ids(what: str, ids: Sequence[int], limit: int, *, distinct: bool) -> None:
    """Raise MisuseError unless all `ids` are in [0, limit), and none comes twice where they are destinations."""
    if ids and not (min(ids) >= 0 and max(ids) < limit):
        raise MisuseError(f"{what} blocks must be from 0 to {limit - 1}, got {min(ids)} to {max(ids)}")
    if distinct and len(set(ids)) != len(ids):
        raise MisuseError(f"a {what} block is written twice in one copy")
