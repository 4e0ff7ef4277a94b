"""Running requests, from admission to their end: what each has computed, and in which step it is due again.

    admitted    due in the next step
    passed over its step ended without `computed`: due in the next one too
    computed    chunks up to here are confirmed; due again in the step that can cross its next boundary
    left        it ended or was preempted
    stale       it was admitted before a reset, or wants no stores: nothing is stored for it

The agenda maps steps to the requests that are due then, so no step goes through all requests (rule 16).
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator

from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.engine_steps import EngineSteps
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator


class RunningRequests:
    """The running requests by id, and the agenda."""

    def __init__(self, coordinator: KVCacheCoordinator, device: Device, offload: Offload, steps: EngineSteps) -> None:
        self._planner = coordinator.planner
        self._coordinator = coordinator
        self._device = device
        self._offload = offload
        self._steps = steps
        self._running: dict[Hashable, Running] = {}
        self._step = 0  # the last that began
        self._agenda: dict[int, list[Hashable]] = {}  # step -> requests that may have crossed a boundary in it

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._running)

    def __contains__(self, id: object) -> bool:
        return id in self._running

    def get(self, id: Hashable) -> Running | None:
        return self._running.get(id)

    def begin_step(self) -> None:
        passed_over = self.due()
        self._agenda.pop(self._step, None)
        self._step += 1
        for running in map(self._running.__getitem__, passed_over):
            if not running.stale:
                self._due_in(running, 0)

    def admitted(self, running: Running) -> None:
        self._running[running.id] = running
        self._due_in(running, 1)

    def due(self) -> list[Hashable]:
        """The requests that are due in this step, once each."""
        asked = (self._running.get(id) for id in dict.fromkeys(self._agenda.get(self._step, ())))
        return [running.id for running in asked if running is not None and running.due == self._step]

    def computed(self, id: Hashable, num_tokens: int) -> None:
        """Its first `num_tokens` tokens hold KV. Confirms nothing while the request loads, or if it is stale."""
        running = self._running.get(id)
        if running is None or running.stale:
            return
        if running.load is None:
            self._confirm(running, num_tokens)
        self._schedule(running, num_tokens)

    def leave(self, id: Hashable) -> Running | None:
        """The request ends. Returns it unless it is stale or unknown."""
        running = self._running.pop(id, None)
        return None if running is None or running.stale else running

    def keep_last(self, running: Running, num_tokens: int | None) -> None:
        """Confirm its first `num_tokens` tokens (None: no more than before), and keep its last checkpoint."""
        if running.load is None:
            if num_tokens is not None:
                self._confirm(running, num_tokens)
            self._keep(running, running.confirmed)

    def make_stale(self) -> None:
        """After a reset, what these requests compute must not be stored."""
        for running in self._running.values():
            running.stale = True

    def _confirm(self, running: Running, num_tokens: int) -> None:
        chunks, before = min(self._planner.full_chunks(num_tokens), len(running.keys)), running.confirmed
        if chunks > before:
            running.confirmed = chunks
            self._offload.confirmed(running, before)
            for depth in running.kept[bisect_right(running.kept, before) : bisect_right(running.kept, chunks)]:
                self._keep(running, depth)

    def _keep(self, running: Running, depth: int) -> None:
        """Remember the checkpoint below so many confirmed chunks, if the device has it and the model needs it."""
        is_known = bool(running.checkpoints) and running.checkpoints[-1].depth == depth  # in ascending order
        if is_known or not depth or not self._planner.has_checkpoints or not self._planner.needs_checkpoint(depth):
            return
        checkpoint = self._coordinator.checkpoint_at(running.keys, depth)
        if self._device.find_checkpoint(checkpoint) is not None:
            running.checkpoints.append(checkpoint)
            running.unsaved.append(checkpoint)
            self._offload.checkpointed(running, checkpoint)

    def _schedule(self, running: Running, num_tokens: int) -> None:
        """Put the request on the agenda: for the next step in prefill; in decode, when it can cross a boundary."""
        running.decodes = num_tokens >= running.request.num_tokens
        if not running.decodes:
            self._due_in(running, 1)
        elif self._steps.asks_in_decode or self._planner.has_checkpoints:
            missing = self._planner.grid_tokens - num_tokens % self._planner.grid_tokens
            self._due_in(running, -(-missing // self._steps.decode_tokens))
        else:
            running.due = 0

    def _due_in(self, running: Running, steps: int) -> None:
        due = self._step + steps
        if due != running.due:
            running.due = due
            self._agenda.setdefault(due, []).append(running.id)
