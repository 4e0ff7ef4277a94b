"""Processor time of a load's spans, which the thread of the loads spends with Python's lock: by loops and by tables.

    python -m benchmarks.copies.spans [--parts 64] [--pages 1000] [--kib 128]

Pages of an engine that keeps each layer by itself, as SGLang's: a span for each part of each page. Runs without a GPU.
"""

import argparse
import random
import time
from unittest import mock

import torch

from benchmarks.common import print_environment
from cpu_prefix_cache.copier import paths
from cpu_prefix_cache.copier.binding import BoundGroup
from cpu_prefix_cache.copier.link import HostRegion
from cpu_prefix_cache.deciding import Direction, GroupCopy, Piece, PrefixGroup

REPEATS = 7


def seconds(direct: paths.Direct, region: HostRegion, copy: GroupCopy) -> float:
    begin = time.thread_time()
    for run in direct.slices(copy, is_part=True):
        for _, spans in run:
            region.crossing(Direction.LOAD, spans)
    return time.thread_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("parts", 64), ("pages", 1000), ("kib", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    print_environment(["torch"])
    size, ids = args.kib << 10, list(range(args.pages))
    parts = tuple(torch.empty(args.pages, size, dtype=torch.uint8) for _ in range(args.parts))  # never written
    host = torch.empty(args.pages, args.parts * size, dtype=torch.uint8)
    piece = Piece(PrefixGroup(name="", block_tokens=1, block_bytes=host.shape[1]), 1, 1, host.shape[1])
    region = HostRegion(host, None, None)
    direct = paths.Direct(BoundGroup(piece, parts, tuple(range(0, host.shape[1] + 1, size))), region)
    copy = GroupCopy(0, random.sample(ids, args.pages), random.sample(ids, args.pages))
    for name, fewest in (("loops", args.parts * args.pages + 1), ("tables", 1)):
        with mock.patch.object(paths, "FEWEST_IN_TABLE", fewest):
            best = min(seconds(direct, region, copy) for _ in range(REPEATS))
        print(f"{name}: {best * 1e3:.1f} ms, {best / args.parts / args.pages * 1e6:.2f} us a span")


if __name__ == "__main__":
    main()
