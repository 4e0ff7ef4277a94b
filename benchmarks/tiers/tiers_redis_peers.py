"""Our tier on Redis beside LMCache's remote backend on the same server: put and get of blocks of 2 MiB and 256 KiB.

    python -m benchmarks.tiers.tiers_redis_peers --lmcache-python PYTHON [--runs 7] [--json FILE]

    ours             TierCopier over KeyedValues: frames with checksums, written and compared
    ours, no frames  the store's calls, of one block each, in as many threads: nothing is verified, as at LMCache
    LMCache redis    its connector for redis://, in Python
    LMCache resp     its connector for resp://, with eight threads in C++

They take turns: the server is emptied, and one puts and gets all blocks; each time another one first. The first round
is not counted. What was got is compared with what was put. PYTHON is that of an environment with lmcache 0.5.6.
The server's processor time is reported in hundredths of a second, so it is a mean of all runs.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import redis

from benchmarks.common import print_environment
from cpu_prefix_cache.stores.opening import open_store
from cpu_prefix_cache.tools.bench.slot_rates import TimedRun
from cpu_prefix_cache.tools.bench.store_rates import StoreUnderTest
from tests.stores.servers import RedisServer

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (2 * MIB, 256 * KIB)
TOTAL_BYTES = 128 * MIB  # of one run
OURS = "ours"
MARK = "peer: "  # begins the lines that a peer answers
PEER = Path(__file__).with_name("tiers_redis_peer.py")

Call = Callable[[], dict[str, Any]]
Calls = dict[str, Call]  # put and get


def ours(store: StoreUnderTest) -> dict[str, Calls]:
    def seen(run: TimedRun) -> dict[str, Any]:
        return run._asdict()

    return {
        OURS: {"put": lambda: seen(store.write()), "get": lambda: seen(store.read())},
        "ours, no frames": {"put": lambda: seen(store.plain_write()), "get": lambda: seen(store.plain_read())},
    }


@contextmanager
def peer(python: Path, url: str, block_bytes: int) -> Iterator[Calls]:
    asked = json.dumps({"url": url, "blocks": TOTAL_BYTES // block_bytes, "block_bytes": block_bytes})
    with tempfile.TemporaryFile("w+") as log:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        process = subprocess.Popen([str(python), str(PEER), asked], **pipes)

        def answer() -> dict[str, Any]:
            for line in process.stdout:
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
            log.seek(0)
            raise RuntimeError(f"LMCache on {url} ended: {log.read()[-2000:]}")

        def call(command: str) -> dict[str, Any]:
            print(command, file=process.stdin, flush=True)
            result = answer()
            if not result.get("equal", True):
                raise RuntimeError(f"LMCache on {url} got other bytes than it had put")
            return result

        try:
            answer()
            yield {"put": lambda: call("put"), "get": lambda: call("get")}
        finally:
            process.kill()
            process.wait()


def measured(server: RedisServer, python: Path, block_bytes: int, runs: int) -> dict[str, dict[str, list[Any]]]:
    """name -> put or get -> results."""
    client = redis.Redis(port=server.port)
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(server.url())))
        under_test = stack.enter_context(closing(StoreUnderTest(store, "redis", TOTAL_BYTES, block_bytes)))
        contestants = ours(under_test)
        for scheme in ("redis", "resp"):
            url = server.url(scheme=scheme)
            contestants[f"LMCache {scheme}"] = stack.enter_context(peer(python, url, block_bytes))
        found: dict[str, dict[str, list[Any]]] = {name: {"put": [], "get": []} for name in contestants}
        names = list(contestants)
        for number in range(runs + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                client.flushall()
                for verb, act in contestants[name].items():
                    before = processor_seconds(server)
                    result = act()
                    found[name][verb].append({**result, "server_cpu_seconds": processor_seconds(server) - before})
    return {name: {verb: results[1:] for verb, results in by.items()} for name, by in found.items()}


def processor_seconds(server: RedisServer) -> float:
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(block_bytes: int, found: dict[str, dict[str, list[Any]]]) -> list[dict[str, Any]]:
    rows, gb = [], TOTAL_BYTES / 1e9
    for verb in ("put", "get"):
        mine = median(gb / each["seconds"] for each in found[OURS][verb])
        for name, by in found.items():
            rates = [gb / each["seconds"] for each in by[verb]]
            cpu = median(1e3 * each["cpu_seconds"] / gb for each in by[verb])
            server = mean(1e3 * each["server_cpu_seconds"] / gb for each in by[verb])
            costs = dict(cpu_ms_per_gb=cpu, server_cpu_ms_per_gb=server)
            rows.append(dict(block_bytes=block_bytes, who=name, verb=verb, gb_per_s=rates, **costs))
            print(
                f"{block_bytes // KIB:>5} KiB {verb:4} {name:16} {median(rates):5.2f} GB/s ({min(rates):.2f} to "
                f"{max(rates):.2f}), processor {cpu:4.0f} ms/GB, the server's {server:4.0f}; "
                f"ours is {mine / median(rates):.2f} of it"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lmcache-python", type=Path, required=True, help="the python of an environment with lmcache")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rates of all runs to this file")
    options = parser.parse_args()
    print_environment(["cpu-prefix-cache", "torch", "redis"])
    rows = []
    for block_bytes in BLOCK_BYTES:
        with tempfile.TemporaryDirectory() as folder:
            server = RedisServer(Path(folder))
            try:
                rows += show(block_bytes, measured(server, options.lmcache_python, block_bytes, options.runs))
            finally:
                server.kill()
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
