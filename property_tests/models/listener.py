"""A listener that follows a log of boundaries from the beginning, and knows nothing else."""

from collections.abc import Iterable

from cpu_prefix_cache.deciding import BoundariesStored, BoundaryEvent


class Listener:
    """Boundaries that can be hit, according to the log. Keys are those of `strategies.chain`: all letters so far."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def hear(self, events: Iterable[BoundaryEvent]) -> set[str]:
        for event in events:
            assert event.keys, "an event says nothing"
            if isinstance(event, BoundariesStored):
                self._stored(event)
                continue
            for key in event.keys:
                assert key.decode() in self.names, f"{key!r} was removed twice, or before it was stored"
                self.names.remove(key.decode())
        return self.names

    def _stored(self, event: BoundariesStored) -> None:
        above = event.parent_key
        for key in event.keys:
            assert key.decode() not in self.names, f"{key!r} was stored twice"
            assert key[:-1] == (above or b""), f"{key!r} does not hang below {above!r}"
            self.names.add(key.decode())
            above = key
