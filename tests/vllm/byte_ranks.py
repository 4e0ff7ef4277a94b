"""Ranks with real memory around the real worker half, in place of an Engine's simulated ones.

    rank's memory       one row of bytes for each block, of which layers of all groups see parts, as in vLLM
    a pattern           is the bytes that follow from rank and pattern: no two ranks have the same in a block, but in
                        a group such as a latent, in which all, or some, have the same
    the host            a region of each rank, or of the tensor-parallel group, as the settings say

What a block holds is read from its bytes, so nobody finds there what was written on another rank, or in part.
"""

import hashlib
import mmap
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput

from connector.vllm import ranks, regions
from connector.vllm.messages import StepMetadata
from connector.vllm.settings import Settings
from connector.vllm.worker import WorkerHalf
from cpu_prefix_cache.copying import OpeningTier
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan
from tests.vllm.engine import Engine

POISON = 0xA5
SHAPED: Mapping[int, Callable[[bytes], bytes]] = {}  # group -> what the bytes of a pattern are made into
DIGEST_BYTES = 32


class BlockMemory:
    """Device memory of one rank, by block: what was written there, if all bytes of its group are there."""

    def __init__(
        self, rank: int, num_blocks: int, groups: Sequence[KVCacheGroupSpec], parts: Mapping[int, int]
    ) -> None:
        """`parts`: of a group of which ranks have the same, which of the different ones this rank has."""
        self._rank, self._parts = rank, parts
        self._sizes = [_block_bytes(group) for group in groups]
        self._known: dict[bytes, object] = {}
        self.rows = torch.full((num_blocks, max(self._sizes)), POISON, dtype=torch.uint8)

    def __setitem__(self, block: int, pattern: object) -> None:
        written = self._bytes_of(pattern)
        self._known[written[:DIGEST_BYTES]] = pattern
        self.rows[block, : len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)

    def __getitem__(self, block: int) -> object:
        here = bytes(self.rows[block].numpy())
        pattern = self._known.get(here[:DIGEST_BYTES])
        return pattern if pattern is not None and here.startswith(self._bytes_of(pattern)) else None

    get = __getitem__

    def _bytes_of(self, pattern: object) -> bytes:
        """A pattern begins with the number of its group."""
        shared = self._parts.get(pattern[0])
        writer = self._rank if shared is None else ("all that have part", shared)
        written = hashlib.shake_256(repr((writer, pattern)).encode()).digest(self._sizes[pattern[0]])
        return SHAPED.get(pattern[0], bytes)(written)

    def remember(self, before: "BlockMemory") -> None:
        """The patterns of this rank before a restart."""
        self._known |= before._known

    def layers(self, groups: Sequence[KVCacheGroupSpec]) -> dict[str, object]:
        """KV of each layer, as vLLM registers it."""
        found: dict[str, object] = {}
        for group in groups:
            at = 0
            for name in group.layer_names:
                views = []
                for shape, dtype in _shapes(group.kv_cache_spec):
                    size = torch.Size(shape).numel() * dtype.itemsize
                    views.append(self.rows[:, at : at + size].view(dtype).unflatten(1, shape))
                    at += size
                found[name] = views if isinstance(group.kv_cache_spec, MambaSpec) else views[0]
        return found


def _shapes(spec: object) -> list[tuple[tuple[int, ...], torch.dtype]]:
    if isinstance(spec, MambaSpec):
        return list(zip(spec.shapes, spec.dtypes, strict=True))
    sizes = spec.block_size, spec.real_page_size_bytes // spec.block_size // spec.dtype.itemsize
    return [(sizes, spec.dtype)]


def _block_bytes(group: KVCacheGroupSpec) -> int:
    sizes = (torch.Size(shape).numel() * dtype.itemsize for shape, dtype in _shapes(group.kv_cache_spec))
    return sum(sizes) * len(group.layer_names)


def carried(
    half: WorkerHalf,
    rank: int,
    memory: BlockMemory,
    copies: tuple[GroupCopy, ...],
    blocks: Mapping[int, Collection[int]],
) -> list[list[bool]]:
    """In one of two processes: what the first alone has stored is loaded, and then what both have. Which of its
    `blocks`, by group, this rank has again, each time.
    """
    ids = iter(range(4))

    def carry(direction: Direction) -> None:
        half.begin(StepMetadata(StepPlan(0, (TransferPlan(next(ids), direction, copies, 1),)), {}, True))
        half._worker.drain()

    found = []
    for storing in ([0], [0, 1]):
        for group, each in blocks.items():
            for block in each:
                memory[block] = group, block
        if rank in storing:
            carry(Direction.STORE)
        torch.distributed.barrier()
        memory.rows.fill_(0)
        carry(Direction.LOAD)
        torch.distributed.barrier()
        found.append([memory[block] == (group, block) for group, each in blocks.items() for block in each])
    return found


