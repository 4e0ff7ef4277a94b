"""The host region: the right shape, refused in time when too large, pinned from the first block up, given back."""

import gc
import mmap
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copier.link import HostRegion
from cpu_prefix_cache.memory import arena as arena_module
from cpu_prefix_cache.memory import limits, mapping, pages, registration
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import DriverError
from cpu_prefix_cache.memory.pages import processors_near, processors_of_nodes
from tests.support.simulated_driver import CUDA, SLICE, SimulatedDriver, pinned_arena
from tests.support.threads import eventually

# assertions of the driver in the thread that pins, or in a finalizer
pytestmark = pytest.mark.filterwarnings(
    "error::pytest.PytestUnhandledThreadExceptionWarning", "error::pytest.PytestUnraisableExceptionWarning"
)


def test_blocks_are_rows_of_bytes_one_after_another():
    blocks = HostArena(num_blocks=3, block_bytes=10).blocks
    assert blocks.dtype == torch.uint8
    assert blocks.shape == (3, 10)
    assert blocks.is_contiguous()


def test_bytes_written_to_one_block_stay_out_of_the_others():
    blocks = HostArena(num_blocks=3, block_bytes=10).blocks
    blocks.fill_(7)
    blocks[1] = 9
    assert blocks[0].tolist() == blocks[2].tolist() == [7] * 10


def test_a_region_for_tensors_in_host_memory_is_ready_at_once():
    arena = HostArena(num_blocks=3, block_bytes=10)
    arena.wait_until_ready()
    assert arena.ready_blocks == 3 and arena.registration is None
    arena.close()


def test_more_than_the_machine_may_use_is_refused_with_the_number_that_fits():
    with pytest.raises(ConfigurationError, match=r"ask for at most \d+ bytes"):
        HostArena(num_blocks=1 << 30, block_bytes=1 << 20)


# Pinning


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(registration, "PAUSE_SECONDS", 0)
    return SimulatedDriver()


def test_nothing_is_pinned_before_the_first_wait(driver):
    arena = pinned_arena(driver)
    assert arena.ready_blocks == 0
    arena.registration._pages.wait_for(0)
    assert not driver.registered
    arena.close()


def test_it_is_pinned_slice_by_slice_from_the_first_block_up(driver):
    driver.gate = threading.Semaphore(0)
    arena = pinned_arena(driver)
    first = arena.blocks.data_ptr()
    arena.register()
    arena.register()
    for count in range(1, 6):
        driver.gate.release()
        pinned = min(count * SLICE, 300_000)
        assert eventually(lambda pinned=pinned: arena.registration.num_bytes >= pinned)
        assert arena.ready_blocks == pinned // 30_000
    arena.wait_until_ready()
    assert arena.pinned_bytes == 300_000 and arena.ready_blocks == 10
    assert driver.order == [first + at for at in range(0, 300_000, SLICE)]
    assert sum(driver.registered.values()) == 300_000
    arena.close()


def test_closing_unpins_everything_once_and_ends_its_threads(driver):
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    arena.close()
    assert not driver.registered
    arena.close()
    assert not {thread.name for thread in threading.enumerate()} & {"pin-host-memory", "take-pages"}


def test_it_is_pinned_and_unpinned_while_graphs_are_captured(driver):
    """The driver raises if a thread does so that is not relaxed."""
    arena = pinned_arena(driver)
    with driver.capturing():
        arena.wait_until_ready()
        assert arena.pinned_bytes == 300_000
        arena.close()
    assert not driver.registered


def test_closing_waits_for_the_slice_that_is_being_pinned_and_unpins_it_too(driver):
    driver.gate = threading.Semaphore(1)
    arena = pinned_arena(driver)
    arena.register()
    assert eventually(lambda: driver.registered)
    (pinning,) = [thread for thread in threading.enumerate() if thread.name == "pin-host-memory"]
    time.sleep(0.05)  # until it waits for the gate
    threading.Timer(0.05, driver.gate.release, [5]).start()
    arena.close()
    pinning.join(10)
    assert not driver.registered


