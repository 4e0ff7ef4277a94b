"""Output of `size`: a row for each capacity that was tried, and the least that is enough."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpu_prefix_cache.tools.replay.knee import FLAT, flat_from
from cpu_prefix_cache.tools.replay.outcome import Ratios
from cpu_prefix_cache.tools.replay.plot import BLOCKS_FOUND, INFINITE, SAVED, TIME_FOUND, Panel, Points
from cpu_prefix_cache.tools.replay.report import aligned, show_saved
from cpu_prefix_cache.tools.replay.results_json import saved
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.sizing import Point, Sizing
from cpu_prefix_cache.tools.replay.traces import Trace
from cpu_prefix_cache.tools.replay.units import show_bytes

GB, GIB, MIB, KIB = 10**9, 2**30, 2**20, 2**10
ADD = "Device and host add (lazy, no tier below): the host needs as much less as the device has for KV."
NOT_QUITE_ALWAYS = "Sizes between the rows were not tried; a slightly smaller one may also reach the goal."


@dataclass(frozen=True, slots=True)
class Sized:
    """The sizings of one trace by policy, and what they are counted in. What is not known is None."""

    trace: Trace
    sizings: Mapping[str, Sizing]
    host_block_bytes: int
    even_depth: float
    rates: Rates | None

    def num_bytes(self, point: Point) -> int:
        return point.capacity * self.host_block_bytes

    def time_hit_ratio(self, point: Point) -> float | None:
        return None if math.isinf(self.even_depth) else point.found.share_of(self.trace.work, self.even_depth)

    def seconds(self, point: Point) -> float | None:
        if self.rates is None:
            return None
        return self.rates.saved(point.found, round(point.hit_ratio * self.trace.blocks))

    def share(self, point: Point) -> float | None:
        """Share of the seconds to compute all prompts."""
        if self.rates is None:
            return None
        return (self.seconds(point) or 0.0) / self.rates.seconds(self.trace.work)

    def money(self, point: Point) -> float | None:
        return None if self.rates is None else self.rates.money(self.seconds(point) or 0.0)


def goals(sized: Sized, ideal: float, target: float, *, has_checkpoints: bool) -> str:
    """Policies with the same goal share its lines."""
    policies: dict[str, list[str]] = {}
    for policy, sizing in sized.sizings.items():
        ceiling = sizing.points[-1].hit_ratio
        resumed = f", {ceiling:.4f} when resumed at checkpoints" if has_checkpoints else ""
        text = (
            f"ideal         hit ratio {ideal:.4f} with infinite memory{resumed}\n"
            f"goal          {sizing.goal:.4f}, {target:.0%} of {ceiling:.4f}; policy"
        )
        policies.setdefault(text, []).append(policy)
    return "\n".join(f"{text} {', '.join(names)}" for text, names in policies.items())


def table(sized: Sized) -> str:
    """Columns of time and money stand there if they are known."""
    some = next(iter(sized.sizings.values())).enough
    columns = [column for column in _columns(sized) if column[1](some) is not None]
    rows, marks = [["policy", *(name for name, _, _ in columns)]], [""]
    for policy, sizing in sized.sizings.items():
        for point in sizing.points:
            rows.append([policy, *(format(value(point) or 0.0, style) for _, value, style in columns)])
            marks.append("  <- the least that reaches the goal" if point == sizing.enough else "")
    return "\n".join(f"{line}{mark}" for line, mark in zip(aligned(rows).splitlines(), marks, strict=True))


def _columns(sized: Sized) -> Sequence[tuple[str, Callable[[Point], float | None], str]]:
    """Name, value and format of each."""
    return (
        ("GB", lambda point: sized.num_bytes(point) / GB, ",.1f"),
        ("GiB", lambda point: sized.num_bytes(point) / GIB, ",.1f"),
        ("hit ratio", lambda point: point.hit_ratio, ".4f"),
        ("hit time", sized.time_hit_ratio, ".4f"),
        ("seconds saved", sized.seconds, ",.1f"),
        ("of prefill", sized.share, ".1%"),
        ("money", sized.money, ",.2f"),
    )


def answers(sized: Sized, *, has_checkpoints: bool) -> str:
    """With checkpoints the host holds prompts whole, whatever the device has."""
    memory_of = "host memory" if has_checkpoints else "memory"
    lines = []
    for policy, sizing in sized.sizings.items():
        memory, seconds = sized.num_bytes(sizing.enough), sized.seconds(sizing.enough)
        share = sized.share(sizing.enough)
        saving = "" if seconds is None else f", and save {show_saved(seconds)} of prefill, {share:.0%} of all"
        lines.append(
            f"{policy}: {memory / GB:,.1f} GB ({memory / GIB:,.1f} GiB) of {memory_of} reach "
            f"{sizing.enough.hit_ratio:.4f}{saving}.{_flattens(sized, sizing)}"
        )
    return "\n".join([*lines, *(() if has_checkpoints else (ADD,)), NOT_QUITE_ALWAYS])


def _flattens(sized: Sized, sizing: Sizing) -> str:
    """From which size on twice as much memory adds little, of the powers of two; nothing if there are too few."""
    block = sized.host_block_bytes
    doubled = {(1 << power) // block for power in range(block.bit_length() - 1, 64)}
    points = [point for point in sizing.points if point.capacity in doubled]
    value, what = (sized.share, "prefill") if sized.rates else ((lambda point: point.hit_ratio), "hits")
    flat = flat_from([value(point) or 0.0 for point in points])
    if flat is None:
        return ""
    return f" From {show_bytes(sized.num_bytes(points[flat]))} on, twice as much adds less than {FLAT:.0%} of {what}."


def as_json(sized: Sized, ideal: Ratios, target: float) -> dict[str, Any]:
    def values(point: Point) -> dict[str, Any]:
        return {
            "capacity_bytes": sized.num_bytes(point),
            "block_hit_ratio": point.hit_ratio,
            "time_hit_ratio": sized.time_hit_ratio(point),
            **saved(sized.seconds(point), sized.share(point), sized.money(point)),
        }

    return {
        "ideal": {"block_hit_ratio": ideal.block_hit_ratio, "time_hit_ratio": ideal.time_hit_ratio},
        "target": target,
        "results": [
            {
                "policy": policy,
                "goal": sizing.goal,
                "enough": values(sizing.enough),
                "points": [values(point) for point in sizing.points],
            }
            for policy, sizing in sized.sizings.items()
        ],
    }


def panels(sized: Sized, ideal: Ratios) -> Sequence[Panel]:
    """Hits and, if it is known, the share of prefill time that they save."""
    hits = Panel(BLOCKS_FOUND, _lines(sized, lambda point: point.hit_ratio), {}, {INFINITE: ideal.block_hit_ratio})
    if sized.rates is not None:
        return [hits, Panel(SAVED, _lines(sized, sized.share), {}, {})]
    if ideal.time_hit_ratio is not None:
        return [hits, Panel(TIME_FOUND, _lines(sized, sized.time_hit_ratio), {}, {INFINITE: ideal.time_hit_ratio})]
    return [hits]


def _lines(sized: Sized, value: Callable[[Point], float | None]) -> dict[str, Points]:
    return {
        policy: [(point.capacity, value(point) or 0.0) for point in sizing.points]
        for policy, sizing in sized.sizings.items()
    }
