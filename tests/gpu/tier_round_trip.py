"""Device, pinned host memory and files on one GPU: every byte that comes back is compared, and rates are printed.

    python -m tests.gpu.tier_round_trip [FOLDER]

Prompts are computed (patterns are written), evicted from the device by others, and from the host too; then they
come again, and are loaded from the files through pinned host memory. Beside it: how much longer a product of matrices
takes while the tier reads at full rate.
"""

import hashlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial

import torch

from cpu_prefix_cache import FileTier, Hit, HostCache, HostOptions, Miss, Pending, Prefix, keys_and_values
from tests.support.small_engine import SmallEngine

TOKENS = 16
LAYERS = 16
BLOCK_BYTES = 2 << 20
CHUNKS = 32  # of a prompt: 64 MiB
DEVICE_PROMPTS = 2
HOST_PROMPTS = 6
PROMPTS = 24
TIER_BYTES = (PROMPTS + 4) * CHUNKS * (BLOCK_BYTES + 128)


def keys_of(prompt: int) -> list[bytes]:
    return [hashlib.sha256(b"%d %d" % (prompt, chunk)).digest() for chunk in range(CHUNKS)]


class Stage:
    def __init__(self, folder: str, device: str) -> None:
        blocks = DEVICE_PROMPTS * CHUNKS
        width = BLOCK_BYTES // (2 * LAYERS * TOKENS * 2)
        self.engine = SmallEngine(blocks)
        self.kv = torch.zeros(2, LAYERS, blocks, TOKENS, width, dtype=torch.bfloat16, device=device)
        self.host = HostCache(
            self.engine,
            [Prefix(keys_and_values(self.kv, block_dim=2), block_tokens=TOKENS)],
            host_bytes=HOST_PROMPTS * CHUNKS * BLOCK_BYTES,
            max_model_len=CHUNKS * TOKENS * 2,
            options=HostOptions(offload="eager"),
            below=FileTier(folder, TIER_BYTES, model="pattern", revision="1", offload="lazy"),
        )
        self.host.prepare()

    def pattern(self, prompt: int) -> torch.Tensor:
        draw = torch.Generator(device=self.kv.device).manual_seed(prompt)
        shape = (2, LAYERS, CHUNKS, TOKENS, self.kv.shape[-1])
        return torch.randint(-99, 99, shape, generator=draw, device=self.kv.device).to(torch.bfloat16)

    def serve(self, prompt: int) -> tuple[bool, bool]:
        """Whether it was loaded, and whether its bytes are right then."""
        keys = keys_of(prompt)
        request = self.engine.take(keys, 0, ())
        self.kv[:, :, request.blocks] = float("nan")
        start = partial(
            self.host.start,
            prompt,
            keys,
            num_tokens=CHUNKS * TOKENS + 1,
            on_device=0,
            allocate=lambda start, boundary: request.blocks[start // TOKENS : boundary // TOKENS],
        )
        while isinstance(answer := start(), Pending):
            self.step()
        if isinstance(answer, Hit):
            ended = dict(self.step())
            while prompt not in ended:
                ended = dict(self.step())
        right = bool((self.kv[:, :, request.blocks] == self.pattern(prompt)).all())
        if not right:
            self.kv[:, :, request.blocks] = self.pattern(prompt)
        self.engine.computed(request, CHUNKS)
        self.host.end(prompt, CHUNKS * TOKENS)
        self.engine.free(request)
        self.settle()
        return not isinstance(answer, Miss), right

    def step(self) -> list:
        self.host.begin_step()
        return self.host.end_step([])

    def settle(self) -> None:
        while self.host.is_busy:
            self.step()
            time.sleep(0.0005)


def product_seconds(times: int = 20) -> Iterator[float]:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(times):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        a @ a
        torch.cuda.synchronize()
        yield time.perf_counter() - begin


def main() -> int:
    folder = tempfile.mkdtemp(dir=sys.argv[1] if len(sys.argv) > 1 else None)
    stage = Stage(folder, "cuda")
    for prompt in range(PROMPTS):
        stage.serve(prompt)
    alone = sorted(product_seconds())[10]
    begin, results = time.perf_counter(), [stage.serve(prompt) for prompt in range(PROMPTS)]
    seconds = time.perf_counter() - begin
    tier = stage.host.statistics().tier
    loaded = sum(was_loaded for was_loaded, _ in results)
    right = all(is_right for was_loaded, is_right in results if was_loaded)
    rate = tier.read_bytes_per_second or 0.0
    print(
        f"{torch.cuda.get_device_name()}: {loaded} of {PROMPTS} prompts loaded, {'right' if right else 'WRONG'} bytes"
    )
    print(f"tier: {tier.cache.chunks_loaded} blocks of 2 MiB read, {tier.refused} refused, {rate / 1e9:.2f} GB/s")
    print(f"{seconds / PROMPTS * 1e3:.0f} ms a prompt of 64 MiB")
    print(f"late {tier.late}, unsaved {tier.unsaved}; a product of matrices alone {alone * 1e3:.3f} ms")
    stage.host.close()
    shutil.rmtree(folder)
    return 0 if right and loaded > PROMPTS // 2 and tier.cache.chunks_loaded else 1


if __name__ == "__main__":
    sys.exit(main())
