"""Whatever ends the process, a restart serves no wrong byte.  S8.19

A process that writes is killed, again and again. Each time every slot that has a record is read into a poisoned buffer
and compared with what its key stands for. Two controls show that the test would notice.
"""

import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cpu_prefix_cache.slab import records
from tests.unit.slab.crash import BLOCK, SLOTS, content, open_slab
from tests.unit.slab.small_slab import POISON

KILLS = int(os.environ.get("CRASH_KILLS", "10"))
HOME = Path(__file__).parents[3]


def kill_a_writer(path, seed, *careless):
    command = [sys.executable, str(HOME / "tests/unit/slab/crash.py"), str(path), str(seed), *careless]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HOME / "src"), str(HOME)])}
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert writer.stdout.readline() == "go\n"
    time.sleep(random.Random(seed).uniform(0.02, 0.5))
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()


def read_all(slab):
    """How many slots are empty, served and right, served and wrong, or refused."""
    page = mmap.mmap(-1, BLOCK)
    outcome = Counter()
    for slot in range(SLOTS):
        record = slab.record(slot)
        if record is None:
            outcome["empty"] += 1
            continue
        page[:] = bytes([POISON]) * BLOCK
        is_refused = bool(slab.read([slot], [memoryview(page)], [record.label]))
        is_right = page[:] == content(record.label.key)
        outcome["refused" if is_refused else "right" if is_right else "wrong"] += 1
    return outcome


def test_no_kill_leaves_a_wrong_byte(tmp_path):
    outcome = Counter()
    for seed in range(KILLS):
        kill_a_writer(tmp_path, seed)
        slab = open_slab(tmp_path)
        outcome += read_all(slab)
        slab.close()
    print(f"{KILLS} kills: {dict(outcome)}")
    assert outcome["wrong"] == 0
    assert outcome["right"] > KILLS * SLOTS / 2


def test_control_flipped_bits_are_all_refused(tmp_path):
    kill_a_writer(tmp_path, 1)
    slab = open_slab(tmp_path)
    full = [slot for slot in range(SLOTS) if slab.record(slot)]
    choose = random.Random(1)
    with open(os.path.join(slab.folder, "blocks"), "r+b") as file:
        for slot in full:
            at = slot * BLOCK + choose.randrange(BLOCK)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << choose.randrange(8)]))
    outcome = read_all(slab)
    assert outcome["refused"] == len(full) > 0
    assert outcome["right"] == outcome["wrong"] == 0
    slab.close()


def test_control_without_its_two_guards_wrong_bytes_are_served(tmp_path, monkeypatch):
    """Records that are not cleared before their slots are written over, and checksums that nobody compares."""

    class Any(bytes):
        def __eq__(self, other):
            return True

        __hash__ = bytes.__hash__

    outcome = Counter()
    for seed in range(max(10, KILLS // 2)):
        kill_a_writer(tmp_path, seed, "careless")
        slab = open_slab(tmp_path)
        with monkeypatch.context() as bypassed:
            bypassed.setattr(records, "checksum", lambda view: Any())
            outcome += read_all(slab)
        slab.close()
        if outcome["wrong"]:
            break
    print(f"without guards: {dict(outcome)}")
    assert outcome["wrong"] > 0


@pytest.mark.parametrize("seed", [7])
def test_one_guard_alone_suffices(tmp_path, seed):
    """Records are not cleared first: the checksum refuses what an unverified read would have served."""
    outcome = Counter()
    for each in range(5):
        kill_a_writer(tmp_path, seed + each, "careless")
        slab = open_slab(tmp_path)
        outcome += read_all(slab)
        slab.close()
    assert outcome["wrong"] == 0
