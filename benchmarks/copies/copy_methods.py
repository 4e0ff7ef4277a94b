"""Four methods to copy the same blocks between device tensors and pinned host memory.

    staged    ours: `cpu_prefix_cache.copier`
    batch     one cuMemcpyBatchAsync with a copy for each fragment, host memory ordered by layer, as in vLLM's
              SimpleCPUOffload; CUDA only
    kernel    a Triton kernel of 16 programs that reads or writes pinned memory itself
    torch     `copy_` in a loop, one call for each fragment

A block has `count` fragments of `fragment` bytes, one in each of `count` tensors. Device blocks are random; how host
blocks are placed is the caller's choice. Each method is bound to a Scene and copies all its blocks.
"""

import random
from collections.abc import Callable
from typing import Protocol

import torch
import triton
import triton.language as tl

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.copier.streams import CudaEvent
from cpu_prefix_cache.deciding import RAW, Direction, GroupCopy
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.cuda import STREAM_ORDER
from cpu_prefix_cache.memory.driver import accelerator_driver
from cpu_prefix_cache.tools.bench.measure import OneGroup

DEVICE = torch.device("cuda", 0)
ANY_ORDER = 3  # CU_MEMCPY_SRC_ACCESS_ORDER_ANY, which SimpleCPUOffload uses for loads


