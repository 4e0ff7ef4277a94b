"""How fast values go to stores that machines share, and come from them: ours beside the same client's own calls.

    python -m benchmarks.tiers.tiers_stores [--json FILE]

Starts redis-server and mooncake_master on this machine, each if it is installed. Values are a frame of 96 bytes and a
block. All ways of one store run in turn; every value that was read is compared with what was put.

| way | |
|---|---|
| ours | `put_from`, `get_into` |
| redis-py | a pipeline of 16 SETs of joined frame and block, or of 16 GETs whose values are copied to their places |
| redis-py, block only | the same without a frame: nothing is joined |
| mooncake | one call of its client for all blocks, without frames |
"""

import argparse
import json
import mmap
import random
import tempfile
import time
from collections.abc import Callable
from ctypes import addressof, c_char
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import print_environment
from cpu_prefix_cache.stores.keyed_store import KeyedStore
from cpu_prefix_cache.stores.opening import open_store
from tests.stores.servers import MooncakeMaster, MooncakeNode, RedisServer, missing, starting

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES, FRAME_BYTES = (2 * MIB, 256 * KIB), 96
PIPELINED = 16
SECONDS = 60.0  # for a call
RUNS = 9
TOTAL_BYTES = 64 * MIB  # of one run

Way = tuple[str, str]  # who, and put or get


class Values:
    """Frames and blocks in registered memory, and what they held when they were put."""

    def __init__(self, block_bytes: int) -> None:
        self.count, self.block_bytes = TOTAL_BYTES // block_bytes, block_bytes
        self.memory = memoryview(mmap.mmap(-1, self.count * (block_bytes + FRAME_BYTES)))
        blocks, frames = self.memory[: self.count * block_bytes], self.memory[self.count * block_bytes :]
        self.blocks = [blocks[at * block_bytes : (at + 1) * block_bytes] for at in range(self.count)]
        self.frames = [frames[at * FRAME_BYTES : (at + 1) * FRAME_BYTES] for at in range(self.count)]
        self.buffers = list(zip(self.frames, self.blocks, strict=True))
        self.content = random.Random(1).randbytes(len(self.memory))
        self.fill()

    def fill(self) -> None:
        self.memory[:] = self.content

    def poison(self) -> None:
        self.memory[:] = b"\xee" * len(self.memory)

    def check(self, who: str) -> None:
        """Check frames too, but those of `block only`, which were not moved."""
        end = len(self.memory) if "only" not in who and who != "mooncake" else self.count * self.block_bytes
        assert self.memory[:end] == self.content[:end], f"{who} got other bytes than were put"


def ours(store: KeyedStore, values: Values, prefix: str) -> dict[Way, Callable[[], None]]:
    keys = [f"{prefix}:{at}" for at in range(values.count)]

    def put() -> None:
        assert all(store.put_from(keys, values.buffers, SECONDS))

    def get() -> None:
        assert all(store.get_into(keys, values.buffers, SECONDS))

    return {("ours", "put"): put, ("ours", "get"): get}


def redis_py(server: RedisServer, values: Values) -> dict[Way, Callable[[], None]]:
    import redis

    client = redis.Redis(port=server.port)
    parts = [range(begin, min(begin + PIPELINED, values.count)) for begin in range(0, values.count, PIPELINED)]

    def put(*, with_frames: bool) -> None:
        for part in parts:
            pipeline = client.pipeline(transaction=False)
            for at in part:
                pipeline.set(f"{with_frames}:{at}", b"".join(values.buffers[at]) if with_frames else values.blocks[at])
            pipeline.execute()

    def get(*, with_frames: bool) -> None:
        for part in parts:
            pipeline = client.pipeline(transaction=False)
            for at in part:
                pipeline.get(f"{with_frames}:{at}")
            for at, value in zip(part, pipeline.execute(), strict=True):
                head = FRAME_BYTES if with_frames else 0
                values.frames[at][:head], values.blocks[at][:] = value[:head], memoryview(value)[head:]

    return {
        ("redis-py", "put"): lambda: put(with_frames=True),
        ("redis-py", "get"): lambda: get(with_frames=True),
        ("redis-py, block only", "put"): lambda: put(with_frames=False),
        ("redis-py, block only", "get"): lambda: get(with_frames=False),
    }


