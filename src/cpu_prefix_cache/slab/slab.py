"""Slots in files that outlive the process, each with a record that identifies its contents.

    write   the record is cleared; the bytes are written; the record is written, with a checksum of the bytes
    read    the record is whole and has the fields of the label; the bytes are read; their checksum is the record's
    reset   nothing below the floor is served, at once; the floor is kept on disk before anything is written again, and
            a mark, by which the next process that opens the folder begins anew

Nothing but the floor is synced, and there is no journal: whichever of these writes are lost, with the process or with
the machine, the record or the checksum does not fit, and the slot is refused. A refused slot is a miss. Its record is
cleared, so that no restart finds it.

No file is mapped. `write`, `read`, `forget` and `keep` wait for the disk, and belong to threads of the tier; `advance`
and `record` touch memory alone.

Files are opened with O_DIRECT, which takes a tenth of the processor's time, if the file system and the sizes allow.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator, Sequence

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import Label
from cpu_prefix_cache.slab import manifest, records
from cpu_prefix_cache.slab.below import address_of
from cpu_prefix_cache.slab.durable import remove_durably
from cpu_prefix_cache.slab.folder import Folder
from cpu_prefix_cache.slab.record_file import RecordFile, runs
from cpu_prefix_cache.slab.records import Record

logger = logging.getLogger(__name__)

ALIGNMENT = 4096  # of offsets, sizes and addresses, for O_DIRECT
CALL_BYTES = 8 << 20  # in one call to the system, at most, or one slot
CALL_SLOTS = 1024  # IOV_MAX of Linux


class Slab:
    """The slots of one rank, in its `folder`, which belongs to this from now on.

    `next_generation`: no record had it or a larger one when this was opened. Any number of threads may read and write,
    different slots at a time.
    """

    kept = 0  # a slot with wrong bytes is free

    def __init__(self, folder: Folder) -> None:
        self._folder, self.slots, self.slot_bytes = folder, folder.slots, folder.slot_bytes
        self._at_once = max(1, min(CALL_SLOTS, CALL_BYTES // self.slot_bytes))  # slots of a call to the system
        self._seed = folder.seed
        self._generations = self._folder.generations
        self._unkept = 0  # the last floor of which the log says that it could not be kept
        self.is_direct = False
        try:
            self.records = RecordFile(folder.records, folder.slots)
            self._check_moment(folder.generations.first)
            folder.generations.take()
            self.next_generation = folder.generations.first
            self._begin_direct()
        except BaseException:
            folder.close()  # or the lock lives as long as the error does, and keeps the next attempt out
            raise

    @property
    def folder(self) -> str:
        return str(self._folder.path)

    @property
    def floor(self) -> int:
        """Records of generations below it are never served."""
        return self._generations.floor

    def bind(self, memory: memoryview) -> None:
        """Host memory has to begin at a multiple of ALIGNMENT, or files are read through the system's cache."""
        if self.is_direct and address_of(memory) % ALIGNMENT:
            self.stop_direct(f"host memory does not begin at a multiple of {ALIGNMENT}")

    def advance(self, floor: int, revision: str | None = None) -> None:
        """Raise the floor, at once. `keep` brings it to the disk, and `write` does so before it writes anything.

        Files are this process's alone, whatever the revision.
        """
        self._generations.advance(floor)

    def keep(self, generation: int = 0) -> None:
        """The floor is on disk when this returns, and what says that records up to `generation` may be found.

        Raises OSError. If that leaves a floor in memory alone, it is logged, and the next process to open the
        folder begins anew, where the disk lets a file be deleted; also when the floor is kept later, since what says
        that the folder is ready is not written again.
        """
        try:
            self._generations.keep(generation)
        except OSError as error:
            if not self._generations.is_floor_kept:
                self._give_up_what_is_there(error)
            raise
        if self._unkept:
            self._unkept = 0
            logger.warning("%s: the reset is on disk now, and the tier goes on", self._folder.path)

    def write(self, slots: Sequence[int], views: Sequence[memoryview], labels: Sequence[Label]) -> None:
        """Write `views[i]` to `slots[i]`. When it raises, OSError for one, none of these slots has a record."""
        self._check(slots, views, labels)
        for label in labels:
            records.check_label(label)
        self.keep(max((label.generation for label in labels), default=0))
        self.records.clear(slots)
        digests: list[bytes] = []
        for begin, end in runs(slots, self._at_once):
            digests += map(records.checksum, views[begin:end])
            wanted = (end - begin) * self.slot_bytes
            written = os.pwritev(self._folder.blocks, views[begin:end], slots[begin] * self.slot_bytes)
            if written != wanted:
                raise OSError(errno.EIO, f"{written} of {wanted} bytes were written", str(self._folder.path))
            self._drop_cached(slots[begin], end - begin)
        try:
            self.records.keep(slots, [records.pack(each, self._seed) for each in map(Record, slots, labels, digests)])
        except OSError:
            self.forget(slots)
            raise

    def read(self, slots: Sequence[int], views: Sequence[memoryview], labels: Sequence[Label]) -> list[int]:
        """Read `slots[i]` into `views[i]`, and return the slots that are refused. What their views hold is undefined.
        Raises OSError when the disk does."""
        self._check(slots, views, labels)
        seen = [self.records.of(slot) for slot in slots]
        found = [records.parse(data, self._seed) for data in seen]
        fits = [self._fits(*each) for each in zip(found, slots, labels, strict=True)]
        there = [at for at, fit in enumerate(fits) if fit]
        good = set(self._read(there, slots, views, [None if each is None else each.checksum for each in found]))
        refused = [at for at in range(len(slots)) if at not in good]
        for at in refused:
            record, slot = found[at], slots[at]
            is_later = record is not None and record.slot == slot and record.label.generation > labels[at].generation
            if not is_later and self.records.of(slot) == seen[at]:
                self.forget([slot])
        return [slots[at] for at in refused]

    def record(self, slot: int) -> Record | None:
        """Record of a slot: what it holds, if it may be served."""
        record = records.parse(self.records.of(slot), self._seed)
        if record is None or record.slot != slot or record.label.generation < self._generations.floor:
            return None
        return record

    def forget(self, slots: Sequence[int]) -> None:
        """Clear their records. Where the disk keeps them, a restart finds what they had before, or what is refused."""
        with contextlib.suppress(OSError):
            self.records.clear(slots)

    def stop_direct(self, reason: str) -> None:
        """Read and write through the system's cache from now on, and log it."""
        if self.is_direct:
            flags = fcntl.fcntl(self._folder.blocks, fcntl.F_GETFL)
            fcntl.fcntl(self._folder.blocks, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False
        logger.warning(
            "%s is read and written through the system's cache, which takes ten times the processor's time: %s",
            self._folder.path,
            reason,
        )

    def stop(self) -> None:
        """Calls to the system end by themselves."""

    def close(self) -> None:
        """No thread may use it any more. May be called again."""
        if self._folder.lock >= 0:
            with contextlib.suppress(OSError):  # the log says so
                self.keep()
        self.records.close()
        self._folder.close()

    def _check_moment(self, first: int) -> None:
        """Serve nothing from before where a record is of `first` or later, of which none was written yet: the files are
        not of one moment, and it is not known what a reset has left behind.
        """
        numbers = memoryview(self.records.memory).cast("Q")[records.GENERATION_AT // 8 :: records.SIZE // 8]
        if max(numbers) < first:
            return
        later = [slot for slot, number in enumerate(numbers.tolist()) if number >= first]
        seen = [record.label.generation for record in map(self.record, later) if record is not None]
        if seen:
            self._generations.begin_after(max(seen))
            logger.warning(
                "%s begins anew: its records are later than what says which may be served, as in a folder that was "
                "copied while it was used",
                self._folder.path,
            )

    def _begin_direct(self) -> None:
        if self.slot_bytes % ALIGNMENT:
            self.stop_direct(f"slots of {self.slot_bytes} bytes are not a multiple of {ALIGNMENT}")
            return
        flags = fcntl.fcntl(self._folder.blocks, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._folder.blocks, fcntl.F_SETFL, flags | os.O_DIRECT)
            self.is_direct = True
            with mmap.mmap(-1, ALIGNMENT) as page:  # some file systems refuse only now
                os.preadv(self._folder.blocks, [page], 0)
                os.pwritev(self._folder.blocks, [page], 0)
        except OSError as error:
            self.stop_direct(f"the file system refuses O_DIRECT ({error.strerror})")

    def _read(
        self,
        there: Sequence[int],
        slots: Sequence[int],
        views: Sequence[memoryview],
        digests: Sequence[bytes | None],
    ) -> Iterator[int]:
        """Positions, of `there`, whose bytes have their digests."""
        for begin, end in runs([slots[at] for at in there], self._at_once):
            run = there[begin:end]
            count = os.preadv(self._folder.blocks, [views[at] for at in run], slots[run[0]] * self.slot_bytes)
            self._drop_cached(slots[run[0]], len(run))
            for at in run[: count // self.slot_bytes]:
                if records.checksum(views[at]) == digests[at]:
                    yield at

    def _fits(self, record: Record | None, slot: int, label: Label) -> bool:
        """Whether a slot's record has the fields of `label`. A piece that checkpoints share has any of their
        parents."""
        if record is None or record.slot != slot or label.generation < self.floor:
            return False
        return record.label.key == label.key and record.label[2:] == label[2:]  # all but `parent`

    def _drop_cached(self, slot: int, count: int) -> None:
        """The system's cache is for others. Pages that are not written back yet stay."""
        if not self.is_direct:
            place = slot * self.slot_bytes, count * self.slot_bytes
            os.posix_fadvise(self._folder.blocks, *place, os.POSIX_FADV_DONTNEED)

    def _give_up_what_is_there(self, error: OSError) -> None:
        """For the next process, as long as the disk does not keep the floor."""
        after = "a process that opens the folder before that begins anew"
        try:
            remove_durably(self._folder.opened, manifest.NAME)
        except OSError:
            after = "a process that opens the folder before that may serve what is from before the reset, so delete it"
        if self._unkept != self.floor:
            self._unkept = self.floor
            logger.error(
                "%s cannot keep a reset (%s): nothing is written or served until it can; %s", self.folder, error, after
            )

    def _check(self, slots: Sequence[int], views: Sequence[memoryview], labels: Sequence[Label]) -> None:
        if not len(slots) == len(views) == len(labels):
            raise MisuseError(f"{len(slots)} slots, {len(views)} views and {len(labels)} labels are not one for each")
        if slots and (min(slots) < 0 or max(slots) >= self.slots):
            raise MisuseError(f"slots are from 0 to {self.slots - 1}, got {min(slots)} to {max(slots)}")
        if any(view.nbytes != self.slot_bytes for view in views):
            raise MisuseError(f"a slot has {self.slot_bytes} bytes, and the views others")


@contextlib.contextmanager
def unlocked_on_failure(slab: Slab) -> Iterator[None]:
    """An attempt to open what stands on `slab`. If it fails, the folder is free for the next one."""
    try:
        yield
    except BaseException:
        slab.close()
        raise
