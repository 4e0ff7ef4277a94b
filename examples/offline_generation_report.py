"""Output of the example: the table line by line as rounds finish, the verdict, the picture, the JSON file.

Each line is flushed, so that what is printed is not lost when the run is cut off, and a reader who has gone away is
noticed at once.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from connector.transformers import PrefixCachedGenerator
from cpu_prefix_cache import ConfigurationError
from offline_generation_checks import Check, Round, ttft_by_hit

BAR = 60  # characters of the picture's longest bar


def open_stdout() -> None:
    """It must be there, and print any answer, whatever its encoding."""
    if sys.stdout is None:
        raise ConfigurationError("stdout is closed: there is nowhere to print to")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print above the progress bar. Raises ConfigurationError if that is not possible."""
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
    except OSError as error:
        _discard_stdout()
        raise ConfigurationError(f"cannot print: {error.strerror}") from error


def _discard_stdout() -> None:
    """Sends later output nowhere, or Python would try again at its end, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def header(*, has_tier: bool) -> str:
    tier = "  of it from tier" if has_tier else ""
    return (
        f"\nround  requests  prompt tokens = computed + on device + on host{tier}   stored   loaded   TTFT median"
        "  host hits   no cache  logit error"
    )


def row(line: Round) -> str:
    host_hit = "-" if line.ttft_ms_median_host_hit is None else f"{line.ttft_ms_median_host_hit:.1f} ms"
    tier = "" if line.tier_hit_tokens is None else f"  {line.tier_hit_tokens:15}"
    return (
        f"{line.round:5}  {line.requests:8}  {line.prompt_tokens:13}  {line.computed_tokens:9}"
        f"  {line.device_hit_tokens:9}  {line.host_hit_tokens:8}{tier}  {line.bytes_stored / 1e6:4.0f} MB"
        f"  {line.bytes_loaded / 1e6:4.0f} MB  {line.ttft_ms_median:8.1f} ms  {host_hit:>9}"
        f"  {line.ttft_ms_median_no_cache:6.1f} ms  {line.max_logit_error:11.1e}"
    )


def picture(checks: Sequence[Check]) -> str:
    """The medians of the time to the first token, as bars."""
    medians = ttft_by_hit(checks)
    longest = max(seconds for seconds in medians.values() if seconds is not None)
    lines = ["time to the first token, medians of all rounds"]
    for kind, seconds in medians.items():
        name = kind.replace("_", " ")
        if seconds is None:
            lines.append(f"  {name:10}          -")
        else:
            lines.append(f"  {name:10}  {1e3 * seconds:6.1f} ms  {'#' * max(1, round(BAR * seconds / longest))}")
    return "\n".join(lines)


def judge_control(checks: Sequence[Check]) -> str:
    """Whether the damage was detected. Answers before the damage must agree."""
    if not all(each.agrees for each in checks if not each.damaged):
        return "differs without damage"
    damaged = [each for each in checks if each.damaged]
    if not damaged:
        return "nothing to corrupt"
    return "missed" if all(each.agrees for each in damaged) else "caught"


def verdict(checks: Sequence[Check], control: str | None, *, exact: bool) -> tuple[int, str]:
    """The exit status, and what it means. `exact`: answers must agree."""
    if control is not None:
        return 1 if control == "caught" else 3, f"control: {control}"
    differing = [each for each in checks if not each.agrees]
    if not differing:
        return 0, "every answer agrees with the same engine without a cache"
    ties = sum(each.near_tie for each in differing)
    said = f"{len(differing)} answers differ from the same engine without a cache, {ties} of them at a near tie"
    return int(exact), said


def check_json(path: Path) -> None:
    """Raise ConfigurationError unless `write_json` can write to that file, as far as can be known before."""
    try:
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError
        if _is_ordinary(path):
            _draft(path).touch()
            _draft(path).unlink()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ConfigurationError(f"--json {path} is not a file that can be written") from error


def write_json(
    options: argparse.Namespace,
    name: str,
    generator: PrefixCachedGenerator,
    rounds: Sequence[Round],
    checks: Sequence[Check],
) -> None:
    """Write the rounds that finished. If that fails, what the file had before is still there."""
    text = json.dumps(_results(options, name, generator, rounds, checks), indent=2) + "\n"
    try:
        if not _is_ordinary(options.json):
            options.json.write_text(text)
            return
        draft = _draft(options.json)
        try:
            draft.write_text(text)
            draft.replace(options.json.resolve())
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write --json {options.json}: {error.strerror}") from error


def _is_ordinary(path: Path) -> bool:
    """Not a device or a pipe, which must not be replaced."""
    return path.is_file() or not path.exists()


def _draft(path: Path) -> Path:
    path = path.resolve()
    return path.with_name(f"{path.name}.part")


def _results(
    options: argparse.Namespace,
    name: str,
    generator: PrefixCachedGenerator,
    rounds: Sequence[Round],
    checks: Sequence[Check],
) -> dict[str, object]:
    statistics = generator.statistics()
    results: dict[str, object] = {
        "arch": name,
        "device": options.device,
        "offload": options.offload,
        "policy": options.policy,
        "groups": [
            {
                "name": group.name,
                "kind": group.kind,
                "layers": layers,
                "block_tokens": group.block_tokens,
                "bytes_per_block": group.block_bytes * group.device_blocks,
            }
            for group, layers in zip(generator.planner.groups, generator.past.num_layers(), strict=True)
        ],
        "grid_tokens": generator.planner.grid_tokens,
        "host_block_bytes": generator.planner.host_block_bytes,
        "finished": len(rounds) == options.rounds,
        "rounds": [asdict(line) for line in rounds],
        "ttft_seconds": ttft_by_hit(checks),
        "bytes_stored": statistics.bytes_stored if statistics else 0,
        "bytes_loaded": statistics.bytes_loaded if statistics else 0,
        "evictions": statistics.pool.evictions if statistics else 0,
    }
    tier = generator.tier_statistics()
    if tier is not None:
        results["tier"] = {
            "mode": tier.mode,
            "found": tier.found,
            "hit_tokens": tier.hit_tokens,
            "refused": tier.refused,
        }
    if options.corrupt:
        results["control"] = judge_control(checks)
    return results