def mooncake(master: MooncakeMaster, values: Values) -> tuple[dict[Way, Callable[[], None]], Callable[[], None]]:
    """Its ways, and what deletes its keys: it does not move what it has already."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", f"127.0.0.1:{master.port}") == 0
    assert client.register_buffer(addressof(c_char.from_buffer(values.memory)), len(values.memory)) == 0
    keys = [f"own:{at}" for at in range(values.count)]
    places = [addressof(c_char.from_buffer(block)) for block in values.blocks]
    sizes = [values.block_bytes] * values.count

    def put() -> None:
        assert set(client.batch_put_from(keys, places, sizes)) == {0}

    def get() -> None:
        assert set(client.batch_get_into(keys, places, sizes)) == {values.block_bytes}

    return {("mooncake", "put"): put, ("mooncake", "get"): get}, lambda: client.batch_remove(keys, True)


def in_turn(values: Values, ways: dict[Way, Callable[[], None]], clear: Callable[[], None]) -> dict[Way, list[float]]:
    """GB/s of each run. Puts first, then gets; each time another way first."""
    rates: dict[Way, list[float]] = {way: [] for way in ways}
    for number in range(RUNS):
        clear()
        for verb in ("put", "get"):
            turn = [way for way in ways if way[1] == verb]
            for way in turn[number % len(turn) :] + turn[: number % len(turn)]:
                values.fill() if verb == "put" else values.poison()
                begin = time.perf_counter()
                ways[way]()
                rates[way].append(TOTAL_BYTES / (time.perf_counter() - begin) / 1e9)
                if verb == "get":
                    values.check(way[0])
    return rates


def redis_rates(folder: Path, block_bytes: int) -> dict[Way, list[float]]:
    with starting(folder) as begin:
        server = begin(RedisServer)
        values, store = Values(block_bytes), open_store(server.url())
        return in_turn(values, {**ours(store, values, "ours"), **redis_py(server, values)}, lambda: None)


def mooncake_rates(folder: Path, block_bytes: int) -> dict[Way, list[float]]:
    """Values are in the memory of another process."""
    with starting(folder) as begin:
        master = begin(MooncakeMaster)
        begin(MooncakeNode, master.url(segment="1GiB"))
        values, store = Values(block_bytes), open_store(master.url())
        store.register(values.memory)
        ways, clear = mooncake(master, values)

        def clear_both() -> None:
            clear()
            store.delete([f"ours:{at}" for at in range(values.count)], SECONDS)

        return in_turn(values, {**ours(store, values, "ours"), **ways}, clear_both)


def show(name: str, block_bytes: int, rates: dict[Way, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for (who, verb), each in rates.items():
        mine = median(rates["ours", verb])
        rows.append(dict(store=name, block_bytes=block_bytes, who=who, verb=verb, gb_per_s=each))
        print(
            f"{name:9} {block_bytes // KIB:>5} KiB {verb:4} {who:21} {median(each):5.2f} GB/s "
            f"({min(each):.2f} to {max(each):.2f}); ours is {mine / median(each):.2f} of it"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rates of all runs to this file")
    options = parser.parse_args()
    print_environment(["redis", "mooncake-transfer-engine-non-cuda"])
    lacks, rows = missing(), []
    for name, measure in (("redis", redis_rates), ("mooncake", mooncake_rates)):
        if name in lacks:
            print(f"not measured: {lacks[name]}")
            continue
        for block_bytes in BLOCK_BYTES:
            with tempfile.TemporaryDirectory() as folder:
                rows += show(name, block_bytes, measure(Path(folder), block_bytes))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
