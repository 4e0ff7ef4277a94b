"""Engines that start together see what the others have claimed, as long as these live; with real processes."""

import mmap
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cpu_prefix_cache.memory import claims, limits, mapping, pages, registration
from cpu_prefix_cache.messages.errors import ConfigurationError
from tests.support.simulated_driver import SimulatedDriver, pinned_arena
from tests.support.threads import eventually

MIB = 1 << 20
UNSHARE = ("unshare", "--pid", "--fork", "--kill-child")  # a process in a namespace of pids of its own
# A process that has a region of 64 MiB, of which it takes as many MiB as each line requests. `ahead` it takes
# them by the threads that take pages ahead, and nothing else.
OTHER = """
import sys
from pathlib import Path
from cpu_prefix_cache.memory import claims, limits, mapping
claims.SHARED, limits.CGROUP = Path(sys.argv[1]), Path(sys.argv[2])
ahead = sys.argv[3:] == ["ahead"]
region = mapping.private(64 << 20, taken_ahead=ahead)
print("claimed", flush=True)
for line in sys.stdin:
    if line.strip() == "end":
        del region
    elif ahead:
        import torch
        from cpu_prefix_cache.memory.pages import Pages
        count = lambda not_taken: claims.count(region, not_taken + (64 - int(line) << 20))
        Pages(torch.frombuffer(region, dtype=torch.uint8, count=int(line) << 20), slice_bytes=1 << 20, count=count)
    else:
        region[: int(line) << 20] = bytes(int(line) << 20)
    print("done", flush=True)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where claims are kept in this test."""
    monkeypatch.setattr(claims, "SHARED", tmp_path)
    monkeypatch.setattr(mapping, "_with_huge_pages", apart)
    claims._folder.cache_clear()
    yield tmp_path / f"cpu-prefix-cache-{os.geteuid()}"
    claims._folder.cache_clear()


def apart(region):
    """A region that the kernel does not show as one with what another test has left, and claimed elsewhere."""
    region.madvise(mmap.MADV_DONTDUMP)
    return region


@pytest.fixture
def other(tmp_path):
    """Starts such a process."""
    processes = []

    def start(*options, inside=()):
        command = [*inside, sys.executable, "-c", OTHER, str(tmp_path), "/sys/fs/cgroup", *options]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "claimed\n"
        return process

    yield start
    for each in processes:
        each.kill()
        each.wait()
        each.stdin.close()
        each.stdout.close()


