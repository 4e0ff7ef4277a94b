"""The host region beside an engine: pinned while graphs are captured, refused, shared by ranks, and given back."""

import os
import subprocess
import sys
import time

import pytest
import torch

from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import DriverError, accelerator_driver
from cpu_prefix_cache.messages.plan import StepPlan
from tests.gpu.stage import DEVICE, Stage, plan_of, wait_for


def capture(during=lambda: None):
    """Capture a graph, in the mode that forbids most to other threads, and whether it does what it should."""
    x = torch.zeros(1 << 16, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        for _ in range(20):
            x += 1
            during()
    graph.replay()
    graph.replay()
    return bool((x == 40).all())


def test_graphs_are_captured_before_and_while_the_region_is_pinned():
    stage = Stage(num_host=(2 << 30) // (6 * 18 * 1024), pinned_at_once=False)
    assert stage.arena.registration.num_bytes == 0
    assert capture()
    worker = CopyWorker(0, stage.copier, stage.arena, threads=True)
    worker.run(StepPlan(0, ()))
    seen = []
    assert capture(lambda: (time.sleep(0.005), seen.append(stage.arena.registration.num_bytes)))
    assert seen[0] < seen[-1], "nothing was pinned meanwhile"
    stage.arena.wait_until_ready()
    assert stage.arena.pinned_bytes == stage.arena.blocks.numel()
    assert stage.round_trip()
    worker.close()


def test_graphs_are_captured_while_blocks_are_copied():
    stage = Stage(blocks=2048)
    worker = CopyWorker(0, stage.copier, stage.arena, threads=True)
    ids = iter(range(1000))
    begun = []

    def copy():
        begun.append(next(ids))
        direction = (Direction.STORE, Direction.LOAD)[len(begun) % 2]
        blocks = range(1024) if direction is Direction.STORE else range(1024, 2048)
        worker.run(plan_of(begun[-1], direction, blocks, blocks))
        time.sleep(0.005)

    # an event recorded on a stream that is being captured would be part of the graph
    after = stage.copier.here()
    stage.copier.here = lambda: after
    assert capture(copy)
    assert wait_for(worker, *begun).done == set(begun)
    del stage.copier.here  # what follows is copied behind what compute has been given by then
    assert stage.round_trip()
    worker.close()


NAIVE = """
import threading, torch
from cpu_prefix_cache.memory.driver import DriverError, accelerator_driver
from tests.gpu.test_region import capture

memory, failed = torch.empty(1 << 26, dtype=torch.uint8), []

def register():
    torch.cuda.set_device(0)
    try:
        accelerator_driver().register(memory.data_ptr(), memory.numel())
    except DriverError as error:
        failed.append(error.code)

def during():
    thread = threading.Thread(target=register)
    thread.start()
    thread.join()

try:
    capture(during)
except RuntimeError:
    print("killed", bool(failed))
"""


def test_a_naive_registration_kills_the_capture():  # the control of the two above
    result = subprocess.run([sys.executable, "-c", NAIVE], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "killed True"


def test_a_region_is_used_while_it_grows():
    stage = Stage(num_host=20_000, pinned_at_once=False)
    worker = CopyWorker(0, stage.copier, stage.arena, threads=True)
    worker.run(StepPlan(0, ()))
    while not (ready := worker.report().ready_blocks):
        time.sleep(0.001)
    wanted = stage.rows([1, 2, 3]).clone()
    worker.run(plan_of(0, Direction.STORE, [ready - 1, 0, ready - 2], [1, 2, 3]))
    assert wait_for(worker, 0).done == {0}
    assert torch.equal(stage.arena.blocks[[ready - 1, 0, ready - 2]], wanted.cpu())
    worker.close()


class Refusing:
    """The driver, which refuses to pin more after `slices` slices."""

    def __init__(self, slices):
        self.left, self.real = slices, accelerator_driver()

    def __getattr__(self, name):
        return getattr(self.real, name)

    def register(self, address, num_bytes):
        if not self.left:
            raise DriverError("pin host memory", 2)
        self.left -= 1
        self.real.register(address, num_bytes)


@pytest.mark.parametrize("slices", [0, 2])
def test_a_region_that_the_driver_will_not_pin_brings_right_bytes(monkeypatch, caplog, slices):
    refusing = Refusing(slices)
    monkeypatch.setattr("cpu_prefix_cache.memory.arena.accelerator_driver", lambda: refusing)
    stage = Stage(blocks=600)
    assert stage.arena.ready_blocks == 600
    assert stage.arena.registration.num_bytes == slices << 24
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    for seed in range(4):
        assert stage.round_trip(seed)
    stage.arena.close()


def test_without_batches_blocks_go_one_by_one(monkeypatch):
    monkeypatch.setattr(type(accelerator_driver()), "has_batches", False)
    stage = Stage(blocks=200)
    assert stage.round_trip()
    stage.arena.close()


RANK = """
import os, sys, torch
from cpu_prefix_cache.deciding import Direction
from tests.gpu.stage import Stage, DEVICE
import tests.gpu.stage as stage_module
from cpu_prefix_cache.memory import mapping
from cpu_prefix_cache.memory.arena import HostArena


def shared(num_blocks, block_bytes, **options):
    file, num_bytes = int(sys.argv[1]), num_blocks * block_bytes
    os.ftruncate(file, num_bytes)  # by the first one
    return HostArena(num_blocks, block_bytes, region=mapping.map_shared(file, num_bytes), **options)


stage_module.HostArena = shared
stage = Stage(blocks=300)
wanted = stage.rows(range(300)).clone()
if sys.argv[2] == "store":
    stage.copy(Direction.STORE, reversed(range(300)), range(300))
else:
    for part in stage.parts:
        part.fill_(0xAB)
    stage.copy(Direction.LOAD, reversed(range(300)), range(300))
    assert torch.equal(stage.rows(range(300)), wanted)
print("ready", flush=True)
sys.stdin.readline()
stage.arena.close()
"""


def test_blocks_that_one_rank_stores_in_a_shared_region_another_loads():
    file = os.memfd_create("cpu-prefix-cache-gpu")
    ranks = []
    try:
        for what in ("store", "load"):
            rank = subprocess.Popen(
                [sys.executable, "-c", RANK, str(file), what],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[file],
            )
            ranks.append(rank)
            assert rank.stdout.readline() == "ready\n"
    finally:
        for rank in ranks:
            rank.communicate("\n", timeout=60)
        os.close(file)
    assert [rank.returncode for rank in ranks] == [0, 0]


def locked_bytes():
    with open("/proc/self/smaps") as smaps:
        return sum(int(line.split()[1]) for line in smaps if line.startswith("Rss:")) * 1024


def test_after_close_nothing_is_pinned_and_the_memory_is_given_back():
    arena = HostArena(1 << 12, 1 << 18, pinned_for=DEVICE)  # 1 GiB
    before = locked_bytes()
    arena.wait_until_ready()
    address = arena.blocks.data_ptr()
    assert arena.blocks.is_pinned()
    assert locked_bytes() >= 1 << 30
    arena.close()
    assert locked_bytes() < max(before, 1 << 30)
    again = HostArena(1 << 12, 1 << 18, pinned_for=DEVICE)
    assert address  # the same addresses may be pinned anew
    again.wait_until_ready()
    assert again.pinned_bytes == again.blocks.numel()
    again.close()
