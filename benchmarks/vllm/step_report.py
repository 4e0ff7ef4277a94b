"""Steps that `serve.py --steps` noted, of one or several engines, as a table.

    python -m benchmarks.vllm.step_report FOLDER/ours-lazy@40.jsonl FOLDER/null@40.jsonl

For the steps that compute tokens of prompts and for those that only decode: how many, and means of their tokens, of ms
on the GPU and of the processor to launch them, and from one launch to the next. Then the share of the time that the GPU
took for steps; and loads that requests wait for, and means of ms and of steps from their plans to their reports.
"""

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

PAUSE_SECONDS = 1.0  # between two launches: there was nothing to compute
HEAD = ("engine", "steps with prefill", "tokens", "GPU", "launch", "period", "that decode", "tokens", "GPU", "launch")
HEAD += ("period", "GPU, share", "loads", "ms", "steps")
Row = dict[str, Any]


def read(file: Path) -> list[Row]:
    """The steps that compute, each with the ms until the next step's launch."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row, after in pairwise(rows):
        row["period"] = 1e3 * (after["began"] - row["began"])
    return [row for row in rows[:-1] if row["tokens"] and row["period"] < 1e3 * PAUSE_SECONDS]


def cells(steps: Sequence[Row]) -> list[str]:
    prefills = [row for row in steps if row["tokens"] > row["requests"]]
    decodes = [row for row in steps if row["tokens"] <= row["requests"]]
    busy, span = (sum(row[name] or 0.0 for row in steps) for name in ("gpu", "period"))
    loads = [load for row in steps for load in row["loads"]]
    waits = [f"{fmean(each):.1f}" for each in zip(*loads, strict=True)] or ["", ""]
    return [*_means(prefills), *_means(decodes), f"{busy / span:.2f}" if span else "", str(len(loads)), *waits]


def _means(steps: Sequence[Row]) -> list[str]:
    names = ("tokens", "gpu", "launch", "period")
    means = [fmean(row[name] or 0.0 for row in steps) if steps else 0.0 for name in names]
    return [str(len(steps)), f"{means[0]:,.0f}", *(f"{mean:.1f}" for mean in means[1:])]


def table(files: Sequence[Path]) -> str:
    lines = [HEAD, ["---"] + ["--:"] * (len(HEAD) - 1), *([file.stem, *cells(read(file))] for file in files)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table([Path(name) for name in sys.argv[1:]]))
