"""Parts of tiers.py: hit ratios of a trace. `hits` moves real bytes through device, host and file, and compares them.

A block has 4 KiB, filled with its key. What the device computes is written there; stores and loads copy; the tier is a
RankTier over a Slab in a file. After each load the blocks must hold their keys. Some runs damage slots in the file
after they were written.
"""

import argparse
import hashlib
import mmap
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.tiers.tiers_files import verdict
from cpu_prefix_cache.deciding import BlockPool
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.messages.plan import Direction, RankReport, TransferPlan
from cpu_prefix_cache.slab.folder import Folder
from cpu_prefix_cache.slab.namespace import namespace_of
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.slab.tier import RankPart
from cpu_prefix_cache.tools.replay.below import ThreeTierEngine, replay_host_and_tier
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.outcome import Tally
from cpu_prefix_cache.tools.replay.replayed_model import of_plain_blocks
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import Trace, read_traces

BLOCK_BYTES = 4096
DEVICE = 1_000
HOST = 2_000
FILE = 20_000
HORIZON = 200  # of the device's lazy stores
BAD_SHARE = 0.02
BARS = {0.0: 0.580, BAD_SHARE: 0.48}
REPLAY_HOST = 3_000
REPLAY_FILE = 30_000
REPLAY_BAR = 0.624
SEED = 5


