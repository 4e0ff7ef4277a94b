"""Tokens a second of a tier below host memory, with coded blocks beside raw ones of the same tokens, in turn.

    python -m benchmarks.tiers.coded_tiers [--folder FOLDER] [--runs 9] [--json FILE]

A tier moves the bytes that the host has, so a coded block is a shorter one: 49 bytes for 64. Measured are files in
FOLDER, and redis-server and mooncake_master on this machine, each if it is installed. A slot is a block of RAW_BYTES of
KV, raw or coded; as many of each are written and read, and checksums are verified.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import print_environment
from cpu_prefix_cache.model.codec import EXPONENT
from cpu_prefix_cache.stores.opening import open_store
from cpu_prefix_cache.tools.bench.file_rates import FileUnderTest
from cpu_prefix_cache.tools.bench.slot_rates import SlotsUnderTest
from cpu_prefix_cache.tools.bench.store_rates import StoreUnderTest
from tests.stores.servers import MooncakeMaster, MooncakeNode, RedisServer, missing, starting

MIB = 1 << 20
RAW_BYTES = 2 * MIB
SLOTS = {"file": 512, "redis": 128, "mooncake": 128}
LEAST = 1.28  # of the raw tokens a second
CODED_BYTES = EXPONENT.kept_bytes(RAW_BYTES)


@contextmanager
def tier(name: str, folder: Path, slot_bytes: int) -> Iterator[SlotsUnderTest]:
    count = SLOTS[name]
    if name == "file":
        file = FileUnderTest(str(folder), count * slot_bytes, slot_bytes)
        try:
            yield file
        finally:
            file.close()
            file.remove()
        return
    with starting(folder) as begin:
        if name == "redis":
            url = begin(RedisServer).url()
        else:
            master = begin(MooncakeMaster)
            begin(MooncakeNode, master.url(segment="1GiB"))
            url = master.url()
        values = StoreUnderTest(open_store(url), url, count * slot_bytes, slot_bytes)
        try:
            yield values
        finally:
            values.close()
            values.remove()


def measured(name: str, folder: Path, runs: int) -> list[dict[str, Any]]:
    """Blocks a second of each run."""
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(runs):
        sizes = [("raw", RAW_BYTES), ("coded", CODED_BYTES)]
        for form, size in sizes[:: 1 if number % 2 else -1]:
            own = folder / form
            own.mkdir(exist_ok=True)
            with tier(name, own, size) as slots:
                slots.write()  # the first one is slow
                for verb, run in (("write", slots.write), ("read", slots.read)):
                    found.setdefault((verb, form), []).append(slots.slots / run().seconds)
    return [dict(tier=name, verb=verb, form=form, blocks_per_s=each) for (verb, form), each in found.items()]


def show(rows: list[dict[str, Any]]) -> None:
    rates = {(row["tier"], row["verb"], row["form"]): median(row["blocks_per_s"]) for row in rows}
    for (name, verb, form), coded in rates.items():
        if form == "coded":
            raw = rates[name, verb, "raw"]
            mark = "ok  " if coded >= LEAST * raw else "MISS"
            print(f"{mark} {name:9} {verb:5} {raw:7.0f} blocks a second raw, {coded:7.0f} coded: {coded / raw:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: a temporary one)")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print_environment(["redis", "mooncake-transfer-engine-non-cuda"])
    print(f"a block of {RAW_BYTES} bytes, coded {CODED_BYTES}: {RAW_BYTES / CODED_BYTES:.3f} times the tokens a byte")
    lacks, rows = missing(), []
    for name in SLOTS:
        if name in lacks:
            print(f"not measured: {lacks[name]}")
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = measured(name, Path(folder), options.runs)
        show(found)
        rows += found
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