def test_whoever_forgets_the_arena_leaves_nothing_pinned(driver):
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    del arena
    gc.collect()
    assert not driver.registered


def mapped(address):
    with open("/proc/self/maps") as maps:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(low <= address < high for low, high in spans)


def test_after_close_the_region_is_unmapped_once_its_last_tensor_is_gone(driver):
    arena = pinned_arena(driver, num_blocks=1000)
    arena.wait_until_ready()
    blocks = arena.blocks
    address = blocks.data_ptr() + 20_000_000
    arena.close()
    gc.collect()
    assert mapped(address)
    del blocks
    gc.collect()
    assert not mapped(address)


def test_memory_that_cuda_will_not_pin_is_used_as_it_is_with_one_warning(driver, caplog):
    driver.refuses_after = 2
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    assert arena.pinned_bytes == 2 * SLICE
    assert arena.ready_blocks == 10
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "ulimit -l" in record.getMessage()
    arena.close()
    assert not driver.registered


def test_blocks_without_pages_are_not_ready_even_where_pinning_was_refused(driver, monkeypatch):
    driver.refuses_after = 1
    monkeypatch.setattr(pages, "_populate", lambda region, first, num_bytes: 12 if first >= 3 * SLICE else 0)
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    assert arena.registration.num_bytes == SLICE and arena.registration.ready_bytes <= 3 * SLICE
    arena.close()


def test_a_slice_that_is_not_unpinned_leaves_no_other_pinned(driver):
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    unregister, first = driver.unregister, arena.blocks.data_ptr()

    def failing(address):
        if address == first:
            raise DriverError("unpin host memory", 1)
        unregister(address)

    driver.unregister = failing
    with pytest.raises(DriverError):
        arena.close()
    assert list(driver.registered) == [first]


def test_a_driver_that_gives_no_context_makes_nobody_wait(driver, monkeypatch, caplog):
    def refusing(device):
        raise DriverError("give a context", 2)

    monkeypatch.setattr(driver, "working_in", refusing)
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    assert arena.ready_blocks == 0 and "not pinned, and not used" in caplog.text
    arena.close()


def test_threads_that_may_not_choose_their_processors_take_pages_all_the_same(monkeypatch):
    def forbidden(process, processors):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    taking = pages.Pages(torch.empty(3 * SLICE, dtype=torch.uint8), [os.sched_getaffinity(0)], SLICE)
    assert taking.wait_for(2 * SLICE)
    taking.close()


def test_a_forked_process_unpins_nothing(driver):
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    arena.registration._process -= 1
    arena.registration.close()
    assert driver.registered
    arena.registration._process += 1
    arena.close()


@pytest.mark.parametrize("name", ["pin-host-memory", "take-pages"])
def test_a_region_that_is_collected_in_a_thread_of_its_own_is_unpinned_all_the_same(driver, monkeypatch, name):
    """Where CPython collects garbage nobody chooses, and a thread cannot wait for its own end."""
    dropped = threading.Event()

    def collecting(call):
        def called(*arguments):
            if threading.current_thread().name == name and driver.registered:
                assert dropped.wait(10)
                gc.collect()
            return call(*arguments)

        return called

    driver.register = collecting(driver.register)
    populate = collecting(pages._populate)

    def after_the_first(region, first, num_bytes):  # which is pinned by then
        assert not first or eventually(lambda: driver.registered)
        return populate(region, first, num_bytes)

    monkeypatch.setattr(pages, "_populate", after_the_first)
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)  # where a finalizer's error goes
    gc.disable()
    try:
        cycle = [pinned_arena(driver)]
        cycle.append(cycle)
        cycle[0].register()
        assert eventually(lambda: driver.registered)
        del cycle
        dropped.set()
        threads = {"pin-host-memory", "take-pages"}
        assert eventually(lambda: not threads & {thread.name for thread in threading.enumerate()})
        assert eventually(lambda: not driver.registered)
    finally:
        gc.enable()


