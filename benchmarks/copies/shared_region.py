"""Rates of copies between GPUs and a region that several processes share, as a keeper's pool is, and one of their own.

    python -m benchmarks.copies.shared_region [--gpus 1,2] [--gib 8] [--json FILE]

For each number of GPUs, that many processes, one for each GPU, map one file in memory, and each has a region of its own
beside it, both pinned. All copy at the same time, in rounds that take turns between the two regions: loads, stores and
both at once, of blocks in fragments of 32 KiB, which cross a ring, and of blocks in one piece of 2 MiB, which cross
directly. Host blocks are at random, and no two processes have one in common, as a keeper gives a slot to one writer.
First each process reads back what it has written.

Bar: 98 % of the private region's rate, summed over the GPUs. GB is 1e9 bytes; rates are medians over the rounds.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import environment
from benchmarks.copies.copies import GIB, KIB, LOAD, MIB, POISON, STORE, sustained
from benchmarks.copies.copy_methods import DEVICE, Scene, Staged
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.mapping import make_shared, map_shared

BAR = 0.98
ROUNDS = 7
CHECKED = 16  # blocks, whose bytes are compared
TRANSFER = 256 * MIB
BLOCKS = {"32 KiB": (32 * KIB, 64), "2 MiB": (2 * MIB, 1)}  # bytes of a fragment, and fragments of a block
WAYS = {"load": (LOAD,), "store": (STORE,), "both": (LOAD, STORE)}
SHARED, PRIVATE = "shared", "private"
Rates = dict[str, list[float]]  # by block, way and region: GB/s in each round


def copying(gpu: int, gpus: int, file: int, num_bytes: int, together: Barrier, results: Any) -> None:
    """The process of one GPU of so many, which is device 0 to it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    arenas = {SHARED: arena(num_bytes, file), PRIVATE: arena(num_bytes)}
    rates: Rates = {}
    right = True
    for block, (fragment, count) in BLOCKS.items():
        scenes = {
            name: Scene(each, each.blocks.view(-1), fragment, count, TRANSFER, "random")
            for name, each in arenas.items()
        }
        for scene in scenes.values():
            own = range(gpu, len(scene.host), gpus)
            scene.host_blocks = random.Random(gpu).sample(own, scene.num_blocks)
        right &= round_trip(scenes[SHARED], together)
        methods = {name: Staged(scene) for name, scene in scenes.items()}
        for way, directions in WAYS.items():
            for at in range(ROUNDS + 1):  # the first warms up
                for name, method in methods.items():
                    together.wait()
                    rate = sustained(method, directions)
                    if at:
                        rates.setdefault(f"{way} {block} {name}", []).append(rate)
    together.wait()
    for each in arenas.values():
        each.close()
    results.put((right, rates))


def arena(num_bytes: int, file: int | None = None) -> HostArena:
    region = None if file is None else map_shared(file, num_bytes)
    made = HostArena(num_bytes // (2 * MIB), 2 * MIB, pinned_for=DEVICE, region=region)
    made.wait_until_ready()
    return made


def round_trip(scene: Scene, together: Barrier) -> bool:
    """Whether bytes come back into poisoned memory, and one that is damaged on the host is noticed."""
    copier, copies = scene.copier(), scene.copies(CHECKED * scene.block_bytes)
    wanted = [tensor[scene.device_blocks[:CHECKED]] for tensor in scene.tensors]
    together.wait()
    copier.copy(STORE, copies)
    together.wait()  # others have written beside
    seen = []
    for _ in range(2):
        for tensor in scene.tensors:
            tensor.fill_(POISON)
        copier.copy(LOAD, copies)
        pairs = zip(scene.tensors, wanted, strict=True)
        seen.append(all(torch.equal(tensor[scene.device_blocks[:CHECKED]], rows) for tensor, rows in pairs))
        scene.host[scene.host_blocks[0], -1] ^= 1
    together.wait()
    return seen == [True, False]


def measured(gpus: int, num_bytes: int) -> tuple[bool, dict[str, float]]:
    """Whether bytes were right on all GPUs, and their summed rates."""
    context = multiprocessing.get_context("fork")  # descriptors stay; nobody has touched CUDA here
    file, region = make_shared(num_bytes)
    together, results = context.Barrier(gpus), context.Queue()
    copiers = [
        context.Process(target=copying, args=(gpu, gpus, file, num_bytes, together, results)) for gpu in range(gpus)
    ]
    for copier in copiers:
        copier.start()
    answers = [results.get(timeout=300) for _ in copiers]
    for copier in copiers:
        copier.join()
    os.close(file)
    region.close()
    names = answers[0][1]
    return all(right for right, _ in answers), {
        name: round(sum(median(rates[name]) for _, rates in answers), 2) for name in names
    }


def rows(gpus: int, right: bool, rates: dict[str, float]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for way in WAYS:
        for block in BLOCKS:
            shared, private = (rates[f"{way} {block} {name}"] for name in (SHARED, PRIVATE))
            found.append(
                dict(gpus=gpus, way=way, block=block, shared=shared, private=private, ratio=round(shared / private, 3))
            )
    print(f"{gpus} GPUs: bytes {'come back, one damaged is noticed' if right else 'are WRONG'}")
    for row in found:
        mark = " ok " if row["ratio"] >= BAR else "MISS"
        print(
            "{mark} {way:5} {block:6} shared {shared:6.1f}, private {private:6.1f} GB/s: {ratio:.3f}".format(
                mark=mark, **row
            )
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1", help="how many at a time, with commas between")
    parser.add_argument("--gib", type=int, default=8, help="size of each region")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    machine = environment(["cpu-prefix-cache", "torch", "triton"])
    print("\n".join(machine))
    found, right = [], True
    for gpus in map(int, args.gpus.split(",")):
        came_back, rates = measured(gpus, args.gib * GIB)
        right &= came_back
        found += rows(gpus, came_back, rates)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "bytes": right, "rows": found}, indent=1) + "\n")
    return int(not right or any(row["ratio"] < BAR for row in found))


if __name__ == "__main__":
    sys.exit(main())