class Scene:
    """Device tensors of twice `num_bytes`, and which of their blocks are copied to which host blocks.

    Our copier uses the host blocks in `arena`. The other methods use `pinned`, uint8 [bytes] allocated by torch in one
    piece, because they cannot copy across the borders of registered segments.
    """

    def __init__(
        self,
        arena: HostArena,
        pinned: torch.Tensor,
        fragment: int,
        count: int,
        num_bytes: int,
        placed: str,
        codec: str = RAW,
    ) -> None:
        rng = random.Random(0)
        self.fragment, self.count = fragment, count
        self.block_bytes = fragment * count
        self.num_blocks = num_bytes // self.block_bytes
        self.num_bytes = self.num_blocks * self.block_bytes
        on_device = 2 * self.num_blocks
        self.tensors = [_numbers(on_device, fragment) for _ in range(count)]
        self._shapes = OneGroup(self.block_bytes, codec)
        self.host, self.pinned = self._blocks(arena.blocks.view(-1)), self._blocks(pinned)
        self._arena = arena
        self.device_blocks = rng.sample(range(on_device), self.num_blocks)
        self.host_blocks = _places(placed, min(len(self.host), len(self.pinned)), self.num_blocks, rng)

    def copier(self) -> Copier:
        return choose_copier(self._shapes, [self.tensors], self.host, pinned=self._arena, name="staged").copier

    def copies(self, num_bytes: int | None = None, first: int = 0) -> tuple[GroupCopy, ...]:
        """Copies of `num_bytes` bytes of blocks, from index `first` on."""
        last = self.num_blocks if num_bytes is None else first + num_bytes // self.block_bytes
        return (GroupCopy(0, tuple(self.host_blocks[first:last]), tuple(self.device_blocks[first:last])),)

    def _blocks(self, memory: torch.Tensor) -> torch.Tensor:
        size = self._shapes.host_block_bytes
        return memory[: memory.numel() // size * size].view(-1, size)


def _numbers(blocks: int, num_bytes: int) -> torch.Tensor:
    """Normal numbers in bfloat16, of which .05 % are small, as uint8 [blocks, bytes]."""
    numbers = torch.randn(blocks, num_bytes // 2, device=DEVICE, dtype=torch.bfloat16)
    numbers[torch.rand_like(numbers) < 0.0005] *= 2.0**-40
    return numbers.view(torch.uint8)


def _places(placed: str, there: int, wanted: int, rng: random.Random) -> list[int]:
    """Host blocks at "random", or in ascending runs of 32 blocks on average, as from a "pool" in use."""
    if placed == "random":
        return rng.sample(range(there), wanted)
    runs: list[int] = []
    at = 0
    while len(runs) < wanted:
        length = min(wanted - len(runs), rng.randint(1, 63))
        runs += range(at, at + length)
        at += length + rng.randint(1, 8)
    if runs[-1] >= there:
        raise ValueError(f"{wanted} blocks in runs do not fit {there}")
    return runs


class Method(Protocol):
    """`submit` starts a copy of all blocks of a scene, `num_bytes` bytes, and returns the event of its end."""

    num_bytes: int

    def submit(self, direction: Direction) -> Event: ...


class Staged:
    def __init__(self, scene: Scene) -> None:
        self.copier = scene.copier()
        self.num_bytes = scene.num_bytes
        self._copies = scene.copies()

    def submit(self, direction: Direction) -> Event:
        return self.copier.submit(direction, self._copies, self.copier.here())


class Batch:
    """As in SimpleCPUOffload: computes the addresses from block ids for every transfer, then makes one call."""

    def __init__(self, scene: Scene) -> None:
        self.num_bytes, self._scene = scene.num_bytes, scene
        self._driver = accelerator_driver()
        if not self._driver.has_batches:
            raise NotImplementedError(f"this driver of {self._driver.name} has no batches")
        self._bases = torch.tensor([tensor.data_ptr() for tensor in scene.tensors]).unsqueeze(1)
        layers = torch.arange(scene.count).unsqueeze(1)
        self._layers = scene.pinned.data_ptr() + layers * len(scene.pinned) * scene.fragment
        self._streams = {direction: torch.cuda.Stream(DEVICE) for direction in Direction}

    def submit(self, direction: Direction) -> Event:
        scene, stream = self._scene, self._streams[direction]
        there = (self._bases + torch.tensor(scene.device_blocks) * scene.fragment).flatten()
        here = (self._layers + torch.tensor(scene.host_blocks) * scene.fragment).flatten()
        sizes = torch.full_like(there, scene.fragment)
        to, of, order = (here, there, STREAM_ORDER) if direction is Direction.STORE else (there, here, ANY_ORDER)
        addresses = to.data_ptr(), of.data_ptr(), sizes.data_ptr(), len(sizes)
        self._driver.copy_batch(*addresses, stream.cuda_stream, order)
        return CudaEvent(stream)


@triton.jit
def _copy_blocks(bases, there, here, host, count, blocks, words, STORE: tl.constexpr, BLOCK: tl.constexpr):
    chunks = tl.cdiv(words, BLOCK)
    for task in range(tl.program_id(0), blocks * count * chunks, tl.num_programs(0)):
        layer, block = (task // chunks) % count, task // chunks // count
        offset = (task % chunks) * BLOCK + tl.arange(0, BLOCK)
        mask = offset < words
        device = tl.load(bases + layer).to(tl.pointer_type(tl.int64)) + tl.load(there + block) * words + offset
        pinned = host + (tl.load(here + block) * count + layer) * words + offset
        if STORE:
            tl.store(pinned, tl.load(device, mask=mask), mask=mask)
        else:
            tl.store(device, tl.load(pinned, mask=mask), mask=mask)


class Kernel:
    def __init__(self, scene: Scene) -> None:
        self.num_bytes, self._scene = scene.num_bytes, scene
        self._bases = torch.tensor([tensor.data_ptr() for tensor in scene.tensors], device=DEVICE)
        self._there = torch.tensor(scene.device_blocks, device=DEVICE)
        self._here = torch.tensor(scene.host_blocks, device=DEVICE)
        self._host = scene.pinned.view(-1).view(torch.int64)
        self._streams = {direction: torch.cuda.Stream(DEVICE) for direction in Direction}

    def submit(self, direction: Direction) -> Event:
        scene, words = self._scene, self._scene.fragment // 8
        with torch.cuda.stream(self._streams[direction]):
            _copy_blocks[(16,)](
                self._bases,
                self._there,
                self._here,
                self._host,
                scene.count,
                scene.num_blocks,
                words,
                STORE=direction is Direction.STORE,
                BLOCK=min(4096, triton.next_power_of_2(words)),
                num_warps=8,
            )
        return CudaEvent(self._streams[direction])


class Torch:
    def __init__(self, scene: Scene) -> None:
        rows = scene.pinned.view(-1, scene.fragment)
        self._pairs = [
            (tensor[device], rows[layer * len(scene.pinned) + host])
            for device, host in zip(scene.device_blocks, scene.host_blocks, strict=True)
            for layer, tensor in enumerate(scene.tensors)
        ]
        self.num_bytes = scene.num_bytes
        self._streams = {direction: torch.cuda.Stream(DEVICE) for direction in Direction}

    def submit(self, direction: Direction) -> Event:
        with torch.cuda.stream(self._streams[direction]):
            for there, here in self._pairs:
                to, of = (here, there) if direction is Direction.STORE else (there, here)
                to.copy_(of, non_blocking=True)
        return CudaEvent(self._streams[direction])


class Large:
    """The limit: one pinned copy of `num_bytes` bytes."""

    def __init__(self, pinned: torch.Tensor, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._sides = {
            direction: (pinned[at * num_bytes :][:num_bytes], torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE))
            for at, direction in enumerate(Direction)
        }
        self._streams = {direction: torch.cuda.Stream(DEVICE) for direction in Direction}

    def submit(self, direction: Direction) -> Event:
        here, there = self._sides[direction]
        to, of = (here, there) if direction is Direction.STORE else (there, here)
        with torch.cuda.stream(self._streams[direction]):
            to.copy_(of, non_blocking=True)
        return CudaEvent(self._streams[direction])


METHODS: dict[str, Callable[[Scene], Method]] = {"staged": Staged, "batch": Batch, "kernel": Kernel, "torch": Torch}
