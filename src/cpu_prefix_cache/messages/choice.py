"""Decision of an eviction policy about chunks that come: how many are worth their room, and for what."""

from collections.abc import Sequence
from typing import NamedTuple

Victims = Sequence[Sequence[int]]  # runs of chunks, each the parent of the one before it


class Choice(NamedTuple):
    """The first `accepted` nodes are wanted; `victims` are the first to leave for them, if that is known by then."""

    accepted: int
    victims: Victims = ()