def hits(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Bars: .580, and .48 with 2 % of the slots damaged; no wrong byte; the tier is never paused."""
    if options.trace is None:
        print("no --trace was given")
        return []
    trace = with_long_keys(read_traces([str(options.trace)]))
    print(f"device {DEVICE:,}, host {HOST:,}, file {FILE:,} blocks of {BLOCK_BYTES} bytes, LRU, lazy")
    rows = []
    for at, (bad_share, bar) in enumerate(BARS.items()):
        path = folder / str(at)
        path.mkdir()
        rows.append(result := served(trace, path, bad_share))
        print(
            f"{bad_share:.0%} damaged: {result['seconds']:.0f} s; {result['loaded']:,} blocks compared, "
            f"{result['wrong']} wrong; {result['damaged']:,} slots damaged, {result['refused']:,} refused; tier "
            f"{result['state']}, paused {result['pauses']} times; by tier: {result['by_tier']}"
        )
        print(verdict("hit ratio", result["hit_ratio"], bar))
        print(verdict("wrong blocks", result["wrong"], 0, at_most=True))
    return rows


def replay(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Bar: .624 with what the tier chooses."""
    if options.trace is None:
        print("no --trace was given")
        return []
    trace, rows = read_traces([str(options.trace)]), []
    for offload in (None, "lazy", "eager"):
        host, below = HostTier(REPLAY_HOST), BelowTier(REPLAY_FILE, offload)
        tally = replay_host_and_tier(trace, host, below, Meter("replay", trace.blocks))
        rows.append({"offload": offload or "default", "hit_ratio": tally.hit_blocks / trace.blocks})
        print(f"host {REPLAY_HOST:,}, tier {REPLAY_FILE:,}, {below.mode(host)}: {rows[-1]['hit_ratio']:.4f}")
    print(verdict("hit ratio", rows[0]["hit_ratio"], REPLAY_BAR))
    return rows


def with_long_keys(trace: Trace) -> Trace:
    """Keys as a tier has them: digests of 32 bytes."""
    longer = {key: hashlib.sha256(key).digest() for request in trace.requests for key in request.keys}
    requests = [request._replace(keys=[longer[key] for key in request.keys]) for request in trace.requests]
    return Trace(trace.paths, trace.block_tokens, requests)


def served(trace: Trace, path: Path, bad_share: float) -> dict[str, Any]:
    engine = RealEngine(trace, path, bad_share)
    tally, began = Tally(), time.perf_counter()
    try:
        for number, request in enumerate(trace.requests):
            tally.count(request, engine.serve(request), trace.block_tokens)
            if number % 500 == 0:
                engine.tiered.check_valid()
        now, tier = engine.tiered.statistics(), engine.tiered.tier_statistics()
    finally:
        engine.close()
    below = tier.hit_tokens // trace.block_tokens
    counts = {"device": tally.hit_blocks - now.chunks_loaded, "host": now.chunks_loaded - below, "file": below}
    return {
        "bad_share": bad_share,
        "hit_ratio": tally.hit_blocks / trace.blocks,
        "by_tier": {name: round(count / trace.blocks, 4) for name, count in counts.items()},
        "loaded": engine.compared,
        "wrong": engine.wrong,
        "damaged": engine.damaged,
        "refused": tier.refused,
        "unsaved": tier.unsaved,
        "written": tier.cache.chunks_stored,
        "state": tier.state,
        "pauses": engine.pauses,
        "seconds": time.perf_counter() - began,
    }


class DevicePool(BlockPool):
    """Writes what is computed, and compares what was loaded, as a block gets its key."""

    engine: "RealEngine"

    def commit(self, blocks: Sequence[int], keys: Sequence[bytes], *rest: Any) -> None:
        self.engine.have_keys(blocks, keys)
        super().commit(blocks, keys, *rest)


class RealEngine(ThreeTierEngine):
    """A ReplayEngine with memory and a file."""

    def __init__(self, trace: Trace, path: Path, bad_share: float) -> None:
        self.wrong = self.compared = self.damaged = self.pauses = 0
        self._bad_share, self._chance = bad_share, random.Random(SEED)
        self._loaded: set[int] = set()  # device blocks that no key was compared with yet
        self._path = path
        device, planner = DeviceTier(DEVICE, horizon=HORIZON), of_plain_blocks(trace, BLOCK_BYTES)
        super().__init__(trace, HostTier(HOST), device, BelowTier(FILE, "lazy"), planner=planner)

    def new_pool(self, capacity: int, policy: str) -> BlockPool:
        self._device = torch.zeros(capacity + 1, BLOCK_BYTES, dtype=torch.uint8)
        pool = DevicePool(capacity, policy)
        pool.engine = self
        return pool

    def new_cache(self, planner: Any, device: Any, options: dict[str, Any]) -> Any:
        cache = super().new_cache(planner, device, options)
        self._arena = HostArena(cache.pool.capacity, BLOCK_BYTES)
        named = namespace_of(planner, model="benchmark", revision="none", dtype="none", hash="sha256", ranks=1)
        tier = FileTier(str(self._path), FILE * BLOCK_BYTES, keep_others=True)
        self._slab = Slab(Folder(tier, named, RankPart(FILE), BLOCK_BYTES))
        self._tier = RankTier(self._slab, self._arena.blocks, planner.pieces, 0)
        self._page = mmap.mmap(-1, BLOCK_BYTES)
        self._file = os.open(Path(self._slab.folder) / "blocks", os.O_RDWR | os.O_DIRECT * self._slab.is_direct)
        return cache

    def have_keys(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            content = torch.frombuffer(bytearray(key * (BLOCK_BYTES // len(key))), dtype=torch.uint8)
            if block in self._loaded:
                self._loaded.discard(block)
                self.compared += 1
                self.wrong += not torch.equal(self._device[block], content)
            else:
                self._device[block] = content

    def close(self) -> None:
        os.close(self._file)
        self._tier.close()
        self._arena.close()

    def _move(self) -> bool:
        plan, below = self.tiered.step(), self.tiered.plan_below()
        for transfer in plan.transfers:
            self._copy(transfer)
        self._tier.run(below)
        self._tier.drain()
        self._damage(below.step.transfers)
        self.tiered.report(RankReport(0, frozenset(transfer.id for transfer in plan.transfers)))
        self.tiered.report_below(self._tier.report())
        self.pauses += self.tiered.tier_statistics().state == "paused"
        return bool(plan.transfers or below.step.transfers)

    def _copy(self, transfer: TransferPlan) -> None:
        for copy in transfer.copies:
            here, there = torch.tensor(copy.host_blocks), torch.tensor(copy.device_blocks)
            if transfer.direction is Direction.STORE:
                self._arena.blocks[here] = self._device[there]
            else:
                self._device[there] = self._arena.blocks[here]
                self._loaded.update(copy.device_blocks)

    def _damage(self, transfers: Sequence[TransferPlan]) -> None:
        """Overwrite a share of the slots that were written just now."""
        stores = [transfer for transfer in transfers if transfer.direction is Direction.STORE]
        for slot in (slot for store in stores for copy in store.copies for slot in copy.host_blocks):
            if self._chance.random() < self._bad_share:
                self._page[:] = self._chance.randbytes(BLOCK_BYTES)
                os.pwritev(self._file, [self._page], slot * BLOCK_BYTES)
                self.damaged += 1
