"""On a CUDA device: do staged copies bring every byte, and how near do they come to the speed of the link?

    python benchmarks/copy_check.py [--host-gb 6] [--gb 2] [--examples 40]

First random layouts, each stored and loaded by the staged copier and by the reference, into poisoned memory, and
compared byte for byte. Then fragments of 16, 18 and 64 KiB in GB/s (1e9 bytes), stores and loads, at random and at
neighbouring host blocks, beside one large pinned memcpy in the same run. Every section says what went wrong and goes
on; the exit status is 1 if one did.
"""

import argparse
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from common import print_environment
from cpu_prefix_cache import Direction, Group, GroupCopy, GroupKind, MisuseError, Piece
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.memory.arena import HostArena

POISON = 0xAB
LAYOUT_SECONDS = 25  # most of which Triton compiles
DEVICE = torch.device("cuda")
FRAGMENTS = ((16 * 1024, 48), (18 * 1024, 61), (64 * 1024, 32))  # bytes, fragments to a block


@dataclass
class Shapes:
    """What a copier needs of a planner."""

    pieces: list[Piece]
    host_block_bytes: int


def piece(name: str, num_bytes: int, device_blocks: int, host_block_bytes: int) -> Piece:
    group = Group(name=name, kind=GroupKind.PREFIX, block_tokens=1, block_bytes=num_bytes // device_blocks)
    return Piece(group, device_blocks, -(-num_bytes // host_block_bytes), num_bytes)


# Right bytes


def random_part(rng: random.Random, blocks: int) -> torch.Tensor:
    """uint8 [blocks, bytes] within larger poisoned memory: any alignment, any padding."""
    unit = rng.choice((1, 2, 4, 8, 16))
    size = rng.choice((1, 3, 16, 100, 1000, 18 * 1024 // unit)) * unit
    stride = size + rng.choice((0, 0, 1, 5)) * unit
    first = rng.choice((0, unit, 3 * unit))
    memory = torch.full((first + blocks * stride,), POISON, dtype=torch.uint8, device=DEVICE)
    part = memory.as_strided((blocks, size), (stride, 1), first)
    part.copy_(torch.randint(0, 256, (blocks, size), dtype=torch.uint8, device=DEVICE))
    return part


def memory_of(part: torch.Tensor) -> torch.Tensor:
    """All the memory a part lies in, padding included."""
    return torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())


def check_random_layouts(examples: int) -> None:
    end = time.perf_counter() + LAYOUT_SECONDS
    seed = 0
    while seed < examples and time.perf_counter() < end:
        try:
            check_one_layout(random.Random(seed))
        except Exception:
            print(f"random layout {seed} failed")
            raise
        seed += 1
    print(f"right bytes: {seed} random layouts")


def check_one_layout(rng: random.Random) -> None:
    blocks, host_block_bytes = 24, rng.choice((512, 1000, 4096, 20_000))
    tensors, pieces = [], []
    for index in range(rng.randint(1, 3)):
        parts = [random_part(rng, blocks) for _ in range(rng.randint(1, 5))]
        device_blocks = rng.randint(1, 3)
        num_bytes = device_blocks * sum(part.shape[1] for part in parts)
        pieces.append(piece(str(index), num_bytes, device_blocks, host_block_bytes))
        tensors.append(parts)
    shapes = Shapes(pieces, host_block_bytes)
    count = 4
    stores, loads = [], []
    num_host = count * sum(each.host_blocks for each in pieces) + 5
    host_ids = rng.sample(range(num_host), num_host)
    for index, each in enumerate(pieces):
        here = tuple(host_ids.pop() for _ in range(count * each.host_blocks))
        stores.append(GroupCopy(index, here, tuple(rng.sample(range(blocks), count * each.device_blocks))))
        loads.append(GroupCopy(index, here, tuple(rng.sample(range(blocks), count * each.device_blocks))))
    largest = max(
        each.device_blocks * part.shape[1] for each, parts in zip(pieces, tensors, strict=True) for part in parts
    )

    arena = HostArena(num_host, host_block_bytes, pinned=True)
    expected = torch.full_like(arena.blocks, POISON)
    arena.blocks.fill_(POISON)
    try:
        reference = ReferenceCopier(shapes, tensors, expected)
        staged = choose_copier(shapes, tensors, arena.blocks, ring_bytes=4 * (largest + 512) + rng.choice((0, 1 << 20)))
        staged = staged.copier
        reference.copy(Direction.STORE, stores)
        staged.copy(Direction.STORE, stores)
        equal("stored bytes", arena.blocks, expected)
        poison(tensors)
        reference.copy(Direction.LOAD, loads)
        wanted = [[memory_of(part).clone() for part in parts] for parts in tensors]
        poison(tensors)
        staged.copy(Direction.LOAD, loads)
        for parts, right in zip(tensors, wanted, strict=True):
            for part, bytes_ in zip(parts, right, strict=True):
                equal("loaded bytes", memory_of(part), bytes_)
    finally:
        arena.close()


def poison(tensors: list[list[torch.Tensor]]) -> None:
    for parts in tensors:
        for part in parts:
            memory_of(part).fill_(POISON)


def equal(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(got, wanted):
        wrong = (got != wanted).flatten().nonzero().flatten()
        raise AssertionError(f"{what}: {len(wrong)} of {got.numel()} are wrong, the first at {int(wrong[0])}")


def check_order_after_compute() -> None:
    """A store of blocks that compute is still writing, and a load into blocks it is still zeroing."""
    part = torch.zeros(64, 16 * 1024, dtype=torch.uint8, device=DEVICE)
    shapes = Shapes([piece("only", 16 * 1024, 1, 16 * 1024)], 16 * 1024)
    arena = HostArena(64, 16 * 1024, pinned=True)
    copier = choose_copier(shapes, [[part]], arena.blocks).copier
    ids = tuple(range(64))
    work = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    for value in (7, 9):
        for _ in range(20):
            work @ work  # tens of milliseconds before the bytes are there
        part.fill_(value)
        copier.copy(Direction.STORE, [GroupCopy(0, ids, ids)])
        equal("bytes stored behind compute", arena.blocks, torch.full_like(arena.blocks, value))
        for _ in range(20):
            work @ work
        part.zero_()
        copier.copy(Direction.LOAD, [GroupCopy(0, ids, ids)])
        equal("bytes loaded behind zeroing", part, torch.full_like(part, value))
    arena.close()
    print("order: stores wait for compute, loads for zeroing")


def check_far_blocks() -> None:
    """Blocks more than 4 GiB from the first of their tensor."""
    stride, size, blocks = 3 << 29, 18 * 1024, 5  # 1.5 GiB apart
    memory = torch.empty((blocks - 1) * stride + size, dtype=torch.uint8, device=DEVICE)
    parts = [
        memory.as_strided((blocks, size), (stride, 1), 0),
        torch.zeros(blocks, 64, dtype=torch.uint8, device=DEVICE),
    ]
    values = torch.randint(0, 256, (blocks, size), dtype=torch.uint8, device=DEVICE)
    parts[0].copy_(values)
    shapes = Shapes([piece("far", size + 64, 1, size + 64)], size + 64)
    arena = HostArena(blocks, size + 64, pinned=True)
    copier = choose_copier(shapes, [parts], arena.blocks).copier
    copier.copy(Direction.STORE, [GroupCopy(0, (3, 1, 0), (4, 2, 3))])
    parts[0].fill_(POISON)
    copier.copy(Direction.LOAD, [GroupCopy(0, (3, 1, 0), (3, 4, 0))])
    equal("far blocks", parts[0][[3, 4, 0]], values[[4, 2, 3]])
    equal("blocks left alone", parts[0][[1, 2]], torch.full_like(parts[0][:2], POISON))
    arena.close()
    print("far: blocks 6 GiB from the first of their tensor")


def check_refusals() -> None:
    part = torch.zeros(4, 64, dtype=torch.uint8, device=DEVICE)
    shapes = Shapes([piece("only", 64, 1, 64)], 64)
    arena = HostArena(4, 64, pinned=True)
    arena.blocks.fill_(POISON)
    copier = choose_copier(shapes, [[part]], arena.blocks, null_block=0).copier
    for bad in (GroupCopy(0, (4,), (1,)), GroupCopy(0, (1, 1), (1, 2)), GroupCopy(0, (1,), (0,)), GroupCopy(1, (), ())):
        try:
            copier.copy(Direction.STORE, [GroupCopy(0, (0,), (3,)), bad])
        except MisuseError:
            continue
        raise AssertionError(f"{bad} was copied")
    equal("host after refusals", arena.blocks, torch.full_like(arena.blocks, POISON))
    arena.close()
    print("refusals: bad ids move nothing")


# Speed


def seconds(action: Callable[[], object], repeats: int = 4) -> float:
    action()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def one_large_copy(host: torch.Tensor, num_bytes: int) -> dict[Direction, float]:
    device = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    here = host.view(-1)[:num_bytes]
    speed = {
        Direction.STORE: num_bytes / seconds(lambda: here.copy_(device, non_blocking=True)) / 1e9,
        Direction.LOAD: num_bytes / seconds(lambda: device.copy_(here, non_blocking=True)) / 1e9,
    }
    print(f"one memcpy of {num_bytes / 1e9:.1f} GB: " + ", ".join(f"{d.value} {s:.1f} GB/s" for d, s in speed.items()))
    return speed


def measure_fragments(
    host: torch.Tensor, fragment: int, count: int, num_bytes: int, link: dict[Direction, float]
) -> None:
    rng = random.Random(0)
    block_bytes = fragment * count
    transferred = num_bytes // block_bytes
    region = host.view(-1)[: host.numel() // block_bytes * block_bytes].view(-1, block_bytes)
    blocks = 2 * transferred
    tensors = [torch.empty(blocks, fragment, dtype=torch.uint8, device=DEVICE) for _ in range(count)]
    shapes = Shapes([piece("only", block_bytes, 1, block_bytes)], block_bytes)
    start = time.perf_counter()
    choice = choose_copier(shapes, [tensors], region)
    built = time.perf_counter() - start
    device_ids = tuple(rng.sample(range(blocks), transferred))
    places = {
        "random": tuple(rng.sample(range(len(region)), transferred)),
        "neighbours": tuple(range(transferred)),
    }
    for place, host_ids in places.items():
        copies = [GroupCopy(0, host_ids, device_ids)]
        for direction in (Direction.STORE, Direction.LOAD):
            speed = transferred * block_bytes / seconds(partial(choice.copier.copy, direction, copies)) / 1e9
            what = f"{fragment // 1024:>3} KiB x {count:<3} {choice.name}, {place:<10} {direction.value:<5}"
            print(f"{what} {speed:6.1f} GB/s  {speed / link[direction]:6.1%} of one memcpy", flush=True)
    print(f"     (built in {built:.1f} s; host blocks of {block_bytes / 1e6:.2f} MB)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--host-gb", type=float, default=6.0, help="pinned host memory")
    parser.add_argument("--gb", type=float, default=2.0, help="bytes of one transfer, at most a third of it")
    parser.add_argument("--examples", type=int, default=40)
    options = parser.parse_args()
    print_environment(["torch", "triton"])
    print(f"device: {torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'}, CUDA {torch.version.cuda}")
    failed: list[str] = []

    def section(action: Callable[[], object]) -> object:
        start = time.perf_counter()
        try:
            return action()
        except Exception:  # the next section may still tell something
            failed.append(name(action))
            traceback.print_exc(file=sys.stdout)
            return None
        finally:
            print(f"  [{time.perf_counter() - start:.1f} s]", flush=True)

    def name(action: Callable[[], object]) -> str:
        return getattr(action, "__name__", "section")

    num_bytes = int(options.gb * 1e9)
    section(check_refusals)
    section(lambda: check_random_layouts(options.examples))
    section(check_order_after_compute)
    section(check_far_blocks)
    arena = section(lambda: HostArena(int(options.host_gb * 1e9) // 4096, 4096, pinned=True))
    link = section(lambda: one_large_copy(arena.blocks, num_bytes))
    for fragment, count in FRAGMENTS:
        section(
            lambda fragment=fragment, count=count: measure_fragments(arena.blocks, fragment, count, num_bytes, link)
        )
    print(f"FAILED: {len(failed)} sections" if failed else "all sections passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