def ask(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def promised():
    return sum(map(claims.not_taken, claims.promises()))


def test_memory_that_others_have_claimed_is_not_given_again_until_they_have_taken_it(other, monkeypatch):
    monkeypatch.setattr(limits, "_available_bytes", lambda: 10_000 * MIB)
    monkeypatch.setattr(limits, "CGROUP", Path("/nowhere"))
    before = limits.usable_bytes()
    first, second = other(), other()
    assert before - limits.usable_bytes() == 128 * MIB
    ask(first, 40)  # which a system would not call available any more
    assert before - limits.usable_bytes() == (128 - 40) * MIB
    ask(second, 64)
    assert before - limits.usable_bytes() == (64 - 40) * MIB
    ask(first, "end")
    assert before == limits.usable_bytes()


def test_a_killed_process_claims_nothing_and_its_file_is_removed(other, folder):
    process = other()
    assert promised() == 64 * MIB and len(list(folder.iterdir())) == 2
    process.kill()
    process.wait()
    assert promised() == 0
    assert [each.name for each in folder.iterdir()] == [claims.LOCK]


def test_the_second_of_two_engines_is_refused_with_a_size_that_fits(other, monkeypatch):
    monkeypatch.setattr(limits, "_available_bytes", lambda: limits.RESERVED_BYTES + 100 * MIB)
    monkeypatch.setattr(limits, "CGROUP", Path("/nowhere"))
    mapping.private(64 * MIB).close()
    other()
    with pytest.raises(ConfigurationError, match=f"ask for at most {36 * MIB} bytes"):
        mapping.private(64 * MIB)
    assert len(mapping.private(36 * MIB)) == 36 * MIB


def test_it_is_looked_at_what_others_have_taken_only_where_that_decides(other, monkeypatch):
    monkeypatch.setattr(limits, "_available_bytes", lambda: limits.RESERVED_BYTES + 100 * MIB)
    monkeypatch.setattr(limits, "CGROUP", Path("/nowhere"))
    ask(other(), 40)  # of 64
    look, looks = claims.not_taken, []
    monkeypatch.setattr(limits, "not_taken", lambda own: looks.append(own) or look(own))
    mapping.private(36 * MIB).close()
    assert not looks
    mapping.private(76 * MIB).close()
    assert len(looks) == 1


def test_regions_of_one_process_see_each_other(monkeypatch):
    monkeypatch.setattr(limits, "_available_bytes", lambda: 10_000 * MIB)
    monkeypatch.setattr(limits, "CGROUP", Path("/nowhere"))
    before = limits.usable_bytes()
    regions = [mapping.private(32 * MIB) for _ in range(2)]
    assert before - limits.usable_bytes() == 64 * MIB
    regions[0][:] = bytes(32 * MIB)
    assert before - limits.usable_bytes() == 32 * MIB
    regions.clear()
    assert before == limits.usable_bytes()


def test_a_control_group_is_less_by_the_claims_of_its_own_processes(tmp_path, monkeypatch):
    """Containers that share /dev/shm, and have limits of their own."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for group in ours, theirs:
        group.mkdir()
        (group / "memory.max").write_text(f"{1000 * MIB}\n")
        (group / "memory.current").write_text("0\n")
    (tmp_path / "membership").write_text("0::/\n")
    monkeypatch.setattr(limits, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(limits, "_available_bytes", lambda: 10_000 * MIB)

    def usable_in(group):
        monkeypatch.setattr(limits, "CGROUP", group)
        return limits.usable_bytes() + limits.RESERVED_BYTES

    assert usable_in(ours) == usable_in(theirs) == 1000 * MIB
    monkeypatch.setattr(limits, "CGROUP", theirs)
    region = mapping.private(300 * MIB)
    assert usable_in(theirs) == 700 * MIB and usable_in(ours) == 1000 * MIB
    region.close()


def test_a_forked_child_does_not_keep_its_parents_claims(folder):
    region = mapping.private(8 * MIB)
    child = os.fork()
    if not child:
        os._exit(len(claims._held))
    _, status = os.waitpid(child, 0)
    assert status == 0 and promised() == 8 * MIB
    del region
    assert promised() == 0


def test_only_the_pages_of_the_region_count():
    smaps = [
        "1000-3000 rw-p 0 00:00 0",
        "Rss:    8 kB",
        "3000-9000 rw-p 0 00:00 0   [heap]",
        "Size: 24 kB",
        "Rss:   24 kB",
        "VmFlags: rd wr",
    ]
    assert claims._resident_bytes(smaps, [range(0x3000, 0x9000)]) == 24 << 10
    assert claims._resident_bytes(smaps, [range(0x2000, 0x4000)]) == 8 << 10
    # Two that the kernel shows as one have what is resident once.
    assert (
        claims._resident_bytes([smaps[2], "Rss:   12 kB"], [range(0x3000, 0x6000), range(0x6000, 0x9000)]) == 12 << 10
    )
    assert claims._resident_bytes(smaps, [range(0x9000, 0xA000)]) == 0


# Containers that share /dev/shm, each with a namespace of pids of its own


def test_claims_of_another_pid_namespace_count_only_memory_taken_ahead(other, monkeypatch):
    """Memory that is taken on its first use counts as used already, and would count twice."""
    monkeypatch.setattr(claims, "_pid_namespace", lambda: 1)
    ask(other(), 8)
    assert promised() == 0
    process = other("ahead")
    assert promised() == 64 * MIB
    ask(process, 40)
    assert eventually(lambda: promised() == 24 * MIB)
    ask(process, 64)
    assert eventually(lambda: promised() == 0)


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], check=False).returncode != 0,
    reason="this system makes no namespaces of pids",
)
def test_engines_of_two_pid_namespaces_see_each_others_claims(other, folder):
    first, second = (other("ahead", inside=UNSHARE) for _ in range(2))
    assert promised() == 128 * MIB
    ask(first, 64)
    assert eventually(lambda: promised() == 64 * MIB)
    second.kill()
    second.wait()
    assert eventually(lambda: promised() == 0)
    first.kill()
    first.wait()
    assert eventually(lambda: promised() == 0 and [each.name for each in folder.iterdir()] == [claims.LOCK])


def test_an_arena_counts_the_pages_that_it_takes_ahead(monkeypatch):
    go, populate = threading.Event(), pages._populate
    monkeypatch.setattr(pages, "_populate", lambda *slice: go.wait() and populate(*slice))
    monkeypatch.setattr(registration, "PAUSE_SECONDS", 0)
    arena = pinned_arena(SimulatedDriver())
    (name,) = (name for name in os.listdir(claims._folder()) if name != claims.LOCK)
    before = claims._read(claims._folder(), name)
    go.set()
    arena.wait_until_ready()
    assert before.not_taken == len(before.region) == arena.blocks.numel()
    assert eventually(lambda: claims._read(claims._folder(), name).not_taken == 0)
    arena.close()


def test_a_region_that_the_system_cut_short_is_owed_nothing_more(monkeypatch):
    monkeypatch.setattr(pages, "_populate", lambda region, first, num_bytes: 12 if first else 0)
    arena = pinned_arena(SimulatedDriver())
    (name,) = (name for name in os.listdir(claims._folder()) if name != claims.LOCK)
    arena.wait_until_ready()
    assert eventually(lambda: claims._read(claims._folder(), name).not_taken == 0)
    arena.close()


def test_pages_that_any_rank_has_taken_of_a_shared_region_are_taken():
    file, region = mapping.make_shared(16 * MIB)
    assert promised() == 16 * MIB
    child = os.fork()
    if not child:
        mapping.map_shared(file, 16 * MIB)[: 12 * MIB] = bytes(12 * MIB)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(file)
    assert promised() == 4 * MIB
    region[:] = bytes(16 * MIB)
    assert promised() == 0


def test_a_shared_region_that_has_ended_leaves_no_descriptor():
    promised()  # opens the folder
    before = os.listdir("/proc/self/fd")
    file, region = mapping.make_shared(MIB)
    os.close(file)
    del region
    assert os.listdir("/proc/self/fd") == before and promised() == 0


@pytest.mark.parametrize("trick", ["link", "mode", "file"])
def test_a_folder_that_is_not_safely_ours_is_not_used(folder, trick, tmp_path, caplog):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if trick == "link":
        folder.symlink_to(elsewhere)
    elif trick == "mode":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.write_text("")
    region = mapping.private(MIB)
    assert len(region) == MIB and promised() == 0 and list(elsewhere.iterdir()) == []
    assert "do not see each other's claims" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_a_folder_of_another_user_is_not_used(folder, caplog):
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    mapping.private(MIB)
    assert "belongs to user 65534" in caplog.text and list(folder.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[]", b"nothing", b"[1, 2, 3, 4]", b'0\n["a", 2, 3, 4, [], -1]', b"\xff"])
def test_files_that_are_no_claims_claim_nothing(folder, content):
    kept = mapping.private(MIB)
    (mine,) = (each for each in folder.iterdir() if each.name != claims.LOCK)
    mine.write_bytes(content)  # locked, as one of a living process
    assert claims.promises() == [] and len(kept) == MIB
    (folder / "fifo").unlink(missing_ok=True)
    os.mkfifo(folder / "fifo")
    assert claims.promises() == []


def test_a_process_that_is_frozen_within_its_turn_is_not_waited_for(folder, monkeypatch):
    monkeypatch.setattr(claims, "LOCK_SECONDS", 0.1)
    with claims.turn():
        region = mapping.private(MIB)
    assert isinstance(region, mmap.mmap) and promised() == MIB
