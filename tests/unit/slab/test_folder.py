"""Opening: all is as it should be, or one sentence names the remedy, and the files are as they were.

Folders made for something else, or damaged, begin anew, with one line in the log.
"""

import ctypes
import errno
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.slab import allocation
from cpu_prefix_cache.slab.tier_copier import TierCopier
from cpu_prefix_cache.tier import TierUnavailable
from tests.unit.slab.host_region import region
from tests.unit.slab.small_slab import BLOCK, SLOTS, Letters, namespace, open_slab, planner


def tree(path):
    """Every file below, with its size and content of the small ones."""
    files = [each for each in sorted(Path(path).rglob("*")) if each.is_file()]
    return {str(each): each.read_bytes() for each in files}


@pytest.fixture
def letters(tmp_path):
    made = Letters(tmp_path)
    made.put("abc")
    yield made
    made.slab.close()


def refused(tmp_path, match, **fields):
    before = tree(tmp_path)
    with pytest.raises(TierUnavailable, match=match):
        open_slab(tmp_path, **fields)
    assert tree(tmp_path) == before


def test_nobody_else_may_read_it(letters, tmp_path):
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_all_of_its_bytes_are_allocated(letters):  # S8.18
    assert os.stat(letters.file("blocks")).st_blocks * 512 >= SLOTS * BLOCK
    assert os.stat(letters.file("blocks")).st_size == SLOTS * BLOCK


def test_it_never_grows(letters, tmp_path):  # S8.17, S8.18
    before = {name: len(content) for name, content in tree(tmp_path).items()}
    for _ in range(3):
        letters.put("abcdefghijklmnop")
        letters.reopen(tmp_path)
    after = {name: len(content) for name, content in tree(tmp_path).items()}
    assert after == before


def refused_elsewhere(path, before=""):
    """The error of a process that opens the slab, and runs this line before."""
    program = (
        f"{before}\n"
        "import sys; from tests.unit.slab.small_slab import open_slab\n"
        "try: open_slab(sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_a_closed_slab_leaves_no_file_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    open_slab(tmp_path).close()
    assert os.listdir("/proc/self/fd") == before


def test_a_second_process_is_refused(letters, tmp_path):  # S8.22
    assert refused_elsewhere(tmp_path).startswith("TierUnavailable another process uses")
    assert letters.get("abc") == "abc"


def test_a_second_slab_of_one_process_is_refused(letters, tmp_path):  # S8.22
    refused(tmp_path, "another process uses .* path of its own")


def test_ranks_have_folders_of_their_own(tmp_path):  # S8.22
    one, other = Letters(tmp_path, rank=0, ranks=2), Letters(tmp_path, rank=1, ranks=2)
    one.put("a")
    other.put("b")
    assert one.get("a") == "a" and other.get("b") == "b"
    assert one.slab.folder != other.slab.folder
    one.slab.close()
    other.slab.close()


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"slot_bytes": 0}, {"rank": 1}, {"rank": -1}])
def test_a_slab_without_slots_bytes_or_a_rank_of_its_own_is_refused(tmp_path, wrong):
    with pytest.raises(ConfigurationError, match="a slab has slots of some bytes"):
        open_slab(tmp_path, **wrong)
    assert not list(tmp_path.iterdir())


def test_a_child_does_not_keep_the_lock(tmp_path):
    lives = subprocess.PIPE
    program = (
        "import os, signal, sys; from tests.unit.slab.small_slab import open_slab\n"
        "slab = open_slab(sys.argv[1])\n"
        "child = os.fork()\n"
        "if child: signal.pause()\n"
        "print('child', os.getpid(), flush=True); signal.pause()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])}
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=lives, text=True, env=environment)
    child = int(parent.stdout.readline().split()[1])
    parent.kill()
    parent.wait()
    open_slab(tmp_path).close()
    os.kill(child, signal.SIGKILL)
    parent.stdout.close()


def test_a_child_does_not_unlock_its_parents(letters, tmp_path):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    refused(tmp_path, "another process")


# Another size


def test_more_slots_keep_what_there_was(letters, tmp_path, caplog):
    letters.reopen(tmp_path, slots=SLOTS + 4, nbytes=2 * 10**6)
    assert letters.kept == "abc" + "." * (SLOTS + 1)
    assert letters.get("abc") == "abc"
    letters.put("z", slot=SLOTS + 3)
    assert letters.get("z", slot=SLOTS + 3) == "z"
    assert f"had {SLOTS} slots and has {SLOTS + 4}" in caplog.text


def test_fewer_slots_keep_what_fits(letters, tmp_path):
    letters.reopen(tmp_path, slots=2)
    assert (letters.kept, letters.get("ab")) == ("ab", "ab")
    assert os.stat(letters.file("blocks")).st_size == 2 * BLOCK
    letters.reopen(tmp_path, slots=SLOTS)
    assert letters.kept == "ab" + "." * (SLOTS - 2), "what was cut off does not come back"


