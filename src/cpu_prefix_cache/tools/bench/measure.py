"""Measures a CUDA or HIP device in some seconds: the link with a large copy, and our copies of random 2 MiB blocks;
and a large product of matrices, from which `replay --tflops` estimates how fast prompts are computed.

A block consists of fragments of one size. `staged` copies them through a ring buffer on the device, `direct` copies
each of them across the link.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.binding import Binding
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.copier.staged import StagedCopier
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import accelerator_driver
from cpu_prefix_cache.messages.plan import Direction, GroupCopy
from cpu_prefix_cache.model.codec import RAW
from cpu_prefix_cache.model.groups import PrefixGroup
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.tools.bench.rates import Rate

T = TypeVar("T")

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = 2 * MIB
FRAGMENTS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB)
HOST_BYTES, TRANSFER_BYTES = 1024 * MIB, 256 * MIB
MANY = 16  # transfers one after another: 80 ms
REPEATS = 5
SQUARE = 8192  # rows and columns of the matrices that are multiplied
NEVER = 1 << 62  # bytes: no fragment is so large, so none is copied directly


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a device; `device` is its name with versions, `limits` the GB/s of a large copy by direction.

    `tflops` are those of a large product in bfloat16. An engine's prefill reaches less.
    """

    device: str
    limits: dict[str, float]
    rates: list[Rate]
    tflops: float


class OneGroup:
    """The parts of a planner that a copier needs, for one group with one host block for each device block."""

    def __init__(self, block_bytes: int, codec: str = RAW) -> None:
        group = PrefixGroup(name="measured", block_tokens=1, block_bytes=block_bytes, codec=codec)
        self.pieces = [Piece(group, 1, 1, group.kept_bytes)]
        self.host_block_bytes = group.kept_bytes


def measure(device: torch.device) -> Measured:
    """Measure `device`. Takes 1 GiB of host memory, 1.3 GiB of device memory, and some seconds."""
    arena = HostArena(HOST_BYTES // BLOCK_BYTES, BLOCK_BYTES, pinned_for=device)
    try:
        arena.wait_until_ready()
        limits = {direction.value: _link_rate(device, direction) for direction in Direction}
        rates = [rate for fragment in FRAGMENTS for rate in _rates(device, arena, fragment)]
    finally:
        arena.close()
    return Measured(name_of(device), limits, rates, _tflops(device))


def name_of(device: torch.device) -> str:
    """With the versions of torch and of what it was built for."""
    vendor, version = accelerator_driver().name, torch.version.hip or torch.version.cuda
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {vendor} {version}"


def _link_rate(device: torch.device, direction: Direction) -> float:
    here = torch.empty(TRANSFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    there = torch.empty(TRANSFER_BYTES, dtype=torch.uint8, device=device)
    to, of = (here, there) if direction is Direction.STORE else (there, here)

    def submit() -> list[torch.Tensor]:
        return [to.copy_(of, non_blocking=True) for _ in range(MANY)]

    return MANY * TRANSFER_BYTES / _seconds(submit, lambda _: torch.cuda.synchronize(device)) / 1e9


def _tflops(device: torch.device) -> float:
    """Like the largest products of a prefill: many tokens, and an MLP's matrix."""
    one, other = (torch.randn(SQUARE, SQUARE, dtype=torch.bfloat16, device=device) for _ in range(2))

    def submit() -> list[torch.Tensor]:
        return [one @ other for _ in range(MANY)]

    return MANY * 2 * SQUARE**3 / _seconds(submit, lambda _: torch.cuda.synchronize(device)) / 1e12


def _rates(device: torch.device, arena: HostArena, fragment: int) -> Iterator[Rate]:
    count, blocks = BLOCK_BYTES // fragment, TRANSFER_BYTES // BLOCK_BYTES
    tensors = [torch.empty(2 * blocks, fragment, dtype=torch.uint8, device=device).random_() for _ in range(count)]
    rng = random.Random(0)
    here, there = rng.sample(range(arena.blocks.shape[0]), blocks), rng.sample(range(2 * blocks), blocks)
    copies = [GroupCopy(0, tuple(here), tuple(there))]
    for method, direct_bytes, transfers in (
        ("staged", NEVER, MANY),
        ("direct", 1, MANY if fragment >= 64 * KIB else 1),
    ):
        binding = Binding(OneGroup(BLOCK_BYTES), [tensors], arena.blocks)
        copier = StagedCopier(binding, pinned=arena, direct_bytes=direct_bytes)
        for direction in Direction:
            seconds = _seconds(partial(_submit, copier, direction, copies, transfers), _until_last_passed)
            yield Rate(method, fragment, direction.value, transfers * TRANSFER_BYTES / seconds / 1e9)


def _submit(copier: Copier, direction: Direction, copies: Sequence[GroupCopy], transfers: int) -> list[Event]:
    return [copier.submit(direction, copies, copier.here()) for _ in range(transfers)]


def _until_last_passed(events: list[Event]) -> None:
    events[-1].until_passed()


def _seconds(submit: Callable[[], T], wait: Callable[[T], object]) -> float:
    """The median time from the submission to the end."""
    times = []
    for repeat in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        wait(submit())
        if repeat:
            times.append(time.perf_counter() - start)
    return median(times)
