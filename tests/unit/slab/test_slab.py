"""Only slots that were written under the wanted label are served. Everything else is refused."""

import errno
import os
import shutil
import threading

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.slab import generations, record_file
from tests.unit.slab.small_slab import BLOCK, SLOTS, Letters, page


@pytest.fixture
def letters(tmp_path):
    made = Letters(tmp_path)
    yield made
    made.slab.close()


# Damage


def test_old_bytes_of_the_buffer_are_not_taken_for_those_of_a_short_read(letters):  # S8.1
    letters.put("a")
    os.truncate(letters.file("blocks"), BLOCK // 2)
    assert letters.slab.read([0], [page(b"a" * BLOCK)], [letters.label("a")]) == [0]


def test_damage_to_the_records_file_is_seen_by_the_next_process(letters, tmp_path):
    """This one has them in memory, and knows what it wrote."""
    letters.put("abc")
    letters.damage(1, 30, "records", 128)
    assert letters.get("abc") == "abc"
    letters.put("d", slot=3)
    letters.reopen(tmp_path)
    assert letters.kept[:4] == "a.cd"


def test_a_records_file_cut_off_in_service_costs_what_was_in_it(letters, tmp_path):
    """Where it was mapped, the next look at a record ended the process (SIGBUS)."""
    letters.put("ab")
    os.truncate(letters.file("records"), 0)
    letters.put("c", slot=2)
    assert letters.get("abc") == "abc"
    letters.reopen(tmp_path)
    assert letters.get("abc") == "..c"


@pytest.mark.parametrize("name", ["records", "blocks"])
def test_a_file_that_was_replaced_is_the_next_processes(letters, tmp_path, name):
    letters.put("ab")
    shutil.copy(letters.file(name), tmp_path / "copy")
    os.replace(tmp_path / "copy", letters.file(name))
    letters.put("c")
    assert letters.get("cb") == "cb"
    letters.reopen(tmp_path)
    assert letters.get("cb") == ".b"


def test_records_longer_than_one_call_are_read_whole(letters, tmp_path, monkeypatch):
    letters.put("abcd", slot=5)
    monkeypatch.setattr(record_file, "READ_BYTES", 200)
    letters.reopen(tmp_path)
    assert letters.get("abcd", slot=5) == "abcd"


def test_no_file_is_mapped(letters):
    letters.put("a")
    with open("/proc/self/maps") as maps:
        assert letters.slab.folder not in maps.read()


def test_a_refused_slot_is_not_found_by_a_restart(letters, tmp_path):  # S8.6
    letters.put("abc")
    letters.damage(1)
    letters.get("abc")
    letters.damage(1)  # whole again, and yet not found
    letters.reopen(tmp_path)
    assert letters.kept[:3] == "a.c"
    assert letters.get("abc") == "a.c"


@pytest.mark.parametrize(
    "fields", [{"key": b"x" * 32}, {"group": 1}, {"place": 1}, {"block": 0}, {"block": 1}, {"key": b"a" * 31}]
)
def test_each_field_of_the_label_counts(letters, fields):  # S8.4
    letters.put("a")
    assert letters.slab.read([0], [page()], [letters.label("a")._replace(**fields)]) == [0]


def test_a_piece_that_checkpoints_share_has_any_of_their_parents(letters):
    letters.put("a")
    assert letters.slab.read([0], [page()], [letters.label("a")._replace(parent=b"p" * 32)]) == []


# Generations


def test_an_older_copy_of_the_files_is_refused(letters, tmp_path):
    letters.put("ab")
    letters.slab.close()
    older = tmp_path / "older"
    shutil.copytree(letters.slab.folder, older)
    letters.reopen(tmp_path)
    letters.first += 1  # the same keys, written later
    letters.put("a")
    letters.slab.close()
    for name in ("blocks", "records"):
        shutil.copy(older / name, letters.file(name))
    letters.reopen(tmp_path)
    assert letters.get("a") == "."


def test_another_ranks_files_are_refused(tmp_path):  # S8.22
    one, other = Letters(tmp_path, rank=0, ranks=2), Letters(tmp_path, rank=1, ranks=2)
    one.put("ab")
    other.put("ab")  # the same keys in the same slots, and other bytes: its share of the heads
    one.slab.close()
    other.slab.close()
    for name in ("blocks", "records"):
        shutil.copy(other.file(name), one.file(name))
    one.reopen(tmp_path, rank=0, ranks=2)
    assert one.kept == "." * SLOTS
    assert one.get("ab") == ".."


def test_nothing_is_written_before_the_floor_is_kept(letters, tmp_path):
    """Else a later process would find the new, and what the reset forbids."""
    letters.put("ab")
    letters.first += 1 << 32
    letters.slab.advance(letters.first)
    letters.put("c", slot=2)
    kept = tmp_path / "as the kill left it"
    shutil.copytree(letters.slab.folder, kept)
    letters.slab.close()
    shutil.copytree(kept, letters.slab.folder, dirs_exist_ok=True)
    letters.slab = Letters(tmp_path).slab
    assert letters.kept == "." * SLOTS


def test_a_floor_is_kept_at_the_end(letters, tmp_path):
    letters.put("a")
    letters.slab.advance(letters.slab.next_generation + (1 << 32))
    letters.reopen(tmp_path)
    assert letters.get("a") == "."


def read_only(monkeypatch):
    for call in ("unlink", "replace", "pwrite", "pwritev", "fsync"):
        broken(monkeypatch, call, OSError(errno.EROFS, "the disk is read-only"))


def test_a_reset_on_a_disk_that_is_read_only_serves_nothing_until_it_is_repaired(
    letters, tmp_path, monkeypatch, caplog
):
    letters.put("ab")
    letters.first += 1 << 32
    read_only(monkeypatch)
    letters.slab.advance(letters.first)
    for _ in range(3):
        with pytest.raises(OSError, match="read-only"):
            letters.slab.keep()
        with pytest.raises(OSError, match="read-only"):
            letters.put("c")
    assert letters.get("ab") == ".." and letters.kept == "." * SLOTS
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert "cannot keep a reset" in said and "nothing is written or served" in said and "delete it" in said
    monkeypatch.undo()
    letters.put("c")
    assert letters.kept[:2] == "c." and "is on disk now" in caplog.text
    letters.reopen(tmp_path)
    assert letters.kept == "." * SLOTS


def test_a_reset_on_a_full_disk_leaves_a_folder_that_begins_anew(letters, tmp_path, monkeypatch, caplog):
    letters.put("ab")
    monkeypatch.setattr(generations, "write_durably", raising(OSError(errno.ENOSPC, "no room")))
    letters.slab.advance(letters.label("b").generation)
    with pytest.raises(OSError, match="no room"):
        letters.slab.keep()
    assert "begins anew" in caplog.text
    letters.slab.close()
    monkeypatch.undo()
    letters.slab = Letters(tmp_path).slab
    assert letters.kept == "." * SLOTS and letters.slab.next_generation == 1 << 32


def test_a_reset_does_not_wait_for_a_thread_that_waits_for_the_disk(letters, monkeypatch):
    """It needs nothing that a thread has while it syncs."""
    thaws, frozen = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fsync", lambda file: frozen.set() or thaws.wait(30))
    letters.slab.advance(5 << 32)
    thread = threading.Thread(target=letters.slab.keep)
    thread.start()
    assert frozen.wait(30)
    letters.slab.advance(6 << 32)
    assert letters.slab.floor == 6 << 32 and thread.is_alive()
    thaws.set()
    thread.join()


def test_a_mark_is_made_before_the_floor_is_kept(letters, monkeypatch):
    written, write = [], generations.write_durably
    monkeypatch.setattr(generations, "write_durably", lambda folder, name, data: written.append(name))
    letters.slab.keep()
    assert written == []
    letters.slab.advance(5 << 32)
    letters.slab.keep()
    letters.slab.keep()
    assert written == ["was-reset", "generations"]
    monkeypatch.setattr(generations, "write_durably", write)


def test_slots_written_after_a_reset_are_for_no_later_process(letters, tmp_path, caplog):
    """Its weights are unknown. Slots that are written after the next start are found again."""
    letters.put("ab")
    letters.first = letters.slab.next_generation + (1 << 32)
    letters.slab.advance(letters.first)
    letters.put("cd")
    assert letters.kept.replace(".", "") == "cd"
    letters.reopen(tmp_path)
    assert letters.kept == "." * SLOTS and "begins anew: it was reset" in caplog.text
    letters.first = letters.slab.next_generation
    letters.put("ef")
    letters.reopen(tmp_path)
    assert letters.kept.replace(".", "") == "ef"


def test_each_opening_begins_a_range_of_generations(letters, tmp_path):
    assert letters.slab.next_generation == 1 << 32
    letters.reopen(tmp_path)
    assert letters.slab.next_generation == 2 << 32
    letters.slab.advance(7 << 32)
    letters.slab.keep()
    letters.reopen(tmp_path)
    assert letters.slab.next_generation == 8 << 32


def test_no_record_has_the_next_generation(letters, tmp_path):
    letters.first = 9 << 32  # another rank was opened more often
    letters.put("a")
    letters.reopen(tmp_path)
    assert letters.slab.next_generation == 10 << 32


# Writes that fail


def raising(error):
    def instead(*_, **__):
        raise error

    return instead


def broken(monkeypatch, call, result):
    monkeypatch.setattr(os, call, raising(result) if isinstance(result, Exception) else lambda *_: result)


@pytest.mark.parametrize("result", [OSError(errno.EIO, "the disk is broken"), OSError(errno.ENOSPC, "no room")])
def test_a_store_that_fails_leaves_no_record(letters, monkeypatch, tmp_path, result):  # S8.5
    letters.put("abcd")
    broken(monkeypatch, "pwritev", result)
    with pytest.raises(OSError, match=r"disk|room"):
        letters.put("ef", slot=1)
    monkeypatch.undo()
    assert letters.kept[:4] == "a..d"
    letters.reopen(tmp_path)
    assert letters.kept[:4] == "a..d"
    assert letters.get("ef", slot=1) == ".."


def test_a_short_write_is_a_failed_store(letters, monkeypatch):  # S8.23
    broken(monkeypatch, "pwritev", BLOCK)
    with pytest.raises(OSError, match="8192 of 16384"):
        letters.put("ab")
    monkeypatch.undo()
    assert letters.kept[:2] == ".."


def test_a_store_that_fails_in_its_second_run_leaves_no_record(letters, monkeypatch):  # S8.5
    real, calls = os.pwritev, []

    def second_fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.EIO, "the disk is broken")
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", second_fails)
    with pytest.raises(OSError, match="broken"):
        letters.slab.write([0, 5], [page(), page()], [letters.label("a"), letters.label("b")])
    assert letters.kept == "." * SLOTS


