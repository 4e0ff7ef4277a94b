"""Handles of what a KeyedHostCache copies: `put` returns a PutHandle, `load` a LoadHandle, both a CopyHandle.

is_done    all has ended: the device blocks of a put may be written to, those of a load may be read
ok         whether no copy has failed, and of a load whether it was all here
is_kept    of a put, whether the host, or the tier below, has all of it
layers     of a load, an event for each layer, for a forward that begins with the first while others come
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cpu_prefix_cache.messages.errors import CopyFailed, MisuseError
from cpu_prefix_cache.messages.numbers import is_whole

if TYPE_CHECKING:
    from cpu_prefix_cache.copier.events import Event
    from cpu_prefix_cache.copier.record import EndOf

NAP_SECONDS = 100e-6


class CopyHandle:
    """Transfers that belong together. `see` is called to learn which have ended; they may begin later."""

    def __init__(self, see: Callable[[], object]) -> None:
        self._see = see
        self._ends: Sequence[EndOf] | None = None  # until they begin
        self._open = set[int]()
        self._ok = True

    def begun(self, ends: "Mapping[int, EndOf]", *, ok: bool = True) -> Iterable[int]:
        """They have begun, each with its end; or there are none, and it is done. Called by the cache. Their ids."""
        self._ends, self._ok = [*ends.values()], ok
        self._open.update(ends)
        return ends

    def ended(self, id: int, ok: bool) -> None:
        """One of them has ended. Called by the cache."""
        self._open.discard(id)
        self._ok = self._ok and ok

    def failed(self) -> None:
        """A reset came: what is under way has failed, and may write until it has ended. Called by the cache."""
        self._ok = False

    @property
    def is_done(self) -> bool:
        """Whether all have ended. Looks, and waits for nothing."""
        if self.ok is None:
            self._see()
        return self.ok is not None

    @property
    def ok(self) -> bool | None:
        """Whether all have ended well. None: some had not ended at the last look."""
        return None if self._ends is None or self._open else self._ok

    def wait(self) -> bool:
        """Wait until all have ended. Whether they have ended well."""
        for end in self._begun_ends():
            with suppress(CopyFailed):
                end.until_passed()
        while not self.is_done:  # those that were submitted before it are seen first
            time.sleep(NAP_SECONDS)
        return self._ok

    def _begun_ends(self) -> "Sequence[EndOf]":
        """The ends, once they have begun."""
        while self._ends is None:
            self._see()
            time.sleep(NAP_SECONDS)
        return self._ends


class PutHandle(CopyHandle):
    """A put. `keeps` reports whether it is kept."""

    def __init__(self, see: Callable[[], object], *, keeps: Callable[[], bool]) -> None:
        super().__init__(see)
        self._keeps = keeps

    @property
    def is_kept(self) -> bool:
        """Whether host or tier have it all by now: not where there was no room, a copy has failed, or a reset came."""
        return self._keeps()


class LoadHandle(CopyHandle):
    """A load. `sections` has for each layer the section with which all of it has come, and of those before it; None:
    the last. `hold` has compute wait for an event of the copier.
    """

    def __init__(
        self, see: Callable[[], object], *, sections: Sequence[int | None], hold: "Callable[[Event], object]"
    ) -> None:
        super().__init__(see)
        self._sections, self._hold = sections, hold

    @property
    def layers(self) -> "Sequence[Event]":
        """An event for each layer, passed when all of that layer has come, and of those before it.

        It raises CopyFailed once that has failed, or where nothing was loaded.
        """
        from cpu_prefix_cache.copier.record import EndOfAll

        return [EndOfAll(partial(self._load_ends, section)) for section in self._sections]

    def hold_compute(self, layer: int) -> None:
        """Have what compute is given from now on run after this layer has come. Waits until the copy is submitted.

        Raises CopyFailed if it has failed by then. A later failure is known when it `is_done`, and what was computed
        meanwhile is wrong. Raises MisuseError for a layer that does not exist.
        """
        if not is_whole(layer) or layer >= len(self._sections):
            raise MisuseError(f"there are layers 0 to {len(self._sections) - 1}, got {layer!r}")
        for end in self._load_ends(self._sections[layer], is_awaited=True) or ():
            end.hold(self._hold)

    def _load_ends(self, section: int | None, is_awaited: bool) -> "Sequence[EndOf] | None":
        """The ends of this section of its transfers; None: they have not begun, and that is not awaited."""
        if not is_awaited and self._ends is None:
            self._see()
        ends = self._begun_ends() if is_awaited else self._ends
        if ends is not None and not self._ok:
            if not ends:
                raise CopyFailed("some of these keys are not here any more: nothing was loaded")
            raise CopyFailed("this load has failed, or a reset came: its blocks hold anything")
        return None if ends is None else [replace(end, section=section) for end in ends]
