"""Folders of other models and releases give up their room: the oldest first, and none that a process has."""

import logging
import os

import pytest

from cpu_prefix_cache.slab import room
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.tier import RankPart
from cpu_prefix_cache.tier import TierUnavailable
from tests.unit.slab.host_region import region
from tests.unit.slab.small_slab import BLOCK, PIECES, namespace

BYTES = 1_000_000


def opened(path, model, nbytes=BYTES, rank=0, ranks=1, **said):
    tier = FileTier(str(path), nbytes, model=model, revision="1", **said)
    part = RankPart(tier.slots(BLOCK, host_blocks=1, owners=ranks), rank, number=rank, owners=ranks)
    return tier.open(namespace(model=model), region(1), PIECES[1:2], part)


def models(path):
    known = {namespace(model=model).folder: model for model in "abcde"}
    return sorted(known.get(each.name, each.name) for each in path.iterdir())


def ages(path, model, seconds):
    """Sets the age of the folder that this model has left."""
    for file in (path / namespace(model=model).folder).rglob("*"):
        status = file.stat()
        os.utime(file, (status.st_atime - seconds, status.st_mtime - seconds))


def bytes_in(path):
    return sum(each.lstat().st_blocks * 512 for each in path.rglob("*"))


def test_after_an_upgrade_the_new_release_has_the_room_of_the_old_one(tmp_path, caplog):
    for model in "abc":
        with caplog.at_level(logging.WARNING):
            opened(tmp_path, model).close()
        assert models(tmp_path) == [model] and bytes_in(tmp_path) <= BYTES
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "removed to make room" in lines[0] and "of 'a', revision 'r'" in lines[0]


@pytest.mark.parametrize(("free", "left"), [(0, "d"), (1, "ad"), (2, "acd"), (3, "abcd")])
def test_the_oldest_goes_first_and_no_more_than_is_needed(tmp_path, free, left):
    for model, days in ("a", 1), ("b", 3), ("c", 2):
        opened(tmp_path, model, 300_000, keep_others=True).close()
        ages(tmp_path, model, days * 86_400)
    opened(tmp_path, "d", 300_000, keep_others=True).close()
    folder = os.open(tmp_path, os.O_RDONLY)
    room.make_room(
        folder,
        tmp_path,
        namespace(model="d").folder,
        allowed=10**9,
        has_room=lambda: len(models(tmp_path)) <= 1 + free,
    )
    os.close(folder)
    assert "".join(models(tmp_path)) == left


def test_one_that_a_process_has_keeps_its_room(tmp_path):
    other = opened(tmp_path, "a")
    opened(tmp_path, "b").close()
    assert models(tmp_path) == ["a", "b"]
    other.close()
    opened(tmp_path, "b").close()
    assert models(tmp_path) == ["b"]


def test_one_of_which_a_process_has_any_rank_keeps_its_room(tmp_path):
    ranks = [opened(tmp_path, "a", rank=rank, ranks=2) for rank in range(2)]
    ranks[0].close()
    opened(tmp_path, "b").close()
    assert models(tmp_path) == ["a", "b"] and len(list(tmp_path.glob("*/rank-*-of-2/blocks"))) == 2
    ranks[1].close()


def test_folders_stay_with_keep_others(tmp_path):
    opened(tmp_path, "a").close()
    opened(tmp_path, "b", keep_others=True).close()
    assert models(tmp_path) == ["a", "b"]


def test_foreign_files_and_folders_stay(tmp_path):
    foreign = ["lost+found", "0" * 31, "0" * 32, "engine-1", "F" * 32]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(bytes(BYTES))
    (tmp_path / ("1" * 32)).write_text("a file")
    os.symlink(tmp_path / "lost+found", tmp_path / ("2" * 32))
    opened(tmp_path, "a").close()
    assert models(tmp_path) == sorted([*foreign, "1" * 32, "2" * 32, "a"])
    assert all((tmp_path / name / "x").stat().st_size == BYTES for name in foreign)


def test_no_link_below_a_folder_of_ours_is_followed(tmp_path):
    """Otherwise a user with write access could have anything removed."""
    opened(tmp_path, "a").close()
    [rank] = tmp_path.glob("*/rank-*")
    elsewhere = tmp_path / "elsewhere"
    rank.rename(elsewhere)
    os.symlink(elsewhere, rank)
    opened(tmp_path, "b").close()
    assert {"blocks", "generations", "manifest.json", "records"} <= {each.name for each in elsewhere.iterdir()}


def test_a_folder_that_cannot_be_removed_is_logged_and_left(tmp_path, caplog):
    opened(tmp_path, "a").close()
    [rank] = tmp_path.glob("*/rank-*")
    (rank / "a folder").mkdir()
    opened(tmp_path, "b").close()
    assert models(tmp_path) == ["a", "b"] and "cannot be removed" in caplog.text


def test_a_disk_without_room_all_the_same_is_reported(tmp_path):
    opened(tmp_path, "a").close()
    with pytest.raises(TierUnavailable, match="the disk has or allows less"):
        opened(tmp_path, "b", 1 << 60)


def test_an_engines_folder_is_apart_from_others(tmp_path):
    """Under data parallelism engines with the same path run beside one another, and each looks into its own."""
    opened(tmp_path, "a").close()
    opened(tmp_path, "a", engine=1).close()
    opened(tmp_path, "b", engine=1).close()
    assert models(tmp_path) == ["a", "engine-1"] and models(tmp_path / "engine-1") == ["b"]
