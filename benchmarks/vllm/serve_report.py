"""Figures of what an engine has answered, and tables of them in Markdown."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from benchmarks.common import percentile

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
Row = Mapping[str, Any]


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, in ms."""
    figures = {"mean": mean(seconds), **{name: percentile(seconds, share) for name, share in SHARES.items()}}
    return {name: round(1e3 * value, 1) for name, value in figures.items()}


def served_row(answer: Row, gpus: int, price: float | None) -> dict[str, Any]:
    """`answer` is the reply of `serve_engine.py`; `price` that of a GPU for an hour."""
    answered, seconds = answer["answered"], answer["seconds"]
    prompt = sum(each["prompt"] for each in answered)
    tokens = prompt + sum(len(each["tokens"]) for each in answered)
    between = [later - earlier for each in answered for earlier, later in pairwise(each["tokens"])]
    row = {
        "seconds": round(seconds, 1),
        "prompt_tokens_per_s": round(prompt / seconds),
        "tokens_per_s_per_gpu": round(tokens / seconds / gpus),
        "hit": round(sum(each["cached"] for each in answered) / prompt, 3),
        "first_token_ms": spread([each["tokens"][0] - each["sent"] for each in answered]),
        "between_tokens_ms": spread(between) if between else None,
    }
    if price is not None:
        row["cost_per_million_tokens"] = round(price * gpus / 3600 * seconds / tokens * 1e6, 4)
    return row


def convoy_row(alone: Sequence[Row], together: Sequence[Row]) -> dict[str, Any]:
    """First tokens in ms, of the prompt alone and of all at once, and the fewest tokens that any of them was spared."""
    first = sorted(each["tokens"][0] - each["sent"] for each in together)
    times = {"alone": alone[0]["tokens"][0] - alone[0]["sent"], "first": first[0], "median": percentile(first, 0.5)}
    return {
        "prompts": len(together),
        **{f"{name}_ms": round(1e3 * value, 1) for name, value in {**times, "last": first[-1]}.items()},
        "last_over_first": round(first[-1] / first[0], 2),
        "cached_alone": alone[0]["cached"],
        "least_cached": min(each["cached"] for each in together),
    }


def served_table(rows: Sequence[tuple[str, Row]]) -> str:
    priced = any("cost_per_million_tokens" in row for _, row in rows)
    titles = ["engine @ GiB", "prompt tokens/s", "tokens/s a GPU", "hit"]
    titles += ["first token, ms: mean, 50, 95, 99 %", "between tokens, ms: mean, 50, 95, 99 %"]
    titles += ["cost of a million tokens"] * priced
    return table(titles, [[name, *_served(row, priced)] for name, row in rows])


def _served(row: Row, priced: bool) -> list[str]:
    cells = [f"{row['prompt_tokens_per_s']:,}", f"{row['tokens_per_s_per_gpu']:,}", f"{row['hit']:.3f}"]
    cells += [_spread(row["first_token_ms"], 0), _spread(row["between_tokens_ms"], 1)]
    return cells + ([f"{row['cost_per_million_tokens']:.4f}"] if priced else [])


def _spread(figures: Mapping[str, float] | None, digits: int) -> str:
    return ", ".join(f"{value:,.{digits}f}" for value in figures.values()) if figures else ""


def convoy_table(rows: Sequence[tuple[str, Row]]) -> str:
    names = ["prompts", "alone_ms", "first_ms", "median_ms", "last_ms", "last_over_first", "least_cached"]
    titles = [
        "engine @ GiB",
        "prompts",
        "alone, ms",
        "first, ms",
        "median, ms",
        "last, ms",
        "last / first",
        "least cached",
    ]
    return table(titles, [[name, *(f"{row[figure]:,}" for figure in names)] for name, row in rows])


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] + ["--:"] * (len(titles) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
