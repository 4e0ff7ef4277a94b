"""Engines over a tier of files: their options, their ranks' numbers, and what may become of the files."""

import itertools
import json
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import torch

from cpu_prefix_cache.model.planner import PAGE_BYTES
from cpu_prefix_cache.slab import records
from cpu_prefix_cache.slab.namespace import Namespace
from tests.engines.atom.engine import Engine, config_of

SLOTS = 400  # to each rank
NAP_SECONDS = 0.003


class Model(SimpleNamespace):
    """As much of a model's configuration as is read."""

    def to_dict(self):
        return vars(self)


def config_over(
    path, *, host_blocks=40, ranks=1, slots=SLOTS, device_blocks=24, tier=None, offload="eager", policy="lru", **said
):
    """The config of an engine over a tier of `slots` slots to each rank, whose host blocks are pages."""
    of_tier = {
        "kind": "file",
        "path": str(path),
        "bytes": ranks * (slots * (PAGE_BYTES + records.SIZE) + (64 << 10)),
        "revision": "1",
        "offload": "eager",
    }
    extra = {
        "cpu_bytes_to_use": host_blocks * ranks * PAGE_BYTES,
        "offload": offload,
        "policy": policy,
        "tier": of_tier | (tier or {}),
    }
    plain = dict(
        kv_transfer_config={"kv_connector": "cpu_prefix_cache", "kv_connector_extra_config": extra},
        num_kvcache_blocks=device_blocks,
        tp_world_size=ranks,
        tensor_parallel_size=ranks,
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        model="org/model",
        hf_config=Model(architectures=["LlamaForCausalLM"], _commit_hash=None),
        torch_dtype=torch.bfloat16,
        kv_cache_dtype="bf16",
        index_cache_dtype=None,
        online_quant_config=None,
        load_dummy=None,
    )
    return config_of(**plain | said)


class TieredEngine(Engine):
    """An engine that lasts for a `with`, as a process does. It starts with what its tier has taken in."""

    tier = None

    def __init__(self, config, **options):
        sys.modules["aiter.dist.parallel_state"] = numbered(config.tp_world_size)
        try:
            super().__init__(config, **options)
        finally:
            del sys.modules["aiter.dist.parallel_state"]
        self.tier = self.connector.tier
        self.rest()

    def step(self):
        """Where nothing is computed, threads get some time to read and write the files."""
        before, ended = self.counts.compared, super().step()
        if self.counts.compared == before and self.tier is not None:
            time.sleep(NAP_SECONDS)
        return ended

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for rank in self.ranks:
            rank.connector.close()

    def rest(self, seconds=60):
        """Step until nothing is left to do. Threads read and write the files meanwhile."""
        end = time.monotonic() + seconds
        while not self.is_idle:
            self.step()
            if time.monotonic() > end:
                raise RuntimeError(f"the engine is not idle after {seconds} s: {self.sequences}")

    def serve(self, tokens, num_output=1, **said):
        seq = self.add(tokens, num_output, **said)
        self.rest()
        return seq

    @property
    def below(self):
        return self.tier.tier_statistics()

    def check_at_rest(self):
        pool, connector = self.manager.kv, self.connector
        assert self.is_idle and pool.num_free == pool.num_blocks
        assert not connector._live and not connector._loading
        assert not self.scheduler.deferred_free_blocks
        assert self.scheduler._num_parked_remote_kv == 0
        assert self.counts.wrong == self.counts.unwritten == 0
        assert self.aggregator.pending_count[1] == 0
        self.tier.check_valid()


def numbered(ranks):
    """The module by which ATOM's ranks know their numbers, of ranks that are made one after another."""
    numbers = itertools.cycle(range(ranks))
    module = ModuleType("aiter.dist.parallel_state")
    module.get_tp_group = lambda: SimpleNamespace(rank_in_group=next(numbers))
    return module


class Gate:
    """Reads of the disk wait while it is shut, or fail."""

    def __init__(self, read):
        self._read, self._open = read, threading.Event()
        self.error, self.waiting = None, 0
        self._open.set()

    def __call__(self, *arguments):
        self.waiting += 1
        self._open.wait(60)
        self.waiting -= 1
        if self.error is not None:
            raise self.error
        return self._read(*arguments)

    def shut(self):
        self._open.clear()

    def open(self):
        self._open.set()


def damage(path, *, is_sealed, rank=0, ranks=1, after=0):
    """Change the bytes of every block of a rank's slab, but those of the first `after` generations.

    With `is_sealed` its record has the checksum of the damaged bytes.
    """
    (folder,) = path.glob(f"*/rank-{rank}-of-{ranks}")
    manifest = json.loads((folder / "manifest.json").read_text())
    seed = records.seed_of(Namespace(tuple(manifest["namespace"].items())).digest, rank, ranks)
    content, width = bytearray((folder / "records").read_bytes()), manifest["slot_bytes"]
    found = {}
    for slot in range(manifest["slots"]):
        record = records.parse(bytes(content[slot * records.SIZE : (slot + 1) * records.SIZE]), seed)
        if record is not None:
            found[slot] = record
    with open(folder / "blocks", "r+b") as file:
        for slot in sorted(found, key=lambda slot: found[slot].label.generation)[after:]:
            file.seek(slot * width)
            damaged = bytes(byte ^ 1 for byte in file.read(width))
            file.seek(slot * width)
            file.write(damaged)
            if is_sealed:
                sealed = found[slot]._replace(checksum=records.checksum(damaged))
                content[slot * records.SIZE : (slot + 1) * records.SIZE] = records.pack(sealed, seed)
    (folder / "records").write_bytes(content)
    return len(found) - after
