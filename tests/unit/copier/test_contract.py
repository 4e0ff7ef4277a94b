"""Contract of every copier: the right bytes to the right blocks, nothing else touched, nothing moved on a bad id."""

from dataclasses import replace

import pytest
import torch

from cpu_prefix_cache import ConfigurationError, MisuseError, keys_and_values, latents
from cpu_prefix_cache.copier import reference
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.streams import DeviceEvent
from cpu_prefix_cache.deciding import Direction, GroupCopy
from cpu_prefix_cache.memory.parts import Role, blocks_first, canonical
from cpu_prefix_cache.testing import CorruptingCopier
from tests.support.simulated_driver import SimulatedDriver
from tests.unit.copier.bench import DEVICE, POISON, poisoned, randoms, raw, shapes_of
from tests.unit.copier.simulated import simulated_copier

RING = 64 * 1024


DRIVERS = {  # of a device that is not there, where work runs late, and with seams
    "staged, with batches": dict(has_batches=True),
    "staged, one by one": dict(has_batches=False),
}


OTHER = "reference, by events of any device"  # as on devices that are neither CUDA's nor HIP's, such as Intel's XPU


@pytest.fixture(params=["reference", OTHER, "staged", *DRIVERS])
def build(request, monkeypatch):
    if request.param in DRIVERS and DEVICE.type != "cpu":
        pytest.skip(f"the tensors are on {DEVICE}, which has a driver")
    if request.param == OTHER:
        if DEVICE.type == "cpu":
            pytest.skip("host memory has no streams")
        monkeypatch.setattr(
            reference, "compute_event", lambda device: DeviceEvent(torch.accelerator.current_stream(device))
        )

    def build(shapes, tensors, host, **options):
        if request.param in DRIVERS:
            driver = SimulatedDriver(**DRIVERS[request.param])
            return simulated_copier(driver, shapes, tensors, host, ring_bytes=RING, seam_bytes=100, **options)
        name = request.param.partition(",")[0]
        return choose_copier(shapes, tensors, host, name=name, ring_bytes=RING, **options).copier

    return build


class Bench:
    """Two groups, a host region and the copier between them: `wide` has 2 device blocks to a piece, `narrow` 1."""

    def __init__(self, build, **options) -> None:
        self.wide = [randoms(6, 4, 3, dtype=torch.float32), randoms(6, 4, 1, dtype=torch.float32, seed=1)]
        self.narrow = [randoms(5, 8, 2, dtype=torch.float32, seed=2)]
        self.shapes = shapes_of([self.wide, self.narrow], [2, 1], host_block_bytes=64)
        self.host = poisoned(8, 64)
        self.copier = build(self.shapes, [self.wide, self.narrow], self.host, **options)

    @property
    def memory(self):
        return (*self.wide, *self.narrow, self.host)


def test_the_default_device_does_not_matter(build):
    """A program whose tensors are on a GPU by default; here on a device that has no bytes."""
    bench = Bench(build)
    with torch.device("meta"):
        bench.copier = build(bench.shapes, [bench.wide, bench.narrow], bench.host)
        bench.copier.copy(Direction.STORE, [GroupCopy(0, (5, 2), (4, 1))])
        before = bench.wide[0][4].clone()
        bench.wide[0][4] = POISON
        bench.copier.copy(Direction.LOAD, [GroupCopy(0, (5, 2), (4, 1))])
    assert torch.equal(bench.wide[0][4], before)


def test_a_piece_lies_on_the_host_part_after_part(build):
    bench = Bench(build)
    assert [piece.host_blocks for piece in bench.shapes.pieces] == [2, 1]
    bench.copier.copy(Direction.STORE, [GroupCopy(0, (5, 2), (4, 1))])
    expected = [bench.wide[0][4], bench.wide[0][1], bench.wide[1][4], bench.wide[1][1]]
    lies = torch.cat([bench.host[5], bench.host[2]])
    assert lies.tolist() == torch.cat([block.flatten() for block in expected]).view(torch.uint8).tolist()
    assert (bench.host[[0, 1, 3, 4, 6, 7]] == POISON).all()


