"""Records of vLLM's requests, one for each, from its first lookup to its end.

    looked up     it waits for the load of another request, or for device blocks
    admitted      it has device blocks: again, if its load has failed, or a reset has preempted it
    preempted     it has none, and will be looked up again

What is known of a request that has ended is nothing.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from vllm.v1.request import Request


@dataclass(slots=True)
class Known:
    request: Request
    on_device: int  # tokens, at the last lookup
    is_admitted: bool = False
    resumed: int = 0  # tokens that it had, or was to load, when it was admitted
    remembered: int = 0  # chunks that were passed to `device.remember` since it was admitted
    ends: Sequence[int] = ()  # tokens at which steps of its prompt are to end, ascending (step_ends.py)
    is_parked: bool = False  # as of the last lookup: it waits for what it loads, and no step does
    load_failed: bool = False  # it is not loaded again: vLLM may never find the blocks


class KnownRequests:
    """By their ids."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Known] = {}
        self._awaited = set[Hashable]()  # looked up, and neither admitted nor ended since

    def __len__(self) -> int:
        return len(self._known)

    @property
    def any_awaited(self) -> bool:
        return bool(self._awaited)

    def of(self, id: Hashable) -> Known:
        return self._known[id]

    def if_admitted(self, id: Hashable) -> Known | None:
        known = self._known.get(id)
        return known if known is not None and known.is_admitted else None

    def looked_up(self, request: Request, on_device: int) -> Known:
        known = self._known.setdefault(request.request_id, Known(request, on_device))
        known.request = request
        known.on_device = on_device
        self._awaited.add(request.request_id)
        return known

    def admitted(self, id: Hashable, resumed: int) -> None:
        known = self._known[id]
        known.is_admitted, known.resumed = True, resumed
        self._awaited.discard(id)

    def preempted(self, id: Hashable) -> None:
        if (known := self._known.get(id)) is not None:
            known.is_admitted = False
            known.remembered = 0

    def ended(self, id: Hashable) -> None:
        self._known.pop(id, None)
        self._awaited.discard(id)
