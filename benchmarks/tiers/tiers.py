"""The tier below host memory: what it reads and writes, what it finds, and what it costs a busy engine.

    python -m benchmarks.tiers.tiers --folder FOLDER [--trace TRACE] [--parts rates,cpu,hits,replay,peers,busy]

FOLDER is on the disk to be measured; what is made there is removed. Reference and ours take turns, and medians are
printed, each with its bar. What cannot run is named with the reason.

    rates    verified reads and writes of slots, and fio on the same file (`apt-get install fio`)
    cpu      processor time for a GB of that
    hits     a trace on device, host and file with real bytes, also with damaged slots; needs --trace
    replay   the same trace on a host with a tier of ten times its size, without bytes; needs --trace
    peers    LMCache's disk backend and vLLM's file system tier, where their wheels can be imported
    busy     the step of an engine that computes while a tier reads at full rate

The bars for hits and replay are those of the synthetic Mooncake trace.
"""

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import print_environment
from benchmarks.tiers import tiers_busy, tiers_files, tiers_hits, tiers_peers

PACKAGES = ["cpu-prefix-cache", "torch", "xxhash"]
PARTS: dict[str, Callable[[argparse.Namespace, Path], list[dict[str, Any]]]] = {
    "rates": tiers_files.rates,
    "cpu": tiers_files.cpu,
    "hits": tiers_hits.hits,
    "replay": tiers_hits.replay,
    "peers": tiers_peers.peers,
    "busy": tiers_busy.busy,
}


def main() -> None:
    options = arguments()
    note = environment()
    print(note)
    rows: dict[str, list[dict[str, Any]]] = {}
    for part in options.parts:
        print(f"\n{part}", flush=True)
        with tempfile.TemporaryDirectory(prefix="tiers-", dir=options.folder) as folder:
            rows[part] = PARTS[part](options, Path(folder))
        if options.json is not None:
            options.json.write_text(json.dumps({"note": note, **rows}, indent=1) + "\n")


def environment() -> str:
    """Machine and versions."""
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        print_environment(PACKAGES)
    return lines.getvalue().strip()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder on the disk to be measured")
    parser.add_argument("--trace", type=Path, help="trace in Mooncake's format, for hits and replay")
    parser.add_argument("--parts", type=parts, default=list(PARTS), help=f"some of {','.join(PARTS)} (default: all)")
    parser.add_argument("--runs", type=int, default=7, help="runs of each contestant (default 7)")
    parser.add_argument("--mib", type=int, default=2048, help="size of the file of rates, cpu and peers (default 2048)")
    parser.add_argument("--vllm-python", type=Path, help="the python of an environment with vLLM, for peers and busy")
    parser.add_argument("--lmcache-python", type=Path, help="the python of an environment with lmcache, for peers")
    parser.add_argument("--json", type=Path, help="write all numbers to this file, too")
    return parser.parse_args()


def parts(text: str) -> list[str]:
    chosen = text.split(",")
    unknown = set(chosen) - set(PARTS)
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown parts {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    return chosen


if __name__ == "__main__":
    main()