def test_whoever_copies_keeps_the_region(driver):
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    region = HostRegion(arena.blocks, driver, arena)
    del arena
    gc.collect()
    assert driver.registered and region._arena.pinned_bytes == 300_000
    del region
    gc.collect()
    assert not driver.registered


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, 10), (-1, 10), (3, 0)])
def test_a_region_without_bytes_is_refused(num_blocks, block_bytes):
    with pytest.raises(ConfigurationError, match="blocks of some bytes"):
        HostArena(num_blocks, block_bytes)


def test_where_the_system_has_no_more_pages_the_region_ends(driver, monkeypatch, caplog):
    monkeypatch.setattr(pages, "_populate", lambda region, first, num_bytes: 12 if first >= 2 * SLICE else 0)
    arena = pinned_arena(driver)
    arena.wait_until_ready()
    assert arena.registration.num_bytes <= 2 * SLICE
    assert arena.ready_blocks == arena.registration.num_bytes // 30_000
    assert "no more host memory" in caplog.text
    arena.close()


def test_pages_are_there_before_they_are_pinned(driver, monkeypatch):
    register, resident = driver.register, []
    asked = threading.Event()
    wait_for = pages.Pages.wait_for
    populate = pages._populate
    monkeypatch.setattr(pages.Pages, "wait_for", lambda *slices: asked.set() or wait_for(*slices))
    monkeypatch.setattr(pages, "_populate", lambda *a_slice: asked.wait(10) and populate(*a_slice))

    def watching(address, num_bytes):
        resident.append(rss_of(address) >= address + num_bytes - first)
        register(address, num_bytes)

    driver.register = watching
    arena = pinned_arena(driver, num_blocks=20)
    first = arena.blocks.data_ptr()
    arena.wait_until_ready()
    assert len(resident) == -(-20 * 30_000 // SLICE) and all(resident)
    arena.close()


def rss_of(address):
    """Bytes in memory of the mapping that holds `address`."""
    with open("/proc/self/smaps") as smaps:
        inside = False
        for line in smaps:
            head = line.split()[0]
            if "-" in head and ":" not in head:
                low, high = (int(end, 16) for end in head.split("-"))
                inside = low <= address < high
            elif inside and head == "Rss:":
                return int(line.split()[1]) * 1024
    raise AssertionError("not mapped")


def test_pinned_memory_needs_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="leave out pinned_for"):
        HostArena(num_blocks=3, block_bytes=1000, pinned_for=CUDA)


def test_for_tensors_of_a_device_that_pins_nothing_all_is_ready_at_once():
    arena = HostArena(num_blocks=3, block_bytes=1000, pinned_for=torch.device("cpu"))
    assert arena.ready_blocks == 3 and arena.pinned_bytes == 0 and arena.registration is None


def test_processors_near_the_device_are_those_of_its_node(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "PCI_DEVICES", tmp_path)
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "local_cpus").write_text("0000004c\n")
    assert processors_near("0000:1b:00.0") == {2, 3, 6}
    (tmp_path / "0000:1b:00.0" / "local_cpus").write_text("00000000,00000003,00000001\n")
    assert processors_near("0000:1b:00.0") == {0, 32, 33}
    assert processors_near("0000:99:00.0") == set()


def test_pages_are_taken_by_threads_near_the_device(monkeypatch):
    near = {min(os.sched_getaffinity(0))}
    seen = []
    monkeypatch.setattr(pages, "_populate", lambda *_: seen.append(os.sched_getaffinity(0)) or 0)
    taking = pages.Pages(torch.empty(10 * SLICE, dtype=torch.uint8), [near], SLICE)
    assert taking.wait_for(9 * SLICE)
    taking.close()
    assert seen and all(each == near for each in seen)


def test_processors_of_nodes_leave_out_nodes_that_have_none(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "NODES", tmp_path)
    assert processors_of_nodes() == []
    for name, mask in (("node0", "000000ff"), ("node1", "0000ff00"), ("node2", "00000000"), ("has_cpu", "1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpumap").write_text(mask + "\n")
    assert processors_of_nodes() == [set(range(8)), set(range(8, 16))]


def test_pages_of_a_shared_region_are_taken_on_all_nodes_in_turn(driver, monkeypatch):
    allowed, chosen = set(range(4)), []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, processors: chosen.append(frozenset(processors)))
    monkeypatch.setattr(arena_module, "processors_of_nodes", lambda: [{0, 1}, {2, 3}])
    monkeypatch.setattr(arena_module, "processors_near", lambda _: {2})
    shared = pinned_arena(driver, region=mmap.mmap(-1, 300_000))
    shared.wait_until_ready()
    shared.close()
    assert sorted(map(sorted, chosen)) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    chosen.clear()
    private = pinned_arena(driver)
    private.wait_until_ready()
    private.close()
    assert chosen == [frozenset({2})] * 4


