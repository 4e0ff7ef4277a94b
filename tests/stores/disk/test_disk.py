"""Faults of a disk below an engine that serves: they cost hits of the tier, and nothing else.

In every story the engine takes its steps, the host's hits go on, every block that a load brought is compared, and a
reset in the middle is one more step. DISK_SECONDS is how long a disk is frozen, or hangs; where it is given, nothing is
left out (`make test-long`).
"""

import os
import shutil
import time

import pytest

SECONDS = float(os.environ.get("DISK_SECONDS", "2"))
FILES = ["records", "blocks", "generations", "manifest.json", "lock"]


def files_of(path):
    return next(path.glob("*/rank-0-of-1"))


# Files


def test_files_are_cut_off_replaced_overwritten_and_deleted_in_service(bed):
    engine = bed.engine().warm_up()
    folder = files_of(bed.path)
    with bed.story(engine, "every file cut off, one after another"):
        for name in FILES:
            os.truncate(folder / name, 0)
            engine.goes_on()
        engine.reset()
        engine.goes_on()
    with bed.story(engine, "records and blocks overwritten with zeros"):
        for name in ("records", "blocks"):
            with (folder / name).open("r+b") as file:
                file.write(bytes(1 << 20))
        engine.goes_on()
    with bed.story(engine, "every file replaced by a copy, a reset"):
        for name in FILES:
            shutil.copy(folder / name, folder / "copy")
            os.replace(folder / "copy", folder / name)
        engine.goes_on_through_a_reset()
    with bed.story(engine, "the folder deleted, a reset"):
        shutil.rmtree(folder.parent)
        engine.goes_on_through_a_reset()
    engine.end()


def test_control_without_checksums_wrong_bytes_are_seen(bed):
    engine = bed.engine(control="unchecked").warm_up()
    blocks = files_of(bed.path) / "blocks"
    with blocks.open("r+b") as file:
        file.write(b"x" * blocks.stat().st_size)
    engine.wait_for(lambda seen: seen["wrong"])


# ext4


@pytest.mark.on("ext4")
def test_a_disk_that_is_frozen(ext4, on_ext4):
    engine = on_ext4.engine().warm_up()
    with on_ext4.story(engine, f"frozen for {SECONDS:g} s, with a reset"), ext4.frozen():
        engine.goes_on_through_a_reset(SECONDS)
    with on_ext4.story(engine, "thawed"):
        engine.uses_its_tier()
    engine.end()
    later = on_ext4.engine(weights=engine.weights)
    with on_ext4.story(later, "a restart after it"):
        later.warm_up()
    assert later.seen["found"] == 0, "what is stored after a reset is for no later start"
    later.end()


@pytest.mark.on("patience")
@pytest.mark.on("ext4")
def test_control_an_engine_that_writes_to_a_mapped_file_stops_with_the_disk(ext4, on_ext4):
    engine = on_ext4.engine(control="mapped")
    engine.goes_on()
    with ext4.frozen():
        time.sleep(0.5)
        before = engine.seen["steps"]
        time.sleep(0.5)
        assert engine.seen["steps"] == before


@pytest.mark.on("patience")
@pytest.mark.on("ext4")
def test_a_disk_that_is_full(ext4, on_ext4):
    engine = on_ext4.engine().warm_up()
    with on_ext4.story(engine, "full, with two resets"), ext4.full():
        engine.goes_on()
        engine.reset()
        engine.goes_on_through_a_reset()
        engine.wait_for(lambda seen: "cannot keep a reset" in engine.log)
    with on_ext4.story(engine, "there is room again"):
        engine.uses_its_tier()
    engine.end()


@pytest.mark.on("ext4")
@pytest.mark.parametrize("fault", ["fail", pytest.param("shut_down", marks=pytest.mark.on("patience"))])
def test_a_disk_that_is_read_only_or_gone(ext4, on_ext4, fault):
    engine = on_ext4.engine().warm_up()
    what = {"fail": "read-only after an error of ext4", "shut_down": "a disk that is gone"}[fault]
    with on_ext4.story(engine, f"{what}, with two resets"):
        getattr(ext4, fault)()
        engine.goes_on(SECONDS / 2)
        for _ in range(2):
            engine.reset()
            engine.goes_on()
        engine.wait_for(lambda seen: "cannot keep a reset" in engine.log)
        before = engine.seen["tier_tokens"]
        engine.goes_on()
        assert engine.seen["tier_tokens"] == before, "the tier serves nothing any more"
    engine.end()


# A file system in user space


@pytest.mark.on("fuse")
def test_a_file_system_that_fails_and_comes_back(faulty, on_faulty):
    engine = on_faulty.engine().warm_up()
    for fault, seconds in (("hang", SECONDS), ("EIO", 1), ("ENOSPC", 1), ("EROFS", 1)):
        with on_faulty.story(engine, f"{fault} for {seconds:g} s, with a reset"), faulty.told(fault):
            engine.goes_on_through_a_reset(seconds)
        with on_faulty.story(engine, f"{fault} is over"):
            engine.uses_its_tier()
    with on_faulty.story(engine, "the file system dies, with a reset"):
        faulty.die()
        engine.goes_on_through_a_reset()
    engine.end()