def test_a_round_trip_to_other_blocks_brings_every_byte(build):
    bench = Bench(build)
    before = [raw(part).clone() for part in (*bench.wide, *bench.narrow)]
    copies = [GroupCopy(0, (7, 0, 3, 1), (0, 5, 2, 1)), GroupCopy(1, (4, 6), (3, 0))]
    bench.copier.copy(Direction.STORE, copies)
    for part in (*bench.wide, *bench.narrow):
        part.view(torch.uint8).fill_(POISON)
    bench.copier.copy(Direction.LOAD, [GroupCopy(0, (7, 0, 3, 1), (3, 4, 0, 2)), GroupCopy(1, (4, 6), (1, 2))])
    for part, was in zip(bench.wide, before, strict=False):
        assert torch.equal(raw(part)[[3, 4, 0, 2]], was[[0, 5, 2, 1]])
        assert (raw(part)[[1, 5]] == POISON).all()
    assert torch.equal(raw(bench.narrow[0])[[1, 2]], before[2][[3, 0]])
    assert (raw(bench.narrow[0])[[0, 3, 4]] == POISON).all()


def test_memory_that_was_made_in_inference_mode_is_copied_in_any(build):
    """As of an engine whose program is in it as a whole: a thread that copies is not."""
    with torch.inference_mode():
        bench = Bench(build)
    before = [raw(part).clone() for part in (*bench.wide, *bench.narrow)]
    copies = [GroupCopy(0, (7, 0, 3, 1), (0, 5, 2, 1)), GroupCopy(1, (4, 6), (3, 0))]
    bench.copier.copy(Direction.STORE, copies)
    with torch.inference_mode():
        for part in (*bench.wide, *bench.narrow):
            part.view(torch.uint8).fill_(POISON)
    bench.copier.submit_sections(copies, bench.copier.here(), lambda end: end.until_passed())
    for part, was, held in zip((*bench.wide, *bench.narrow), before, ([0, 5, 2, 1],) * 2 + ([3, 0],), strict=True):
        assert torch.equal(raw(part)[held], was[held])


def test_a_piece_may_have_more_host_blocks_than_it_fills(build):
    """As in a pipeline stage that has fewer layers of a group than the first."""
    part, host = randoms(5, 90), poisoned(10, 64)
    shapes = shapes_of([[part]], [1], host_block_bytes=64)
    shapes.pieces[0] = replace(shapes.pieces[0], host_blocks=4)
    copier, before = build(shapes, [[part]], host), raw(part).clone()
    copies = [GroupCopy(0, (8, 1, 5, 0, 7, 2, 3, 4), (3, 0))]
    copier.copy(Direction.STORE, copies)
    assert torch.equal(torch.cat([host[8], host[1, :26]]), before[3].to(host.device))
    assert torch.equal(torch.cat([host[7], host[2, :26]]), before[0].to(host.device))
    assert (host[[0, 3, 4, 5, 6, 9]] == POISON).all()
    part.fill_(POISON)
    copier.copy(Direction.LOAD, [copies[0]._replace(device_blocks=(1, 2))])
    assert torch.equal(raw(part)[[1, 2]], before[[3, 0]]) and (raw(part)[[0, 3, 4]] == POISON).all()


@pytest.mark.parametrize("device_blocks", [1, 3])
def test_neighbours_and_scattered_blocks_come_back_alike(build, device_blocks):
    """Stretches of neighbours on both sides, on one side, on neither; and a piece between two stretches."""
    parts = [randoms(100 * device_blocks, 12), randoms(100 * device_blocks, 5, seed=1)]
    shapes = shapes_of([parts], [device_blocks], 30)
    host_blocks = shapes.pieces[0].host_blocks
    host = poisoned(100 * host_blocks, 30)
    copier = build(shapes, [parts], host)
    taken = [*range(5, 25), 70, *range(25, 45), *range(99, 79, -1), *range(45, 65)]
    there = [*range(40, 60), 0, *range(60, 80), *range(1, 21), *range(99, 79, -1)]
    landed = [*range(20, 40), *range(60, 100), *range(20), 50]

    def blocks(pieces, each):
        return tuple(piece * each + at for piece in pieces for at in range(each))

    copier.copy(Direction.STORE, [GroupCopy(0, blocks(there, host_blocks), blocks(taken, device_blocks))])
    before = [part.view(100, -1).cpu() for part in parts]
    lies = host.view(100, -1)
    assert torch.equal(lies[there, : 17 * device_blocks], torch.cat([part[taken] for part in before], dim=1))
    lies[there, : 17 * device_blocks] = POISON
    assert (host == POISON).all()

    copier.copy(Direction.STORE, [GroupCopy(0, blocks(there, host_blocks), blocks(taken, device_blocks))])
    before = [part.clone() for part in before]
    for part in parts:
        part.fill_(POISON)
    copier.copy(Direction.LOAD, [GroupCopy(0, blocks(there, host_blocks), blocks(landed, device_blocks))])
    for part, was in zip(parts, before, strict=True):
        rows = part.view(100, -1).cpu()
        assert torch.equal(rows[landed], was[taken])
        assert (rows[[at for at in range(100) if at not in landed]] == POISON).all()


