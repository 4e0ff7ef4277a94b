"""LMCache's remote backend on Redis, in a process of its own: tiers_redis_peers.py starts it in LMCache's environment.

    python -m benchmarks.tiers.tiers_redis_peer '{"url": "redis://...", "blocks": 64, "block_bytes": 2097152}'

Reads commands from stdin, "put" or "get", and answers each with a line of JSON: all blocks in one batch. What was got
is compared with what was put, outside of the time. Only installed packages are imported.
"""

import asyncio
import json
import mmap
import os
import sys
import threading
import time
from importlib import metadata
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

MARK = "peer: "
CHUNK_TOKENS, HEAD_SIZE = 256, 256
TOKEN_BYTES = 2 * HEAD_SIZE * 2  # K and V of one layer and one head, two bytes each


class Remote:
    """Its chunks have one layer, and as many heads as a block has bytes for."""

    def __init__(self, url: str, blocks: int, block_bytes: int) -> None:
        heads = block_bytes // (CHUNK_TOKENS * TOKEN_BYTES)
        shape = torch.Size([2, 1, CHUNK_TOKENS, heads * HEAD_SIZE])
        self._size = block_bytes
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False, remote_url=url, save_unfull_chunk=False, extra_config={"save_chunk_meta": False}
        )
        about = LMCacheMetadata(
            model_name="model",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(1, 2, CHUNK_TOKENS, heads, HEAD_SIZE),
            chunk_size=CHUNK_TOKENS,
        )
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        memory = torch.frombuffer(mmap.mmap(-1, 4 * blocks * block_bytes), dtype=torch.uint8)
        memory[:] = 1  # takes all pages
        host = LocalCPUBackend(config, about, memory_allocator=TensorMemoryAllocator(memory))
        self._backend = RemoteBackend(config, about, loop, host, "cpu")
        self._keys = [CacheEngineKey("model", 1, 0, number, torch.bfloat16) for number in range(blocks)]
        self._objects = [host.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD) for _ in range(blocks)]
        draw = torch.Generator().manual_seed(0)
        self._content = [torch.randint(256, (block_bytes,), dtype=torch.uint8, generator=draw) for _ in range(blocks)]
        for each, content in zip(self._objects, self._content, strict=True):
            bytes_of(each)[:] = content

    def put(self) -> dict[str, Any]:
        stored = threading.Semaphore(0)

        def act() -> None:
            self._backend.batched_submit_put_task(
                self._keys, self._objects, on_complete_callback=lambda key: stored.release()
            )
            for _ in self._keys:
                stored.acquire()

        return timed(act)

    def get(self) -> dict[str, Any]:
        got: list[Any] = []
        result = timed(lambda: got.extend(self._backend.batched_get_blocking(self._keys)))
        equal = all(
            each is not None and torch.equal(bytes_of(each), content)
            for each, content in zip(got, self._content, strict=True)
        )
        for each in got:
            bytes_of(each)[:] = 0xEE  # whoever gets this memory next begins with other bytes
            each.ref_count_down()
        return {**result, "equal": equal}


def bytes_of(memory: Any) -> torch.Tensor:
    return torch.frombuffer(memory.byte_array, dtype=torch.uint8)


def timed(act: Any) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    act()
    return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}


def answer(result: dict[str, Any]) -> None:
    print(MARK + json.dumps(result), flush=True)


def main() -> None:
    remote = Remote(**json.loads(sys.argv[1]))
    answer({"version": metadata.version("lmcache")})
    commands = {"put": remote.put, "get": remote.get}
    for line in sys.stdin:
        answer(commands[line.strip()]())
    sys.stdout.flush()
    os._exit(0)  # its threads and their complaints about them are not ours


if __name__ == "__main__":
    main()