def test_a_longer_file_is_cut(letters, tmp_path):  # S8.3
    letters.slab.close()
    os.truncate(letters.file("blocks"), SLOTS * BLOCK + 1)
    letters.reopen(tmp_path)
    assert letters.get("abc") == "abc" and os.stat(letters.file("blocks")).st_size == SLOTS * BLOCK


# Begins anew

DEEP = "[" * 100_000


def begins_anew(letters, tmp_path, caplog, reason, **fields):
    """Nothing of before is found, served, or ever numbered again; and one line reports it."""
    caplog.clear()
    letters.reopen(tmp_path, **fields)
    assert set(letters.kept) == {"."}
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "begins anew" in line and reason in line


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"version": 2}', "\0" * 40, DEEP, "NaN"],
    ids=["empty", "cut", "list", "none", "newer", "zeros", "deep", "nan"],
)
def test_a_damaged_manifest(letters, tmp_path, caplog, text):
    letters.slab.close()
    Path(letters.file("manifest.json")).write_text(text)
    begins_anew(letters, tmp_path, caplog, "version" if "version" in text else "manifest.json cannot be read")
    assert letters.get("abc") == "..."


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"floor": 1}',
        '{"floor": "x", "last": 1}',
        "\0" * 40,
        DEEP,
        '{"floor": NaN, "last": 1}',
        '{"floor": 0, "last": -9}',
        f'{{"floor": 0, "last": {1 << 200}}}',
        f'{{"floor": {1 << 64}, "last": 1}}',
        '{"floor": true, "last": 1}',
        "[1, 2]",
    ],
    ids=lambda text: text[:20],
)
def test_damaged_generations(letters, tmp_path, caplog, text):
    letters.slab.close()
    Path(letters.file("generations")).write_text(text)
    begins_anew(letters, tmp_path, caplog, "does not say which records may be served")
    assert letters.get("abc") == "..."


def test_slots_voided_by_a_reset_do_not_come_back_with_lost_generations(letters, tmp_path, caplog):
    letters.slab.advance(letters.slab.next_generation + (1 << 32))
    letters.slab.close()
    os.unlink(letters.file("generations"))
    begins_anew(letters, tmp_path, caplog, "generations")
    assert letters.get("abc") == "..."


def test_bytes_that_lie_otherwise(letters, tmp_path, caplog):  # S8.21
    """An engine's namespace names the folder, and a rank's own fields are in its manifest."""
    letters.slab.close()
    path = Path(letters.file("manifest.json"))
    manifest = json.loads(path.read_text())
    manifest["namespace"]["row order"] = "other"
    path.write_text(json.dumps(manifest))
    begins_anew(letters, tmp_path, caplog, "namespace: row order was 'other', and is None")


def test_slots_of_another_size(letters, tmp_path, caplog):
    begins_anew(letters, tmp_path, caplog, "slot_bytes was 8192, and is 4096", slot_bytes=4096)


def test_a_process_that_ends_while_it_begins_anew_leaves_nothing_to_be_found(letters, tmp_path, monkeypatch):
    """The records are the old ones until they are removed, so the manifest goes first."""
    letters.slab.close()
    Path(letters.file("generations")).write_text("")
    removed, unlink = [], os.unlink

    def ends(name, **more):
        if removed:
            raise KeyboardInterrupt
        removed.append(name)
        unlink(name, **more)

    monkeypatch.setattr(os, "unlink", ends)
    with pytest.raises(KeyboardInterrupt):
        open_slab(tmp_path)
    monkeypatch.undo()
    assert removed == ["manifest.json"]
    letters.slab = open_slab(tmp_path)
    assert set(letters.kept) == {"."}


@pytest.mark.parametrize("truncates", [True, False])
def test_records_whose_name_the_disk_keeps_are_not_found(letters, tmp_path, monkeypatch, truncates):
    letters.slab.close()
    os.unlink(letters.file("manifest.json"))  # as a reset does that could not be kept
    unlink, truncate = os.unlink, os.ftruncate

    def keeps(name, **more):
        if name == "records":
            raise OSError(errno.EIO, "Input/output error")
        unlink(name, **more)

    def fails(file, length):
        if not truncates and not length:
            raise OSError(errno.EIO, "Input/output error")
        truncate(file, length)

    monkeypatch.setattr(os, "unlink", keeps)
    monkeypatch.setattr(os, "ftruncate", fails)
    if truncates:
        letters.slab = open_slab(tmp_path)
        assert letters.kept == "." * SLOTS
    else:
        with pytest.raises(TierUnavailable, match="Input/output error"):
            open_slab(tmp_path)


def test_a_folder_that_was_never_made_ready_begins_anew(letters, tmp_path):
    letters.slab.close()
    os.unlink(letters.file("manifest.json"))
    letters.slab = open_slab(tmp_path)
    assert letters.kept == "." * SLOTS