def test_the_rest_of_the_last_host_block_of_a_piece_is_left_alone(build):
    part = randoms(4, 90)
    host = poisoned(6, 40)
    copier = build(shapes_of([[part]], [1], 40), [[part]], host)
    copier.copy(Direction.STORE, [GroupCopy(0, (5, 1, 0, 2, 3, 4), (2, 3))])
    assert host[5].tolist() + host[1].tolist() + host[0, :10].tolist() == part[2].tolist()
    assert (host[[0, 4], 10:] == POISON).all()


# Layouts


def layouts(fp8=torch.float8_e4m3fn):
    """Layouts of engines, by name: how to allocate each for 6 blocks of 4 tokens, 2 layers, and declare its parts."""

    def apart(tensors):
        return [
            part
            for layer, (key, value) in enumerate(tensors)
            for part in (blocks_first(layer, Role.VALUE, value), blocks_first(layer, Role.KEY, key))
        ]

    def together(kv_dim):
        return lambda tensors: keys_and_values(*tensors, block_dim=1 - kv_dim, kv_dim=kv_dim)

    def latent(tensors):
        return latents(*tensors, block_tokens=4)

    def scaled(tensors):
        roles = (Role.KEY, Role.VALUE, Role.KEY_SCALE, Role.VALUE_SCALE)
        return [blocks_first(0, role, tensor) for role, tensor in zip(roles, tensors, strict=True)]

    def states(tensors):
        conv, state = tensors
        return [blocks_first(5, Role.STATE, state), blocks_first(5, Role.CONV_STATE, conv)]

    return {
        "K and V apart": ([(randoms(6, 4, 3, seed=seed), randoms(6, 4, 3, seed=seed + 1)) for seed in (1, 3)], apart),
        "K and V together": ([randoms(2, 6, 4, 3, seed=layer) for layer in range(2)], together(0)),
        "K and V side by side": ([randoms(6, 2, 4, 3, seed=layer) for layer in range(2)], together(1)),
        "padded": ([randoms(2, 6, 20, seed=layer)[:, :, :13] for layer in range(2)], together(0)),
        "MLA by tokens": ([randoms(24, 9, dtype=torch.bfloat16, seed=layer) for layer in range(2)], latent),
        "fp8 with scales": (
            [randoms(6, 4, 8, dtype=fp8), randoms(6, 4, 8, dtype=fp8, seed=1)]
            + [randoms(6, 4, 1, dtype=torch.float32, seed=seed) for seed in (2, 3)],
            scaled,
        ),
        "states": ([randoms(6, 3, 5, dtype=torch.bfloat16), randoms(6, 2, 7, 3, dtype=torch.float32)], states),
    }


def storages(tensors):
    flat = [part for each in tensors for part in (each if isinstance(each, tuple) else (each,))]
    return [torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()) for tensor in flat]


