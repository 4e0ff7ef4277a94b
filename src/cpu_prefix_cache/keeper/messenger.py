"""Messenger: an engine's line to the keeper. Nothing here waits.

A *connection* is numbered. What was granted in one is used only as long as no later one has begun, because another
keeper knows nothing of it.
"""

from typing import Protocol

from cpu_prefix_cache.keeper.protocol import Message


class Messenger(Protocol):
    """Sends messages to the keeper, and collects its answers."""

    @property
    def num_slots(self) -> int:
        """How many slots the pool has."""

    @property
    def connection(self) -> int:
        """The number of the connection that there is, or was last."""

    @property
    def is_up(self) -> bool:
        """Whether a keeper is there."""

    def send(self, connection: int, message: Message) -> None:
        """Send soon. Dropped if that connection is not the one that there is now."""

    def answers(self) -> list[tuple[int, Message]]:
        """Answers since the last call, each with its connection."""

    def begin_use(self, connection: int) -> bool:
        """Whether a copy of what was granted in that connection may begin. Then `end_use` follows."""

    def end_use(self) -> None:
        """Such a copy has ended."""

    def rename(self, revision: str | None) -> None:
        """From now on all is of this revision, also in later connections; with None of one that nobody else has."""

    def close(self) -> None:
        """No copy is under way, and nothing follows."""
