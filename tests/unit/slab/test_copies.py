"""A folder that was copied while a process used it, or restored in part: some of its files are from before a reset for
new weights, and the others from after it. Who opens the copy has the weights that name the folder, those of before.

A letter stands for the bytes that the old weights compute, its capital for those of the new ones.
"""

import itertools
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from cpu_prefix_cache.messages.generations import begin_of, range_of
from cpu_prefix_cache.slab import slab
from cpu_prefix_cache.slab.generations import MARK
from tests.unit.slab.small_slab import BLOCK, Letters, label, open_slab, page

FILES = ("generations", MARK, "records", "blocks")
MOMENTS = list(itertools.product((False, True), repeat=len(FILES)))  # of each file: whether it is from after the reset


def reset_for_new_weights(letters):
    """From now on it writes what the new weights compute."""
    floor = begin_of(range_of(letters.first) + 1)
    letters.slab.advance(floor)
    letters.slab.keep()
    views = [page(each.encode() * BLOCK) for each in "ABC"]
    letters.slab.write(range(3), views, [label(each, floor + ord(each)) for each in "abc"])


def found(path):
    """Letters from before that a process is served which opens the folder."""
    opened = open_slab(path)
    served = ""
    for slot in range(opened.slots):
        record, view = opened.record(slot), page()
        if record is None or record.label.generation >= opened.next_generation:
            continue
        if not opened.read([slot], [view], [record.label]):
            served += chr(view[0])
    opened.close()
    return served


def copied(tmp_path, are_late):
    """The copy, with these of FILES from after the reset."""
    (tmp_path / "used").mkdir()
    letters = Letters(tmp_path / "used")
    letters.put("abc")
    shutil.copytree(tmp_path / "used", tmp_path / "copy")
    reset_for_new_weights(letters)
    (there,) = (tmp_path / "copy").glob("*/rank*")
    for name, is_late in zip(FILES, are_late, strict=True):
        if is_late:
            shutil.copy(Path(letters.slab.folder) / name, there / name)
    letters.slab.close()
    return tmp_path / "copy"


@pytest.mark.parametrize("are_late", MOMENTS, ids=lambda late: "".join("ba"[each] for each in late))
def test_files_of_several_moments_serve_nothing_of_the_new_weights(tmp_path, are_late):
    """Also at the second start, for which what the first one has left is from before."""
    copy = copied(tmp_path, are_late)
    for _ in range(2):
        assert found(copy) in ("", "abc")


def test_control_files_of_one_moment_serve_what_was_there(tmp_path):
    assert found(copied(tmp_path, (False,) * len(FILES))) == "abc"


@pytest.mark.parametrize("are_late", MOMENTS, ids=lambda late: "".join("ba"[each] for each in late))
def test_an_opening_that_fails_leaves_what_the_next_one_goes_by(tmp_path, are_late, monkeypatch):
    copy = copied(tmp_path, are_late)
    with monkeypatch.context() as patched:
        patched.setattr(slab, "RecordFile", Mock(side_effect=OSError("the disk is slow to wake")))
        with pytest.raises(OSError, match="slow"):
            open_slab(copy)
    assert found(copy) in ("", "abc")