def test_a_store_whose_records_fail_leaves_none(letters, monkeypatch, tmp_path):
    real = os.pwrite
    full = OSError(errno.ENOSPC, "no room")
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data, at) if not any(data) else raising(full)())
    with pytest.raises(OSError, match="no room"):
        letters.put("ab")
    assert letters.get("ab") == ".."
    monkeypatch.undo()
    letters.reopen(tmp_path)
    assert letters.kept == "." * SLOTS


def test_a_slot_is_storable_again_after_a_failure(letters, monkeypatch):  # S8.20
    broken(monkeypatch, "pwritev", OSError(errno.ENOSPC, "no room"))
    with pytest.raises(OSError, match="room"):
        letters.put("a")
    monkeypatch.undo()
    letters.put("a")
    assert letters.get("a") == "a"


def test_a_slot_refused_on_a_read_only_disk_is_a_miss_all_the_same(letters, monkeypatch):
    letters.put("abc")
    letters.damage(1)
    read_only(monkeypatch)
    assert letters.get("abc") == "a.c" and letters.kept[:3] == "a.c"


def test_a_disk_that_cannot_be_read_raises(letters, monkeypatch):
    letters.put("a")
    broken(monkeypatch, "preadv", OSError(errno.EIO, "the disk is broken"))
    with pytest.raises(OSError, match="broken"):
        letters.get("a")


