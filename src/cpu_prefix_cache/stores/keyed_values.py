"""Values of one rank in a shared store, found by their labels. The numbers of slots mean nothing there.

    write   the frame is made of the label and of the bytes' checksum, and put with the bytes
    read    frame and bytes are got, and the frame must be the one that the label and the bytes have;
            else the value is refused. What is there and is not right is deleted, as far as `deletions.py` allows: a
            store that keeps old values would keep it for ever. What is not there is not deleted: another process may
            be putting it. (A right value may take a wrong one's place between our read and our DEL, and is put again
            then. A delete that compares would need more rights on the server, and happens too rarely to pay for.)
    floor   after a reset that names a revision, names are those of all who have named the same, at a reset or at their
            start. After another one nobody knows which weights others have: names begin anew, under a digest that no
            other process has, and what is stored from then on is found by this process alone

Every value is one host block. Frames lie in memory of their own, beside the host region.
"""

import hashlib
import logging
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.generations import FIRST
from cpu_prefix_cache.messages.plan import Label
from cpu_prefix_cache.slab import records
from cpu_prefix_cache.slab.below import address_of
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.stores import frame
from cpu_prefix_cache.stores.deletions import Deletions
from cpu_prefix_cache.stores.frame import Names
from cpu_prefix_cache.stores.keyed_store import Got, KeyedStore

logger = logging.getLogger(__name__)

GET_SECONDS = 2.0  # for one call of some MiB: no request waits so long (rule 15), but threads must come back
PUT_SECONDS = 5.0
DELETE_SECONDS = 1.0
# To one call, at most: what is checked is still in the cache then. With 64, verified gets from Redis have .62 to .89 of
# the rate of gets that nobody checks; with 8 they are as fast.
CALL_VALUES = 8
CALLS = 8  # at once, at most: as many sets of frames
PORTION_BYTES = 256 << 20  # of host memory, registered when the first of its blocks is used


