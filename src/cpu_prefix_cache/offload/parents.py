"""Parents of chunks on a device: an engine does not know which chunk another one hangs below.

A device block that is about to be evicted shows its key, not its parent's. So every confirmed chunk is remembered with
the key of its parent while the device has it. It is forgotten when it is reported to have left, or, where it left
unnoticed, some time after (`forgetting.py`).

A store of what hangs below a chunk finds its place by the chunk's parent. So the parents of what has left can be
`kept` until the transfers that were planned by then have ended.
"""

from bisect import bisect_left
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cpu_prefix_cache.offload.forgetting import Forgetting

Links = dict[bytes, bytes | None]  # parents of chunks, by their keys; None: of a first chunk
UNKNOWN = b""  # a parent that is not remembered


def take_run(key: bytes, within: set[bytes], links: Links) -> tuple[Links, bool]:
    """Take `key` and the chunks right above it out of `within`, as far as they are there. Their parents, from the
    deepest up, and whether `links` has all of them: else those down to the first that it has not.
    """
    run = Links()
    above: bytes | None = key
    while above is not None and above in within:
        within.remove(above)
        run[above] = parent = links.get(above, UNKNOWN)
        above = parent
    if above == UNKNOWN:
        run.popitem()
    return run, above != UNKNOWN


class Parents:
    """Parents of confirmed chunks, at most about twice as many as the device holds once `sweep` has caught up.

    `are_here`: whether the device has each of these chunks.
    """

    def __init__(self, are_here: Callable[[Sequence[bytes]], Sequence[bool]]) -> None:
        self._are_here = are_here
        self._parent: Links = {}
        self._sweep = Forgetting()
        self._kept = deque[tuple[int, Links]]()  # each until the transfers with smaller ids have ended
        self.lost = 0  # chunks that left the device before they were stored

    def __len__(self) -> int:
        return len(self._parent) + sum(len(links) for _, links in self._kept)

    def __contains__(self, key: bytes) -> bool:
        """Whether it was confirmed, and has not been reported to have left the device."""
        return key in self._parent

    def add(self, keys: Sequence[bytes], start: int, stop: int) -> Sequence[bytes]:
        """Remember `keys[start:stop]`, each below the one before it. Returns those that were not known."""
        known, here = self._parent, keys[start:stop]
        new = dict(zip(here, [keys[start - 1] if start else None, *here[:-1]], strict=True))
        for key in new.keys() & known.keys():
            del new[key]
        known.update(new)
        self._sweep.added(len(new))
        return [*new]

    def sweep(self) -> Sequence[bytes]:
        """Forget those of the oldest entries that have left the device, a portion at a time. Returns them."""
        if gone := self._sweep.gone(self._parent, self._are_here):
            self._forget(gone)
        return gone

    def take(self, keys: Collection[bytes]) -> Links:
        """Forget these chunks. Their parents, of those that are remembered."""
        parents, before = self._parent, len(self._parent)
        links = {key: parents.pop(key) for key in keys if key in parents}
        self._sweep.left(before - len(parents))
        return links

    def keep(self, links: Links, next_id: int) -> None:
        """Keep the parents of what has left until the transfers before `next_id` have ended."""
        self._kept.append((next_id, links))

    def resolved(self, below: int, most: int) -> None:
        """The transfers with smaller ids than `below` have ended. Keeps no more than `most` parents in all: some
        transfer may not end.
        """
        while self._kept and (self._kept[0][0] <= below or len(self) > most):
            self._kept.popleft()

    def missing_above(self, key: bytes, is_covered: Callable[[bytes], bool]) -> tuple[list[bytes], bytes | None] | None:
        """The chunks from the first that is not covered down to `key`, and their parent; None when one of them is not
        remembered. What is above a covered chunk is covered too (rule 3), so it gallops upwards and
        then bisects.
        """
        parents: Mapping[bytes, bytes | None] = self._parent
        if self._kept:
            parents = ChainMap(self._parent, *(links for _, links in self._kept))
        upwards: list[Any] = [key]  # keys; above a first chunk, None
        missing = 0  # so many of them are not covered
        while (top := upwards[-1]) is not None and not is_covered(top):
            if top not in parents:
                return None
            missing = len(upwards)
            while top in parents and len(upwards) < 2 * missing:
                top = parents[top]
                upwards.append(top)
        between = range(missing, len(upwards) - 1)
        missing += bisect_left(between, True, key=lambda at: is_covered(upwards[at]))
        return upwards[:missing][::-1], upwards[missing]

    def clear(self) -> None:
        self._parent = {}
        self._sweep = Forgetting()
        self._kept.clear()

    def _forget(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._parent.pop(key, None)
