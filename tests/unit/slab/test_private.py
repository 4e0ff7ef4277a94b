"""A local user who may write to the path of a tier: he can make beforehand whatever names he likes, and gains nothing.

The name of a namespace's folder is a digest of public facts, so anybody can know it.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from cpu_prefix_cache.slab import manifest
from cpu_prefix_cache.slab.tier import RankPart
from cpu_prefix_cache.tier import TierUnavailable
from tests.unit.slab.small_slab import BLOCK, SLOTS, Letters, namespace, open_slab

NOBODY = 65534
NAMES = ["lock", "manifest.json", "blocks", "records", "generations"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can act as two users")


@pytest.fixture
def victim(tmp_path):
    """A file of the service's user, which stays as it is."""
    path = tmp_path / "victim"
    path.write_text("the service's own file")
    yield path
    assert path.read_text() == "the service's own file"


@pytest.fixture
def path(tmp_path):
    """Where all may make files, as in /tmp."""
    folder = tmp_path / "open to all"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def rank_in(path):
    return path / namespace().folder / "rank-0-of-1"


def made_for_us(path):
    """A folder with a manifest that fits."""
    rank_in(path).mkdir(parents=True, mode=0o755)
    wanted = manifest.manifest_of(namespace(), RankPart(SLOTS), BLOCK, 10**6)
    (rank_in(path) / "manifest.json").write_text(json.dumps(wanted))
    (rank_in(path) / "generations").write_text(json.dumps({"floor": 0, "last": 0}))


def given_to_nobody(path):
    for each in (path, *path.rglob("*")):
        os.chown(each, NOBODY, NOBODY, follow_symlinks=False)


def refused(path, match):
    with pytest.raises(TierUnavailable, match=match):
        open_slab(path).close()


@needs_root
def test_a_folder_of_another_user_is_not_used(path, victim):
    made_for_us(path)
    os.symlink(victim, rank_in(path) / "blocks")
    given_to_nobody(path / namespace().folder)
    refused(path, f"belongs to user {NOBODY}")


@needs_root
def test_control_a_folder_of_our_own_that_looks_so_is_used(path):
    made_for_us(path)
    open_slab(path).close()


@needs_root
def test_a_ranks_folder_of_another_user_is_not_used(path):
    made_for_us(path)
    given_to_nobody(rank_in(path))
    refused(path, f"rank-0-of-1 belongs to user {NOBODY}")


@needs_root
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_another_user_is_not_used(path, name):
    open_slab(path).close()
    os.chown(rank_in(path) / name, NOBODY, NOBODY)
    refused(path, f"{name} belongs to user {NOBODY}")


@needs_root
def test_an_engines_folder_of_another_user_is_not_used(path):
    (path / "engine-2").mkdir()
    given_to_nobody(path / "engine-2")
    with pytest.raises(TierUnavailable, match=f"engine-2 belongs to user {NOBODY}"):
        open_slab(path, engine=2).close()


@pytest.mark.parametrize("name", NAMES)
def test_no_link_is_followed_to_a_file(path, victim, name):
    open_slab(path).close()
    (rank_in(path) / name).unlink()
    os.symlink(victim, rank_in(path) / name)
    refused(path, f"{name} is a link")


@pytest.mark.parametrize("name", ["manifest.json", "generations"])
def test_no_link_is_followed_to_a_file_that_is_about_to_be_written(path, victim, name):
    letters = Letters(path)
    os.symlink(victim, rank_in(path) / f"{name}.new")
    letters.slab.advance(letters.first + (1 << 32))
    letters.slab.close()
    shutil.rmtree(path / namespace().folder)


@pytest.mark.parametrize("depth", [0, 1])
def test_no_link_is_followed_to_a_folder(path, tmp_path, depth):
    open_slab(path).close()
    folder, elsewhere = (rank_in(path), rank_in(path).parent)[depth], tmp_path / "elsewhere"
    folder.rename(elsewhere)
    os.symlink(elsewhere, folder)
    refused(path, "is a link")


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_is_not_waited_for(path, name):
    open_slab(path).close()
    (rank_in(path) / name).unlink()
    os.mkfifo(rank_in(path) / name)
    refused(path, f"{name} is of another kind")


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_no_file(path, name):
    open_slab(path).close()
    (rank_in(path) / name).unlink()
    (rank_in(path) / name).mkdir()
    refused(path, f"{name} is .*of another kind")


@pytest.mark.parametrize("which", ["rank", "namespace", "blocks"])
def test_folders_that_others_may_write_to_are_not_used(path, which):
    open_slab(path).close()
    {"rank": rank_in(path), "namespace": rank_in(path).parent, "blocks": rank_in(path) / "blocks"}[which].chmod(0o777)
    refused(path, "may be written by others")


def test_a_path_that_is_a_link_is_the_operators_wish(path, tmp_path):
    link = tmp_path / "link"
    os.symlink(path, link)
    letters = Letters(link)
    letters.put("abc")
    letters.slab.close()
    assert Path(rank_in(path) / "blocks").is_file()
    letters = Letters(path)
    assert letters.kept.startswith("abc")
    letters.slab.close()