class KeyedValues:
    """`store` belongs to this from now on. `namespace` identifies the bytes; each of `owners` owners has values of its
    own, each of `slot_bytes` bytes.
    """

    next_generation = FIRST
    slots = sys.maxsize

    def __init__(self, store: KeyedStore, namespace: Namespace, *, number: int, owners: int, slot_bytes: int) -> None:
        self.store, self.slot_bytes = store, slot_bytes
        self._namespace, self._owner = namespace, f"owner {number} of {owners}".encode()
        self._era = 0, self._names_in(namespace)  # floor and names between two resets, set at once
        self._deletions = Deletions()
        self._memory = memoryview(b"")
        self._address, self._registered, self._lock = 0, set[int](), threading.Lock()
        self._arena = memoryview(mmap.mmap(-1, CALLS * CALL_VALUES * frame.SIZE))
        self._frames = SimpleQueue[list[memoryview]]()  # those of a call each, of calls that are not under way
        frames = [self._arena[begin : begin + frame.SIZE] for begin in range(0, self._arena.nbytes, frame.SIZE)]
        for call in range(CALLS):
            self._frames.put(frames[call * CALL_VALUES : (call + 1) * CALL_VALUES])

    @property
    def floor(self) -> int:
        return self._era[0]

    @property
    def names(self) -> Names:
        """Names of values that may be read now."""
        return self._era[1]

    @property
    def kept(self) -> int:
        return self._deletions.kept

    def bind(self, memory: memoryview) -> None:
        self._memory, self._address = memory, address_of(memory)
        self.store.register(self._arena)

    def advance(self, floor: int, revision: str | None = None) -> None:
        names = Names(os.urandom(32)) if revision is None else self._names_in(self._namespace.of_revision(revision))
        self._era = floor, names

    def keep(self) -> None:
        """Later processes have the names from before, under which nobody knows what this one's weights were."""

    def write(self, slots: Sequence[int], views: Sequence[memoryview], labels: Sequence[Label]) -> None:
        """Store `views[i]` under `labels[i]`. Raises OSError when the store does, or does not take all of it."""
        floor, names = self._era
        for label in labels:
            records.check_label(label)
            if label.generation < floor:
                raise OSError("what was to be stored is from before a reset")
        self._register(views)
        for begin in range(0, len(labels), CALL_VALUES):
            part = slice(begin, begin + CALL_VALUES)
            self._put(names, views[part], labels[part])

    def read(self, slots: Sequence[int], views: Sequence[memoryview], labels: Sequence[Label]) -> list[int]:
        """Read the value of `labels[i]` into `views[i]`. The slots of those that are not right, whose views hold
        anything. Raises OSError when the store does.
        """
        floor, names = self._era
        self._register(views)
        good: list[bool] = []
        for begin in range(0, len(labels), CALL_VALUES):
            part = slice(begin, begin + CALL_VALUES)
            good += self._get(names, views[part], labels[part])
        served = (is_good and label.generation >= floor for is_good, label in zip(good, labels, strict=True))
        return [slot for slot, is_served in zip(slots, served, strict=True) if not is_served]

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing: the values of a store that failed are right, and stay."""

    def stop(self) -> None:
        self.store.close()

    def close(self) -> None:
        self.store.close()

    def _names_in(self, namespace: Namespace) -> Names:
        return Names(hashlib.sha256(namespace.digest + self._owner).digest())

    def _put(self, names: Names, views: Sequence[memoryview], labels: Sequence[Label]) -> None:
        frames = self._frames.get()
        try:
            for head, (view, label) in zip(frames, zip(views, labels, strict=True), strict=False):
                head[:] = self._frame_of(names, label, view)
            taken = self.store.put_from(
                [names.of_label(label) for label in labels], list(zip(frames, views, strict=False)), PUT_SECONDS
            )
        finally:
            self._frames.put(frames)
        if not all(taken):
            raise OSError(f"the store did not take {taken.count(False)} of {len(taken)} values")

    def _get(self, own: Names, views: Sequence[memoryview], labels: Sequence[Label]) -> list[bool]:
        names = [own.of_label(label) for label in labels]
        frames = self._frames.get()
        try:
            for each in frames[: len(labels)]:
                each[:] = bytes(frame.SIZE)
            got = self._checked(self.store.get_into(names, list(zip(frames, views, strict=False)), GET_SECONDS), names)
            good = [
                each is Got.READ and bytes(head) == self._frame_of(own, label, view)
                for each, head, label, view in zip(got, frames, labels, views, strict=False)
            ]
        finally:
            self._frames.put(frames)
        wrong = [
            name
            for name, each, is_good in zip(names, got, good, strict=True)
            if each is not Got.MISSING and not is_good
        ]
        self._delete(wrong[: self._deletions.read(sum(good), len(wrong))])
        return good

    def _checked(self, got: Sequence[Got], names: Sequence[str]) -> Sequence[Got]:
        """A store that returns anything else was written for an earlier version, or has a defect."""
        if len(got) != len(names) or not all(isinstance(each, Got) for each in got):
            raise MisuseError(f"get_into of {type(self.store).__name__} returns a Got for each key, not {got!r:.200}")
        return got

    def _delete(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            self.store.delete(names, DELETE_SECONDS)
        except OSError as error:  # what was read well is good all the same
            logger.warning("the store could not delete values that are not right: %s", error)

    def _frame_of(self, names: Names, label: Label, view: memoryview) -> bytes:
        return frame.pack(label, names.namespace, self.slot_bytes, frame.checksum(view))

    def _register(self, views: Sequence[memoryview]) -> None:
        """The portions of host memory in which these views lie."""
        blocks = max(1, PORTION_BYTES // self.slot_bytes)
        portions = {(address_of(view) - self._address) // self.slot_bytes // blocks for view in views}
        if portions <= self._registered:
            return
        with self._lock:
            for each in portions - self._registered:
                begin = each * blocks * self.slot_bytes
                self.store.register(self._memory[begin : begin + blocks * self.slot_bytes])
                self._registered.add(each)