class ByteRank:
    """A rank that ends each of its copies before the step computes."""

    copies: Mapping[int, object] = {}
    held: Mapping[int, object] = {}
    waits_for: Mapping[int, str] = {}
    tier: None = None

    def __init__(self, engine: Engine, rank: int) -> None:
        config = engine.scheduler.vllm_config
        caches: KVCacheConfig = engine.scheduler.kv_cache_config
        groups = caches.kv_cache_groups
        config.parallel_config.rank = rank
        self.rank = rank
        settings = Settings.of(config, caches)
        kept = zip(settings.group_ids, settings.planner.groups, strict=True)
        ranks = config.parallel_config.tensor_parallel_size
        parts = {at: rank // (ranks // group.lanes) for at, group in kept if group.lanes is not None}
        self.device = BlockMemory(rank, caches.num_blocks, groups, parts)
        self.half = WorkerHalf(settings, config, caches)
        self.half.register_kv_caches(self.device.layers(groups))
        self.stored = defaultdict[int, set[int]](set)  # host blocks that stores were to write, by group
        self.carried = Counter[Direction]()  # bytes, of its own copies
        self.half._arena.wait_until_ready(60)

    @property
    def region(self) -> torch.Tensor:
        return self.half._arena.blocks

    def prepare(self, output: object) -> None:
        for copy in output.kv_cache_block_copies or ():
            self.device.rows[copy.dst_block_id] = self.device.rows[copy.src_block_id]

    def begin(self, metadata: StepMetadata) -> None:
        for transfer in metadata.plan.transfers:
            self.carried[transfer.direction] += self.half._share.of_transfer(transfer).num_bytes
            for copy in transfer.copies if transfer.direction is Direction.STORE else ():
                self.stored[copy.group].update(copy.host_blocks)
        self.half.begin(metadata)
        self.half._worker.drain()
        if isinstance(self.half._tier, OpeningTier):
            self.half._tier.tier.drain()

    def poll(self) -> KVConnectorOutput:
        received, failed = self.half.results()
        return KVConnectorOutput(
            finished_recving=received or None, failed_recving=failed, kv_connector_worker_meta=self.half.reports()
        )


def with_byte_ranks(engine: Engine) -> Engine:
    """The engine, with real memory on each rank, and all host blocks ready. Ranks agree with themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "agree", _raise)
        patch.setattr(ranks, "share_memory", lambda: True)
        patch.setattr(ranks, "largest", lambda number: number)
        patch.setattr(ranks, "as_on_the_first", lambda value: value)
        patch.setattr(regions, "_shared_region", cache(lambda num_bytes, taken_ahead: mmap.mmap(-1, num_bytes)))
        engine.ranks = [ByteRank(engine, rank.rank) for rank in engine.ranks]
    engine.step()
    assert engine.cache.statistics().pool.ready == engine.cache.statistics().pool.capacity
    return engine


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


@contextmanager
def engine_of(folder: Path, groups: Sequence[KVCacheGroupSpec], ranks: int, **options: object) -> Iterator[Engine]:
    """An engine of so many ranks with real memory."""
    usual = dict(groups=groups, retention=None, offload="eager", tensor_parallel=True, host_blocks=1000)
    engine = with_byte_ranks(Engine(folder, ranks=ranks, **usual | options))
    try:
        yield engine
    finally:
        close(engine)


def damage(engine: Engine, group: int, lane: int, byte: int = 0) -> None:
    """Change a byte in one lane of every host block of a group."""
    for lanes in _lanes(engine, group):
        lanes[lane, byte] ^= 1


def swap_lanes(engine: Engine, group: int) -> None:
    """Give each lane of a host block of a group what another one has."""
    for lanes in _lanes(engine, group):
        lanes.copy_(lanes.flip(0))


def _lanes(engine: Engine, group: int) -> Iterator[torch.Tensor]:
    """The lanes of each host block that stores of this group have written."""
    for block in engine.ranks[0].stored[group]:
        yield engine.ranks[0].region[block].view(engine.cache.planner.ranks, -1)


def fail_once(rank: ByteRank) -> None:
    """The next copy of this rank raises."""
    copier = rank.half._worker._copier
    submit = copier.submit

    def fails(*arguments: object) -> None:
        copier.submit = submit
        raise OSError("this rank has lost its link")

    copier.submit = fails


def forget_the_device(engine: Engine) -> None:
    """Nothing is in the device's memory any more, and nothing is found there."""
    assert engine.scheduler.reset_prefix_cache()
    for rank in engine.ranks:
        rank.device.rows.fill_(POISON)


def close(engine: Engine) -> None:
    for rank in engine.ranks:
        rank.half.close()
