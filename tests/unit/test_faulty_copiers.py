"""Copiers of `cpu_prefix_cache.testing`: their faults come as described, and a name imports only what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cpu_prefix_cache import testing
from cpu_prefix_cache.copying import Copier, Passed
from cpu_prefix_cache.deciding import Direction, GroupCopy
from cpu_prefix_cache.testing import CorruptingCopier, FailingCopier, LateCopier, MeddlingCopier

SOURCES = Path(__file__).parents[2] / "src"
COPIES = [GroupCopy(0, (0,), (2, 3))]
NOW = Passed()


class Counting(Copier):
    """Copies nothing, and counts."""

    def __init__(self):
        self.copies = 0

    def here(self):
        return NOW

    def submit(self, direction, copies, after):
        self.copies += 1
        return NOW


class FailsFirst(MeddlingCopier):
    fails = True

    def copy(self, direction, copies):
        if self.fails:
            self.fails = False
            raise RuntimeError("no luck")
        return super().copy(direction, copies)


@pytest.fixture
def inner():
    return Counting()


@pytest.fixture
def tensors():
    return [[torch.ones(5, 4, dtype=torch.float32)]]


@pytest.mark.parametrize("kind", [MeddlingCopier, CorruptingCopier, FailingCopier, LateCopier])
def test_each_is_what_wrap_copier_takes(kind, inner, tensors):
    assert kind(inner, tensors).here() is NOW


def test_damage_is_done_to_the_first_block_of_the_first_load(inner, tensors):
    copier = CorruptingCopier(inner, tensors)
    copier.submit(Direction.STORE, COPIES, NOW)
    assert copier.corrupted == 0
    for _ in range(2):
        copier.submit(Direction.LOAD, COPIES, NOW)
    assert copier.corrupted == 1
    assert tensors[0][0].any(dim=1).tolist() == [True, True, False, True, True]


def test_a_share_of_copies_fails_and_half_of_these_have_moved_their_bytes(inner):
    copier = FailingCopier(inner, share=0.5)
    for _ in range(200):
        try:
            copier.submit(Direction.LOAD, COPIES, NOW)
        except RuntimeError:
            continue
    assert 70 < copier.failed < 130
    assert 20 < 200 - inner.copies < copier.failed - 20


def test_a_late_copy_begins_when_it_was_queried_several_times(inner):
    late = LateCopier(inner, queries=2).submit(Direction.LOAD, COPIES, NOW)
    assert [late.passed() for _ in range(2)] == [False, False] and inner.copies == 0
    assert late.passed() and inner.copies == 1


def test_late_copies_begin_in_their_order(inner):
    copier = LateCopier(inner)
    first, second = (copier.submit(Direction.LOAD, COPIES, NOW) for _ in range(2))
    second.until_passed()
    assert inner.copies == 2 and first.passed()


def test_a_late_copy_that_fails_is_no_failure_of_another(inner):
    """Else that one would count as ended, and move its bytes later."""
    copier = LateCopier(FailsFirst(inner))
    first, second = (copier.submit(Direction.LOAD, COPIES, NOW) for _ in range(2))
    second.until_passed()
    assert inner.copies == 1 and second.passed()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            first.passed()


@pytest.mark.parametrize(
    ("name", "missing"),
    [("CorruptingCopier", "hypothesis"), ("check_store", "hypothesis"), ("check_store", "torch"), ("Trial", "torch")],
)
def test_a_name_imports_what_it_needs_and_no_more(name, missing):
    program = f"import sys; sys.modules[{missing!r}] = None; from cpu_prefix_cache.testing import {name}"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": str(SOURCES), "PATH": ""})


def test_another_name_is_no_attribute():
    assert not hasattr(testing, "check_engine")
