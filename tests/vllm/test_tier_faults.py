"""Chunks served after each fault, with a tier of ours; and with vLLM's own, where the same faults do harm."""

import pytest

from tests.vllm import tier_faults
from tests.vllm.secondary import ours, theirs
from tests.vllm.tier_faults import Bed

RIGHT, COMPUTED, WRONG = "abcd", "....", "????"


@pytest.mark.parametrize(
    ("story", "with_ours", "with_theirs"),
    [
        (tier_faults.nothing, RIGHT, RIGHT),
        (tier_faults.flipped_bit, COMPUTED, WRONG),
        (tier_faults.lost_pages, COMPUTED, WRONG),
        (tier_faults.misplaced_write, COMPUTED, WRONG),
        (tier_faults.other_weights, COMPUTED, WRONG),
        (tier_faults.other_dtype, COMPUTED, COMPUTED),
        (tier_faults.new_weights, COMPUTED, WRONG),
    ],
    ids=lambda each: each.__name__ if callable(each) else "",
)
def test_nothing_wrong_is_served(tmp_path, story, with_ours, with_theirs):
    for name, kind, served in (("ours", ours, with_ours), ("theirs", theirs, with_theirs)):
        (tmp_path / name).mkdir()
        assert story(Bed(tmp_path / name, kind)) == served, name


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_wrong(tmp_path):
    served = tier_faults.killed(Bed(tmp_path, ours), kills=3)
    assert "?" not in served
    assert served != "." * len(served)


@pytest.mark.skipif(not tier_faults.can_mount(), reason="no file system can be mounted")
def test_a_full_disk_has_the_newest_chunks(tmp_path):
    assert tier_faults.full_disk(Bed(tmp_path, ours)) == RIGHT