# Beside other processes


FORK = """
import gc, mmap, os
from cpu_prefix_cache.memory.arena import HostArena
arena = HostArena(64, 1 << 20)
arena.blocks.fill_(7)
child = os.fork()
if not child:  # in which torch may use one thread
    own = [mmap.mmap(-1, 8 << 20) for _ in range(20)]
    for each in own:
        each[:] = bytes([9]) * len(each)
    del arena
    gc.collect()
    os._exit(not all(each[:] == bytes([9]) * len(each) for each in own))
_, status = os.waitpid(child, 0)
print(status, bool((arena.blocks == 7).all()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a fork shares the region until it is written to")
def test_a_fork_that_forgets_the_region_keeps_what_it_has_itself():
    """Its own mappings must not lie where the region is: forgetting the region would unmap them."""
    forked = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert forked.stdout.split() == ["0", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is pinned")
def test_a_fork_takes_part_in_no_page_of_the_region():
    """A page that both have is copied when one of them writes, and what is pinned would lie elsewhere then."""
    arena = HostArena(4, 1 << 20)
    arena.blocks.fill_(7)
    child = os.fork()
    if not child:
        os._exit(int(arena.blocks[3, 5]))  # all of it would need torch's threads
    assert os.waitpid(child, 0)[1] == 0
    assert (arena.blocks == 7).all()


@pytest.fixture
def macos(monkeypatch, tmp_path):
    """A machine that looks like macOS to a region."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(limits, "MEMINFO", tmp_path / "missing")
    monkeypatch.setattr(limits, "MEMBERSHIP", tmp_path / "missing", raising=False)
    for name in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        monkeypatch.delattr(mmap, name)


def test_without_linux_there_are_regions_too(macos):
    arena = HostArena(3, 1000)
    arena.blocks.fill_(7)
    assert arena.ready_blocks == 3
    with pytest.raises(ConfigurationError, match=r"ask for at most \d+ bytes"):
        HostArena(1 << 30, 1 << 20)


def test_without_linux_ranks_share_no_region(macos):
    with pytest.raises(ConfigurationError, match="no files without a name"):
        mapping.make_shared(3000)


# Shared by several ranks: see test_shared_file.py, too


@pytest.fixture
def file():
    """The file of a region of 4,000 bytes that this process has made."""
    file, _ = mapping.make_shared(4000)
    yield file
    os.close(file)


def test_ranks_that_map_one_file_have_one_region(file):
    one, other = (HostArena(4, 1000, region=mapping.map_shared(file, 4000)) for _ in range(2))
    one.blocks[2] = 7
    assert (other.blocks[2] == 7).all() and one.blocks.data_ptr() != other.blocks.data_ptr()
    child = os.fork()
    if not child:  # another process, which has neither region
        blocks = HostArena(4, 1000, region=mapping.map_shared(file, 4000)).blocks
        is_same = int(blocks[2, 5]) == 7
        blocks[3, :] = 9
        os._exit(not is_same)
    assert os.waitpid(child, 0)[1] == 0
    assert (one.blocks[3] == 9).all()
    other.close()
    assert (one.blocks[3] == 9).all()


def test_ranks_that_differ_in_size_are_refused(file):
    with pytest.raises(ConfigurationError, match="4000 bytes, but 5000 were asked for"):
        mapping.map_shared(file, 5000)


def test_a_shared_region_larger_than_this_process_may_use_is_refused():
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigurationError, match=r"ask for at most \d+ bytes"):
        mapping.make_shared(1 << 50)
    assert os.listdir("/proc/self/fd") == before


