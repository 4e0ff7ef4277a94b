"""Both halves of the host cache in one process. Each step's plan is copied and reported before the step returns."""

import time
from collections.abc import Callable, Sequence

import torch

from cpu_prefix_cache import (
    ConfigurationError,
    CPUPrefixCache,
    Device,
    Direction,
    EngineSteps,
    Hit,
    HybridChunkPlanner,
    Request,
    Thresholds,
)
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.memory.arena import HostArena

CopierWrapper = Callable[[Copier, Sequence[Sequence[torch.Tensor]]], Copier]


class HostTier:
    """A CPUPrefixCache with its arena and its copier, for an engine that runs one request at a time.

    `tensors[group]` are the device tensors of a group. `wrap_copier` may wrap the copier, for tests.
    """

    def __init__(
        self,
        planner: HybridChunkPlanner,
        device: Device,
        tensors: Sequence[Sequence[torch.Tensor]],
        *,
        host_bytes: int,
        offload: str,
        policy: str,
        store_after: int,
        min_store_tokens: int,
        max_step_tokens: int,
        checkpoint_interval: int | None,
        wrap_copier: CopierWrapper | None,
    ) -> None:
        num_blocks = host_bytes // planner.host_block_bytes
        least = planner.host_blocks_per_chunk + planner.checkpoint_blocks(1)
        if num_blocks < least:
            raise ConfigurationError(
                f"host_bytes must hold at least one chunk and its checkpoint, {least * planner.host_block_bytes} "
                f'bytes, got {host_bytes}; to use no host memory, set offload="off"'
            )
        device_of_tensors = tensors[0][0].device
        # first, because it raises ConfigurationError if the machine has too little memory
        arena = HostArena(
            num_blocks,
            planner.host_block_bytes,
            pinned_for=device_of_tensors if device_of_tensors.type == "cuda" else None,
        )
        self.cache = CPUPrefixCache(
            planner,
            device,
            host_blocks=num_blocks,
            offload=offload,
            policy=policy,
            thresholds=Thresholds(store_after, min_store_tokens),
            steps=EngineSteps(max_tokens=max_step_tokens),
            checkpoint_interval=checkpoint_interval,
        )
        copier = choose_copier(planner, tensors, arena.blocks, pinned=arena).copier
        self._worker = CopyWorker(0, copier if wrap_copier is None else wrap_copier(copier, tensors), arena)
        arena.wait_until_ready()  # pinning delays kernel launches, and none are running yet

    def boundary(self, request: Request, n0: int) -> int:
        """The boundary that device and host together reach; n0 if the host has nothing beyond it."""
        answer = self.cache.lookup(request, n0, time.monotonic())
        return answer.boundary if isinstance(answer, Hit) else n0

    def load(self, request: Request, boundary: int, destinations: Sequence[Sequence[int]]) -> bool:
        """Load into device blocks, given group by group, for `request` to resume at `boundary`. Returns whether it
        succeeded.
        """
        transfer = self.cache.load(request.id, boundary, destinations, time.monotonic())
        return transfer in self.step()

    def computed(self, request_id: str, num_tokens: int) -> None:
        self.cache.computed(request_id, num_tokens)
        self.step()

    def finished(self, request_id: str, num_tokens: int) -> None:
        self.cache.finished(request_id, num_tokens)
        self.step()

    def step(self) -> set[int]:
        """One step of the cache, and another for stores that a load delayed. Returns the loads that succeeded."""
        loaded = self._copy()
        return loaded | self._copy() if self.cache.has_transfers else loaded

    def _copy(self) -> set[int]:
        try:
            self._worker.run(self.cache.step())
        finally:  # also after an interrupt, wait for the transfers and resolve them
            self._worker.drain()
            resolved = self.cache.report(self._worker.report())
        return {each.id for each in resolved if each.ok and each.direction is Direction.LOAD}