# Callers


@pytest.mark.parametrize("slots", [[-1], [SLOTS], [-1, 0], [0, SLOTS]])
def test_slots_out_of_range_are_the_callers_mistake(letters, slots):
    for act in (letters.slab.write, letters.slab.read):
        with pytest.raises(MisuseError, match="slots are from 0"):
            act(slots, [page() for _ in slots], [letters.label("a") for _ in slots])


def test_slots_with_a_view_too_few_are_the_callers_mistake(letters):
    for act in (letters.slab.write, letters.slab.read):
        with pytest.raises(MisuseError, match="2 slots, 1 views and 2 labels"):
            act([0, 1], [page()], [letters.label("a")] * 2)


def test_a_view_of_another_size_is_the_callers_mistake(letters):  # S8.3
    for act in (letters.slab.write, letters.slab.read):
        with pytest.raises(MisuseError):
            act([0], [page()[:-1]], [letters.label("a")])


def test_a_key_too_long_changes_nothing(letters):
    letters.put("a")
    with pytest.raises(MisuseError, match="32 bytes"):
        letters.slab.write([0], [page()], [letters.label("b")._replace(key=b"k" * 33)])
    assert letters.get("a") == "a"


def test_threads_share_a_slab(letters):
    def work(slot):
        for _ in range(20):
            letters.put("abc"[slot % 3], slot=slot)
            if letters.get("abc"[slot % 3], slot=slot) != "abc"[slot % 3]:
                wrong.append(slot)

    wrong = []
    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_after_close_no_other_file_is_written(letters):
    letters.slab.close()
    letters.slab.close()
    with pytest.raises((OSError, ValueError)):
        letters.put("a")
