"""A forward whose layers wait for a load, each for its own: as an engine calls that loads under its prefill.

    python -m benchmarks.copies.layers [--pages 64,16,1] [--gib 4] [--layer-ms 3]

Pages of a Llama 8B's KV are loaded by keys behind a matrix product, as behind the forward before. Each layer of the
next one waits for what it reads (`hold_compute`). For each size of a page, in ms: the load alone, compute alone, both;
and how long the calling thread waits before it may submit the first layer and the last.
"""

import argparse
import hashlib
import time

import torch

from benchmarks.common import print_environment
from cpu_prefix_cache import Prefix, keys_and_values
from cpu_prefix_cache.by_keys import KeyedHostCache

LAYERS, HEADS, WIDTH = 32, 8, 128
TOKEN_BYTES = LAYERS * 2 * HEADS * WIDTH * 2
REPEATS = 5


class Compute:
    """Layers of so many milliseconds, as matrix products."""

    def __init__(self, layer_ms: float) -> None:
        self._a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self._a @ self._a
        self._products = max(1, round(layer_ms / 1e3 / timed(lambda: self.products(20)) * 20))

    def products(self, count: int) -> None:
        for _ in range(count):
            self._a @ self._a

    def layer(self) -> None:
        self.products(self._products)


def timed(work):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(page: int, num_bytes: int, compute: Compute) -> None:
    count = num_bytes // (page * TOKEN_BYTES)
    layers = [torch.zeros(2, count, page, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
    parts = keys_and_values(*layers, block_dim=1)
    keys = [hashlib.sha256(at.to_bytes(8)).digest() for at in range(count)]
    order = torch.randperm(count).tolist()
    with KeyedHostCache([Prefix(parts, block_tokens=page)], host_bytes=num_bytes + (64 << 20)) as host:
        host.prepare()
        host.put(keys, [order]).wait()

        def load():
            host.load(keys, [order]).wait()

        def forward():
            for _ in range(1 + LAYERS):
                compute.layer()

        waits = []

        def both():
            compute.layer()
            begin, at = time.perf_counter(), []
            handle = host.load(keys, [order])
            for layer in range(LAYERS):
                handle.hold_compute(layer)
                at.append(time.perf_counter() - begin)
                compute.layer()
            waits.append((at[0], at[-1]))
            torch.cuda.synchronize()
            handle.wait()

        def warm(work):  # behind a forward: a GPU that has rested computes the next 100 ms a tenth faster (H200)
            forward()
            return timed(work)

        alone, computed, together = (min(warm(work) for _ in range(REPEATS)) for work in (load, forward, both))
        first, last = (sorted(each)[len(each) // 2] for each in zip(*waits, strict=True))
    rate = count * page * TOKEN_BYTES / alone / 1e9
    ms = " | ".join(f"{each * 1e3:.1f}" for each in (alone, computed, together, first, last))
    print(f"| {page} | {rate:.1f} | {ms} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="64,16,1", help="tokens")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--layer-ms", type=float, default=3)
    args = parser.parse_args()
    print_environment(["torch", "triton"])
    compute = Compute(args.layer_ms)
    print("| tokens of a page | load, GB/s | load alone, ms | compute alone | both | first submitted | last |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for page in map(int, args.pages.split(",")):
        measure(page, int(args.gib * 2**30), compute)


if __name__ == "__main__":
    main()
