"""Loads section by section: what a section brings is there when its end has passed, and the rest comes later."""

import pytest
import torch

from cpu_prefix_cache.copier import sections as sections_module
from cpu_prefix_cache.copier.binding import Binding
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.sections import in_sections
from cpu_prefix_cache.deciding import Direction, GroupCopy
from tests.support.simulated_driver import SimulatedDriver
from tests.unit.copier.bench import DEVICE, POISON, poisoned, randoms, raw, shapes_of
from tests.unit.copier.simulated import simulated_copier

LAYERS = 10
RING = 64 * 1024


@pytest.fixture(autouse=True)
def small_sections(monkeypatch):
    monkeypatch.setattr(sections_module, "SECTION_BYTES", 100)
    monkeypatch.setattr(sections_module, "LOAD_BYTES", 1)


@pytest.fixture(params=["reference", "staged", "simulated", "directly"])
def build(request):
    def build(shapes, tensors, host):
        if request.param in ("simulated", "directly"):
            if DEVICE.type != "cpu":
                pytest.skip(f"the tensors are on {DEVICE}, which has a driver")
            least = 1 if request.param == "directly" else RING
            driver = SimulatedDriver(has_batches=True)
            return simulated_copier(driver, shapes, tensors, host, ring_bytes=RING, direct_bytes=least)
        return choose_copier(shapes, tensors, host, name=request.param, ring_bytes=RING).copier

    return build


class Bench:
    """A group of ten layers of 40 bytes, with 2 device blocks to a piece, and one of three layers of 100."""

    def __init__(self, build) -> None:
        self.parts = [
            [randoms(9, 40, seed=at) for at in range(LAYERS)],
            [randoms(7, 100, seed=50 + at) for at in range(3)],
        ]
        shapes = shapes_of(self.parts, [2, 1], host_block_bytes=300)
        self.host = poisoned(20, 300)
        self.copier = build(shapes, self.parts, self.host)
        self.binding = Binding(shapes, self.parts, self.host)
        width = shapes.pieces[0].host_blocks
        self.copies = [GroupCopy(0, tuple(range(2 * width)), (3, 8, 1, 5)), GroupCopy(1, (15, 12), (2, 6))]
        self.copier.copy(Direction.STORE, self.copies)
        self.before = [[raw(part).clone() for part in group] for group in self.parts]
        for part in (part for group in self.parts for part in group):
            part.fill_(POISON)

    def has_come(self, group, part):
        """Whether all of a part has come, or (False) nothing of it."""
        to = list(self.copies[group].device_blocks)
        rows, was = raw(self.parts[group][part]), self.before[group][part]
        came = torch.equal(rows[to], was[to])
        assert came or (rows == POISON).all()
        return came


def test_a_section_that_has_ended_has_come_and_those_behind_it_have_not(build):
    bench = Bench(build)
    ends = []

    def submitted(end):
        end.until_passed()
        ends.append(
            [bench.has_come(0, part) for part in range(LAYERS)] + [bench.has_come(1, part) for part in range(3)]
        )

    bench.copier.submit_sections(bench.copies, bench.copier.here(), submitted)
    sections = [*bench.copier.sections(0), *bench.copier.sections(1)]
    assert sections[:LAYERS] == sorted(sections[:LAYERS]) and len(ends) == max(sections) + 1 > 3
    for at, came in enumerate(ends):
        assert came == [section <= at for section in sections]
    assert all(ends[-1])
    for group, copy in enumerate(bench.copies):
        others = [at for at in range(len(raw(bench.parts[group][0]))) if at not in copy.device_blocks]
        assert all((raw(part)[others] == POISON).all() for part in bench.parts[group])


@pytest.mark.parametrize("together", [2, 3, 100])
def test_sections_of_a_small_load_come_together_and_each_has_its_end(build, monkeypatch, together):
    bench = Bench(build)
    sections = [*bench.copier.sections(0), *bench.copier.sections(1)]
    count, parts = 1 + max(sections), [*((0, part) for part in range(LAYERS)), *((1, part) for part in range(3))]
    num_bytes = sum(len(copy.host_blocks) for copy in bench.copies) * bench.host.shape[1]
    monkeypatch.setattr(sections_module, "LOAD_BYTES", together * num_bytes // count)
    ends = []

    def submitted(end):
        end.until_passed()
        ends.append(end)
        come = [section for section, part in zip(sections, parts, strict=True) if bench.has_come(*part)]
        assert come == [section for section in sections if section < max(len(ends), 1 + max(come))]

    bench.copier.submit_sections(bench.copies, bench.copier.here(), submitted)
    assert len(ends) == count and all(bench.has_come(*part) for part in parts)
    if not isinstance(bench.copier, ReferenceCopier):
        assert len({id(end) for end in ends}) == -(-count // together)


def test_a_load_of_nothing_ends(build):
    bench, ends = Bench(build), []
    nothing = [GroupCopy(0, (), ()), GroupCopy(1, (), ())]
    bench.copier.submit_sections(nothing, bench.copier.here(), ends.append)
    ends[-1].until_passed()
    assert not any(bench.has_come(0, part) for part in range(LAYERS))


def test_sections_are_all_parts_in_turn_and_no_more_than_the_most(build, monkeypatch):
    bench = Bench(build)
    for most in range(1, 12):
        monkeypatch.setattr(sections_module, "MOST_SECTIONS", most)
        for group in bench.binding.groups:
            cut = in_sections(group)
            least = group.offsets[-1] / max(1, min(most, group.offsets[-1] // 100))
            assert 1 <= len(cut) <= most
            assert all(section.offsets[-1] - section.offsets[0] >= least for section in cut)
            assert [part for section in cut for part in section.parts] == list(group.parts)
            ends = [(section.offsets[0], section.offsets[-1]) for section in cut]
            assert [0, *(end for _, end in ends)] == [*(begin for begin, _ in ends), group.offsets[-1]]


def test_small_pieces_come_as_one(build, monkeypatch):
    monkeypatch.setattr(sections_module, "SECTION_BYTES", 1 << 20)
    bench, ends = Bench(build), []
    bench.copier.submit_sections(bench.copies, bench.copier.here(), ends.append)
    ends[-1].until_passed()
    assert len(ends) == 1 and all(bench.has_come(0, part) for part in range(LAYERS))
