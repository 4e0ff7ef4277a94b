"""Part of tiers.py: our files beside those of vLLM's file system tier and LMCache's local disk backend.

Slots of 2 MiB. All write in turn, until everything is on the disk, and then all read in turn, after the pages of their
files have left the system's cache. Who keeps pages there reads once more, out of them: shown, and no bar. Ours has a
checksum of each slot, written and compared; the others have none. Others make new files, ours has one from the start.
"""

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.tiers.tiers_files import MIB, rotated, verdict
from benchmarks.tiers.tiers_peer import MARK, REGION_BLOCKS
from cpu_prefix_cache.tools.bench.file_rates import FileUnderTest

SLOT_BYTES = 2 * MIB
HERE = Path(__file__).parent
WRITE = "write"
READ = "read"
WARM = "warm"


class CannotRun(Exception):
    """The message gives the reason."""


class Contestant(NamedTuple):
    name: str
    is_direct: bool
    run: Callable[[str], dict[str, Any]]
    close: Callable[[], None]


def peers(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Bar: writes and reads faster than every peer's."""
    blocks = options.mib * MIB // SLOT_BYTES // REGION_BLOCKS * REGION_BLOCKS
    wanted: list[tuple[str, Path | None, dict[str, Any]]] = [
        ("vLLM fs", options.vllm_python, {"peer": "vllm", "direct": True}),
        ("LMCache", options.lmcache_python, {"peer": "lmcache", "direct": False}),
        ("LMCache direct", options.lmcache_python, {"peer": "lmcache", "direct": True}),
    ]
    running = [ours(folder / "ours", blocks)]
    for name, python, asked in wanted:
        try:
            path = folder / name.replace(" ", "-")
            running.append(peer(name, python, {**asked, "folder": str(path), "blocks": blocks}))
        except CannotRun as reason:
            print(f"{name}: not run: {reason}")
    try:
        return table(measured(running, options.runs), blocks * SLOT_BYTES / 1e9)
    finally:
        for each in running:
            each.close()


def measured(running: list[Contestant], runs: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """name -> command -> results. The first run of each is not counted."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {each.name: {} for each in running}
    for number in range(runs + 1):
        for command in (WRITE, READ, WARM):
            for each in rotated(running, number):
                if command != WARM or not each.is_direct:
                    result = each.run(command)
                    if not result.get("equal", True):
                        raise RuntimeError(f"{each.name} has read other bytes than it wrote")
                    found[each.name].setdefault(command, []).append(result)
    return {name: {command: all[1:] for command, all in by.items()} for name, by in found.items()}


def table(found: dict[str, dict[str, list[dict[str, Any]]]], gb: float) -> list[dict[str, Any]]:
    heads = [f"{what:<31}" for what in ("until on the disk", "from the disk", "out of the cache")]
    print(f"GB/s: median, slowest, fastest; and processor ms/GB\n{'':23} {'   '.join(heads)}")
    rows = []
    for name, by_command in found.items():
        row: dict[str, Any] = {"who": name}
        cells = []
        for command in (WRITE, READ, WARM):
            results = by_command.get(command)
            if results is None:
                cells.append(f"{'-':<31}")
                continue
            rates = [gb / each["seconds"] for each in results]
            row[f"{command}_gb_per_s"] = median(rates)
            row[f"{command}_all"] = rates
            row[f"{command}_cpu_ms_per_gb"] = cpu = median(1e3 * each["cpu_seconds"] / gb for each in results)
            cells.append(f"{median(rates):6.2f} {min(rates):8.2f} {max(rates):8.2f} {cpu:6.0f}")
        rows.append(row)
        print(f"{name:23} {'   '.join(cells)}")
    for row in rows[1:]:
        for command in (WRITE, READ):
            ratio = rows[0][f"{command}_gb_per_s"] / row[f"{command}_gb_per_s"]
            print(verdict(f"{command}, ours by {row['who']}", ratio, 1.0))
    return rows


def ours(folder: Path, blocks: int) -> Contestant:
    folder.mkdir()
    file = FileUnderTest(str(folder), blocks * SLOT_BYTES, SLOT_BYTES)
    acts = {WRITE: file.write, READ: file.read, WARM: file.read}

    def run(command: str) -> dict[str, Any]:
        result = acts[command]()
        return {"seconds": result.seconds, "cpu_seconds": result.cpu_seconds}

    return Contestant("ours, verified", file.is_direct, run, file.close)


def peer(name: str, python: Path | None, asked: dict[str, Any]) -> Contestant:
    if python is None:
        option = "--vllm-python" if asked["peer"] == "vllm" else "--lmcache-python"
        raise CannotRun(f"no environment was given ({option})")
    Path(asked["folder"]).mkdir()
    command = [str(python), str(HERE / "tiers_peer.py"), json.dumps({**asked, "block_bytes": SLOT_BYTES})]
    log = Path(asked["folder"]).with_suffix(".log")
    with log.open("w") as errors:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, text=True, **pipes)

    def answer() -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        raise CannotRun((log.read_text().strip().splitlines() or ["it ended without a word"])[-1])

    def run(command: str) -> dict[str, Any]:
        print(command, file=process.stdin, flush=True)
        return answer()

    def close() -> None:
        if process.stdin is not None:
            process.stdin.close()
        process.wait()

    try:
        version = answer()["version"]
    except BaseException:
        close()
        raise
    return Contestant(f"{name} {version}", asked["direct"], run, close)