@pytest.mark.parametrize("device_blocks", [1, 3])
@pytest.mark.parametrize("layout", layouts())
def test_every_layout_comes_back(build, layout, device_blocks):  # L5.32, S7.49
    tensors, declare = layouts()[layout]
    parts = canonical(declare(tensors))
    before = [rows.clone() for rows in parts]
    host = poisoned(40, 50)
    shapes = shapes_of([parts], [device_blocks], 50)
    copier = build(shapes, [parts], host)
    here = tuple(reversed(range(2, 2 + 6 // device_blocks * shapes.pieces[0].host_blocks)))
    copier.copy(Direction.STORE, [GroupCopy(0, here, (5, 0, 3, 1, 4, 2))])
    for storage in storages(tensors):
        storage.fill_(POISON)
    some = slice(0, 3 // device_blocks * shapes.pieces[0].host_blocks)
    copier.copy(Direction.LOAD, [GroupCopy(0, here[some], (1, 5, 2))])
    for rows, was in zip(parts, before, strict=True):
        assert torch.equal(rows[[1, 5, 2]], was[[5, 0, 3]])
    for rows in parts:
        rows[[1, 5, 2]] = POISON
    assert all((storage == POISON).all() for storage in storages(tensors))  # padding and other blocks


@pytest.mark.parametrize(
    ("layout", "device_blocks", "count"),
    [("K and V apart", 1, 4), ("K and V side by side", 1, 2), ("K and V side by side", 3, 4), ("padded", 1, 4)],
)
def test_parts_that_follow_each_other_in_a_block_are_one_copy(monkeypatch, layout, device_blocks, count):
    tensors, declare = layouts()[layout]
    parts, reads = canonical(declare(tensors)), []
    shapes = shapes_of([parts], [device_blocks], 50)
    copier = choose_copier(shapes, [parts], poisoned(40, 50), name="reference").copier
    read = reference._read
    monkeypatch.setattr(reference, "_read", lambda memory, rows: reads.append(memory) or read(memory, rows))
    blocks = tuple(range(3 // device_blocks * shapes.pieces[0].host_blocks))
    copier.copy(Direction.STORE, [GroupCopy(0, blocks, (0, 1, 2))])
    assert len(reads) == count


def test_the_bytes_on_the_host_do_not_depend_on_the_engines_layout_of_k_and_v(build):  # rule 14
    keys, values = [randoms(2, 6, 12, seed=seed) for seed in (1, 2)]
    ways = {
        "apart": [
            part
            for layer in range(2)
            for part in (blocks_first(layer, Role.KEY, keys[layer]), blocks_first(layer, Role.VALUE, values[layer]))
        ],
        "together": keys_and_values(*map(torch.stack, zip(keys, values, strict=True)), block_dim=1),
        "side by side, all layers in one": keys_and_values(
            *torch.stack([keys, values], dim=1).permute(2, 0, 1, 3).contiguous().unbind(1), block_dim=0, kv_dim=1
        ),
    }
    hosts = {}
    for way, parts in ways.items():
        hosts[way] = poisoned(8, 30)
        rows = canonical(parts)
        copier = build(shapes_of([rows], [2], 30), [rows], hosts[way])
        copier.copy(Direction.STORE, [GroupCopy(0, (6, 1, 3, 7), (5, 2))])
    first, *rest = hosts.values()
    assert all(torch.equal(first, other) for other in rest)
    golden = [row for layer in range(2) for part in (keys, values) for block in (5, 2) for row in part[layer][block]]
    assert first[[6, 1, 3, 7]].flatten()[:96].tolist() == [int(byte) for byte in golden]


# Ids


BAD = {
    "past the host region": GroupCopy(1, (8,), (0,)),
    "past the device pool": GroupCopy(1, (0,), (5,)),
    "before the host region": GroupCopy(1, (-1,), (0,)),
    "before the device pool": GroupCopy(1, (0,), (-1,)),
    "half a piece there": GroupCopy(0, (2, 3), (0,)),
    "half a piece here": GroupCopy(0, (2,), (0, 2)),
    "more here than there": GroupCopy(1, (2, 3), (0,)),
    "half a block": GroupCopy(1, (1.5,), (0,)),
    "half a block among many": GroupCopy(1, (*range(300), 1.5), (0,) * 301),
    "no number": GroupCopy(1, (2,), ("0",)),
    "more than 64 bits": GroupCopy(1, (1 << 64,), (0,)),
    "no such group": GroupCopy(2, (2,), (0,)),
    "a group before the first": GroupCopy(-1, (2,), (0,)),
}


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_ids_are_refused_before_any_byte_moves(build, direction, bad):  # L5.32
    refused(Bench(build), direction, [GroupCopy(0, (0, 1), (0, 1)), bad])


def refused(bench, direction, copies, match=None):
    before = [part.clone() for part in bench.memory]
    with pytest.raises(MisuseError, match=match):
        bench.copier.copy(direction, copies)
    for part, was in zip(bench.memory, before, strict=True):
        assert torch.equal(raw(part), raw(was))


def test_a_destination_may_not_come_twice(build):
    bench = Bench(build)
    refused(bench, Direction.STORE, [GroupCopy(1, (2, 2), (0, 1))], "twice")
    refused(bench, Direction.LOAD, [GroupCopy(1, (2, 3), (1, 1))], "twice")


def test_a_destination_may_not_come_in_two_copies_of_one_transfer(build):
    bench = Bench(build)
    refused(bench, Direction.STORE, [GroupCopy(0, (2, 3), (0, 1)), GroupCopy(1, (3,), (1,))], "twice")
    refused(bench, Direction.LOAD, [GroupCopy(1, (2,), (1,)), GroupCopy(1, (3,), (1,))], "twice")


def test_a_source_may_come_twice_as_groups_have_blocks_of_their_own(build):
    bench = Bench(build)
    bench.copier.copy(Direction.STORE, [GroupCopy(1, (2, 3), (1, 1)), GroupCopy(0, (4, 5), (1, 1))])
    assert torch.equal(bench.host[2], bench.host[3])
    bench.copier.copy(Direction.LOAD, [GroupCopy(1, (2,), (1,)), GroupCopy(0, (4, 5), (1, 0))])


@pytest.mark.parametrize("direction", Direction)
def test_the_null_block_is_never_copied(build, direction):
    bench = Bench(build, null_block=0)
    refused(bench, direction, [GroupCopy(1, (2, 3), (1, 0))], "null block")
    bench.copier.copy(direction, [GroupCopy(1, (2, 3), (1, 2))])


def test_a_copy_of_nothing_does_nothing(build):
    bench = Bench(build)
    for direction in Direction:
        before = [part.clone() for part in bench.memory]
        bench.copier.copy(direction, [GroupCopy(0, (), ()), GroupCopy(1, (), ())])
        bench.copier.copy(direction, [])
        assert all(torch.equal(raw(part), raw(was)) for part, was in zip(bench.memory, before, strict=True))


# Construction


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda bench: ([bench.wide[:1], bench.narrow], bench.host), "weighs"),
        (lambda bench: ([[bench.wide[0], bench.wide[1][:5]], bench.narrow], bench.host), "differ"),
        (lambda bench: ([bench.wide], bench.host), "groups"),
        (lambda bench: ([bench.wide, bench.narrow], bench.host[:, :60]), "host blocks of 64"),
        (lambda bench: ([bench.wide, bench.narrow], bench.host.view(torch.int8)), "int8"),
        (lambda bench: ([bench.wide, [torch.zeros(1, 8, 2, device=DEVICE).expand(5, 8, 2)]], bench.host), "overlap"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(build, change, reason):
    bench = Bench(build)
    tensors, host = change(bench)
    with pytest.raises(ConfigurationError, match=reason):
        build(bench.shapes, tensors, host)


def test_parts_in_the_same_memory_are_refused(build):
    one = randoms(4, 16)
    tensors = [[one, one]]
    with pytest.raises(ConfigurationError, match="part 0 of group 'a' and the part 1 of group 'a' are the same memory"):
        build(shapes_of(tensors, [1], 32), tensors, poisoned(4, 32))


def test_a_piece_that_outgrows_its_host_blocks_is_refused(build):
    tensors = [[randoms(4, 16)]]
    shapes = shapes_of(tensors, [1], 16)
    shapes.host_block_bytes = 15
    with pytest.raises(ConfigurationError, match="more than its 1 host blocks"):
        build(shapes, tensors, poisoned(4, 15))


# The negative control of every other test


@pytest.mark.parametrize("layout", layouts())
def test_damage_on_purpose_is_seen_in_every_part_and_nowhere_else(build, layout):
    tensors, declare = layouts()[layout]
    parts = canonical(declare(tensors))
    shapes = shapes_of([parts], [1], 50)
    copier = CorruptingCopier(build(shapes, [parts], poisoned(40, 50)), [parts], group=0)
    here = tuple(range(3 * shapes.pieces[0].host_blocks))
    copier.copy(Direction.STORE, [GroupCopy(0, here, (5, 0, 3))])
    before = [rows.clone() for rows in parts]
    copier.copy(Direction.LOAD, [GroupCopy(0, (), ())])
    copier.copy(Direction.LOAD, [GroupCopy(0, here, (5, 0, 3))])
    for rows, was in zip(parts, before, strict=True):
        assert (rows[5] == 0).all() and was[5].any()
        assert torch.equal(rows[:5], was[:5])
    assert copier.corrupted == 1
