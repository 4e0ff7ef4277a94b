"""A tier over host memory that is a view of bytes, in a process that has no torch."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.messages.plan import CHUNK, Direction, GroupCopy, Label
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab.tier_copier import TierCopier
from tests.unit.slab.small_slab import BLOCK, FULL, open_slab

PIECES = (Piece(FULL, 1, 1, BLOCK),)
KEY = b"k" * 32


def view(blocks, block_bytes=BLOCK):
    return memoryview(mmap.mmap(-1, blocks * block_bytes)).cast("B", shape=[blocks, block_bytes])


def copy_of(label, slot, block):
    return [GroupCopy(0, (slot,), (block,), (label,))]


def test_bytes_of_a_view_come_back(tmp_path):
    memory, slab = view(4), open_slab(tmp_path)
    copier = TierCopier(slab, memory, PIECES)
    flat = memory.cast("B")
    flat[BLOCK : 2 * BLOCK] = bytes(range(256)) * (BLOCK // 256)
    label = Label(KEY, b"", 0, 0, CHUNK, slab.next_generation)
    copier.copy(Direction.STORE, copy_of(label, slot=3, block=1))
    copier.copy(Direction.LOAD, copy_of(label, slot=3, block=2))
    assert flat[2 * BLOCK : 3 * BLOCK] == flat[BLOCK : 2 * BLOCK] != flat[:BLOCK]
    assert not flat[3 * BLOCK :].tobytes().strip(b"\0"), "the control"
    copier.close()
    slab.close()


def test_a_view_that_is_not_host_blocks_is_refused(tmp_path):
    slab = open_slab(tmp_path)
    for memory in (view(4).cast("B"), view(4, BLOCK // 2)):
        with pytest.raises(ConfigurationError, match=r"host memory|bytes below"):
            TierCopier(slab, memory, PIECES)
    slab.close()


def test_a_tier_in_files_takes_no_torch():
    rooms = "cpu_prefix_cache.slab." + ", cpu_prefix_cache.slab.".join(("opening", "rank_tier", "scan", "slab"))
    program = f"import sys, {rooms}; print(sorted({{'torch', 'triton', 'numpy'}} & set(sys.modules)))"
    source = str(Path(__file__).parents[3] / "src")
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    assert found.stdout.strip() == "[]"
