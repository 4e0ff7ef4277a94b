"""Handles of what a KeyedHostCache copies: `put` returns a CopyHandle, `load` a LoadHandle.

    is_done    all has ended: the device blocks of a put may be written to, those of a load may be read
    ok         whether all of it was copied
    layers     of a load, an event for each layer, for a forward that begins with the first while others come

A copier that moves all layers together has the same event for each: that of the end.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from cpu_prefix_cache.messages.errors import CopyFailed

if TYPE_CHECKING:
    from cpu_prefix_cache.copier.record import EndOf
    from cpu_prefix_cache.copier.streams import Event


class CopyHandle:
    """Transfers that belong together, each with its end. `see` is called to learn which have ended.

    Without transfers it is done at once, and `ok` as given.
    """

    def __init__(self, ends: "Mapping[int, EndOf]", see: Callable[[], object], *, ok: bool = True) -> None:
        self._ends = [*ends.values()]
        self._open, self._see, self._ok = set(ends), see, ok

    @property
    def ids(self) -> Collection[int]:
        """The transfers that have not ended."""
        return self._open

    @property
    def is_done(self) -> bool:
        """Whether all have ended. Looks, and waits for nothing."""
        if self._open:
            self._see()
        return not self._open

    @property
    def ok(self) -> bool | None:
        """Whether all have ended well. None: some had not ended at the last look."""
        return None if self._open else self._ok

    def wait(self) -> bool:
        """Wait until all have ended. Whether they have ended well."""
        for end in self._ends:
            with suppress(CopyFailed):
                end.until_passed()
        return self.is_done and self._ok

    def ended(self, id: int, ok: bool) -> None:
        """One of them has ended. Called by the cache."""
        self._open.discard(id)
        self._ok = self._ok and ok


class LoadHandle(CopyHandle):
    """A load. `hold` has compute wait for an event of the copier."""

    def __init__(
        self,
        ends: "Mapping[int, EndOf]",
        see: Callable[[], object],
        *,
        num_layers: int,
        hold: "Callable[[Event], object]",
        ok: bool = True,
    ) -> None:
        super().__init__(ends, see, ok=ok)
        self._num_layers, self._hold = num_layers, hold

    @property
    def layers(self) -> "Sequence[Event]":
        """An event for each layer, passed when all of that layer has come, and of those before it.

        It raises CopyFailed once that has failed, as this does where nothing was loaded.
        """
        from cpu_prefix_cache.copier.streams import AllOf

        self._check_loads()
        return [AllOf(self._ends)] * self._num_layers

    def hold_compute(self, layer: int) -> None:
        """Have what compute is given from now on run after this layer has come. Waits until the copy is submitted.

        Raises CopyFailed if it has failed by then. A later failure is known when it `is_done`, and what was computed
        meanwhile is wrong.
        """
        self._check_loads()
        for end in self._ends:
            self._hold(end.submitted())

    def _check_loads(self) -> None:
        if not self._ends and not self._ok:
            raise CopyFailed("some of these keys are not here any more: nothing was loaded")