def test_no_rank_can_make_a_region_shorter_below_the_others(file):
    """They would be killed by SIGBUS."""
    for size in (0, 3999, 5000):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)


# Memory that the machine may use


def test_a_control_group_counts_what_is_used_already(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("600000000\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    assert limits.usable_bytes() == 400_000_000 - limits.RESERVED_BYTES


GB = 10**9


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Writes a control group's files: `version` 1 or 2, a folder below the root, and what is in them."""

    def write(version, folder, limit, used, **stat):
        root = tmp_path / "memory" if version == 1 else tmp_path
        where = root / folder
        where.mkdir(parents=True, exist_ok=True)
        names = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        for name, value in zip(names, (limit, used), strict=True):
            (where / f"memory.{name}").write_text(f"{value}\n")
        (where / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))

    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    monkeypatch.setattr(limits, "MEMBERSHIP", tmp_path / "membership", raising=False)
    monkeypatch.setattr(limits, "_available_bytes", lambda: 900 * GB)
    return write


def in_group(tmp_path, *lines):
    (tmp_path / "membership").write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(autouse=True)
def no_claims(monkeypatch):
    """No claims of other engines of this machine; test_claims.py has them."""
    monkeypatch.setattr(limits, "promises", list)


def usable():
    return limits.usable_bytes() + limits.RESERVED_BYTES


def test_pages_that_others_take_are_limited_by_the_machine_alone(tmp_path, group):
    in_group(tmp_path, "0::/own")
    group(2, "own", limit=8 * GB, used=GB)
    limits.check_fits(512 * GB, taken_here=False)
    with pytest.raises(ConfigurationError, match=r"may use 6\.\d+ GB"):
        limits.check_fits(512 * GB)
    with pytest.raises(ConfigurationError, match=r"may use 899\.\d+ GB"):
        limits.check_fits(1000 * GB, taken_here=False)


def test_files_that_were_read_and_can_be_read_again_are_not_used(tmp_path, group):
    """A process that has just read its weights, 140 GB of files, and takes 20 itself."""
    in_group(tmp_path, "0::/")
    group(2, "", 200 * GB, 160 * GB, anon=20 * GB, file=140 * GB, inactive_file=138 * GB)
    assert usable() == 178 * GB


def test_a_group_of_version_1_is_one_too(tmp_path, group):
    in_group(tmp_path, "9:name=systemd:/", "4:cpu,memory:/pod/engine", "3:cpuset:/", "0::/")
    group(1, "pod/engine", 100 * GB, 60 * GB, inactive_file=1 * GB, total_inactive_file=10 * GB)
    assert usable() == 50 * GB


def test_one_without_a_limit_of_version_1_is_none(tmp_path, group):
    in_group(tmp_path, "4:memory:/engine")
    group(1, "engine", 9223372036854771712, 60 * GB, total_inactive_file=0)
    assert usable() == 900 * GB


@pytest.mark.parametrize("version", [1, 2])
def test_ancestors_of_a_control_group_limit_it(tmp_path, group, version):
    in_group(tmp_path, {1: "4:memory:/slice/engine/worker", 2: "0::/slice/engine/worker"}[version])
    group(version, "slice", 300 * GB, 100 * GB)
    group(version, "slice/engine", 100 * GB, 90 * GB)
    group(version, "slice/engine/worker", "max" if version == 2 else 1 << 62, 80 * GB)
    group(version, "slice/other", 1 * GB, 1 * GB)
    assert usable() == 10 * GB


@pytest.mark.parametrize("path", ["/docker/0123", "/../../slice"])
def test_a_group_named_from_outside_of_its_container_is_the_one_at_the_root(tmp_path, group, path):
    """A container without a namespace of its own has its group where others have the root."""
    in_group(tmp_path, f"4:memory:{path}", f"0::{path}")
    group(1, "", 100 * GB, 60 * GB)
    assert usable() == 40 * GB


def test_a_control_group_without_a_limit_is_none(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    unlimited = limits.usable_bytes()
    monkeypatch.setattr(limits, "CGROUP", tmp_path / "missing")
    assert abs(limits.usable_bytes() - unlimited) < 1 << 30