def test_a_path_that_is_none(tmp_path):
    with pytest.raises(TierUnavailable, match="does not exist; mount the disk, or make the folder"):
        open_slab(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnavailable, match="is not a folder"):
        open_slab(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_path_that_may_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write everywhere
    refused(tmp_path, "may not write")


def test_a_disk_that_is_read_only(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(os, "mkdir", fails)
    refused(tmp_path, "read-only")


# No room


def test_more_than_the_disk_has_is_refused(tmp_path):  # S8.20
    refused(tmp_path, "the disk has or allows less", slots=1 << 44)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("which", [0, 1])
def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path, monkeypatch, code, which):  # S8.20
    real, calls = allocation.reserve, []

    def fills_up(file, size):
        calls.append(size)
        if len(calls) > which:
            real(file, size // 2)
            raise OSError(code, os.strerror(code))
        return real(file, size)

    monkeypatch.setattr(allocation, "reserve", fills_up)
    refused(tmp_path, "give the tier fewer bytes")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    open_slab(tmp_path).close()  # and it can be made later


def test_a_disk_that_fills_up_leaves_a_truncated_file_as_it_was(letters, tmp_path, monkeypatch):  # S8.20
    letters.slab.close()
    os.truncate(letters.file("blocks"), BLOCK)

    def fills_up(file, size):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(allocation, "reserve", fills_up)
    refused(tmp_path, "fewer bytes")


def test_a_limit_on_the_size_of_files_leaves_nothing_behind(tmp_path):  # S8.20
    limit = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"
    said = refused_elsewhere(tmp_path, f"import resource, signal; {limit}")
    assert said.startswith("TierUnavailable") and "fewer bytes" in said
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_reserves_no_room_has_sparse_files(tmp_path, monkeypatch, caplog):
    """`posix_fallocate` would write to each page of them, which takes hours for a large tier."""
    monkeypatch.setattr(allocation, "_libc", CannotReserve())
    letters = Letters(tmp_path)
    blocks = os.stat(letters.file("blocks"))
    assert blocks.st_size == SLOTS * BLOCK and blocks.st_blocks * 512 < 2 * BLOCK
    assert caplog.text.count("are sparse") == 1
    letters.put("abc")
    assert letters.get("abc") == "abc"
    letters.slab.close()


class CannotReserve:
    def fallocate(self, *_):
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1


# O_DIRECT


def has_o_direct(folder):
    """Whether a file of the test's own can be read directly there."""
    (folder / "own").write_bytes(bytes(mmap.PAGESIZE))
    try:
        file = os.open(folder / "own", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            return os.preadv(file, [page], 0) == mmap.PAGESIZE
    except OSError:
        return False
    finally:
        os.close(file)


def test_real_disks_are_read_directly(letters, tmp_path):
    if not has_o_direct(tmp_path):
        pytest.skip("the folder of temporary files is on a file system without O_DIRECT")
    assert letters.slab.is_direct


def no_direct(monkeypatch, where):
    """A file system that refuses O_DIRECT as a file is opened, or as it is read."""
    import fcntl

    real_fcntl, real_preadv = fcntl.fcntl, os.preadv

    def opens(file, command, *flags):
        if where == "open" and command == fcntl.F_SETFL and flags[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_fcntl(file, command, *flags)

    def reads(file, views, offset):
        if where == "read" and real_fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(file, views, offset)

    monkeypatch.setattr(fcntl, "fcntl", opens)
    monkeypatch.setattr(os, "preadv", reads)


@pytest.mark.parametrize("where", ["open", "read"])
def test_files_are_cached_with_one_warning_where_o_direct_is_refused(tmp_path, monkeypatch, caplog, where):
    no_direct(monkeypatch, where)
    letters = Letters(tmp_path)
    letters.put("abc")
    assert letters.get("abc") == "abc"
    assert not letters.slab.is_direct
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "refuses O_DIRECT" in caplog.text
    letters.slab.close()


def test_slots_that_are_no_whole_pages_are_cached(tmp_path, caplog):
    letters = Letters(tmp_path, slot_bytes=BLOCK)
    letters.slab.close()
    slab = open_slab(tmp_path, named=namespace(model="odd"), slot_bytes=1000)
    view = memoryview(bytearray(b"x" * 1000))
    slab.write([3], [view], [letters.label("a")])
    assert slab.read([3], [memoryview(bytearray(1000))], [letters.label("a")]) == []
    assert "1000 bytes are not a multiple" in caplog.text
    slab.close()


def test_host_memory_that_does_not_begin_at_a_page_is_cached(tmp_path, caplog):
    slab = open_slab(tmp_path)
    memory = region(3).view(-1)[512 : 512 + 2 * BLOCK].view(2, BLOCK)
    copier = TierCopier(slab, memory, planner().pieces)
    assert not slab.is_direct
    assert "does not begin" in caplog.text
    copier.close()
    slab.close()


def test_host_memory_of_another_size_is_refused(tmp_path):
    slab = open_slab(tmp_path)
    for wrong in (region(4, 4096), region(4).view(torch.int8), region(4)[:, :4096], region(4)[:0]):
        with pytest.raises(ConfigurationError):
            TierCopier(slab, wrong, planner().pieces)
    slab.close()
