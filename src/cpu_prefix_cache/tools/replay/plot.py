"""Plots over capacities: hit ratios and, if it is known, the share of prefill time that hits save.

    a line for each policy     solid, in its colour
    what it is compared with   dashed: the infinite cache, and MIN with bypass, a ceiling

Capacities are in GiB if the bytes of a block are known, else in blocks.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cpu_prefix_cache.tools.plots import colour_of, new_figure, save
from cpu_prefix_cache.tools.replay.outcome import Outcome
from cpu_prefix_cache.tools.replay.report import References

GIB = 2**30
APART = 1.2  # times the tick before: nearer ones would be written over each other
BLOCKS_FOUND, TIME_FOUND = "prefix hit ratio (blocks)", "share of prefill time found"
SAVED = "share of prefill time saved"
CEILING = "min"
INFINITE = "infinite cache"

Points = Sequence[tuple[int, float]]  # capacity in blocks, value


class Panel(NamedTuple):
    """One plot of a figure: lines by their names, those to be dashed, and a height by name that holds everywhere."""

    label: str
    lines: Mapping[str, Points]
    dashed: Mapping[str, Points]
    heights: Mapping[str, float]


def draw_replay(
    path: str, title: str, outcomes: Sequence[Outcome], references: References, block_bytes: int | None
) -> None:
    """Write a plot of a replay to `path`, in the format of its suffix.

    Raises ConfigurationError for a path that cannot be written.
    """

    found = _by_policy(outcomes, lambda each: each.ratios.block_hit_ratio)
    ceiling = [(known.capacity, known.ratios.block_hit_ratio) for known in references.clairvoyant]
    panels = [Panel(BLOCKS_FOUND, found, {CEILING: ceiling}, {INFINITE: references.ideal.block_hit_ratio})]
    saved, time = _by_policy(outcomes, lambda each: each.share_saved), references.ideal.time_hit_ratio
    if saved:
        panels.append(Panel(SAVED, saved, {}, {}))
    elif time is not None:
        found = _by_policy(outcomes, lambda each: each.ratios.time_hit_ratio)
        panels.append(Panel(TIME_FOUND, found, {}, {INFINITE: time}))
    draw(path, title, panels, block_bytes)


def draw(path: str, title: str, panels: Sequence[Panel], block_bytes: int | None) -> None:
    figure = new_figure((8 * len(panels), 5))
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel, block_bytes)
    save(figure, path)


def _draw_panel(axes: Any, panel: Panel, block_bytes: int | None) -> None:
    scale = 1.0 if block_bytes is None else block_bytes / GIB
    for style, lines in (("-", panel.lines), ("--", panel.dashed)):
        for name, points in lines.items():
            capacities, values = [capacity * scale for capacity, _ in points], [value for _, value in points]
            axes.plot(capacities, values, style, color=colour_of(name), marker="o", markersize=4, label=name)
    for name, height in panel.heights.items():
        axes.axhline(height, linestyle="--", color="gray", label=name)
    ticks = _apart({capacity * scale for points in panel.lines.values() for capacity, _ in points})
    axes.set(xscale="log", ylabel=panel.label, xlabel=f"host capacity ({'blocks' if block_bytes is None else 'GiB'})")
    axes.set_xticks(ticks, [_tick(tick) for tick in ticks], rotation=45)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _by_policy(outcomes: Sequence[Outcome], value: Callable[[Outcome], float | None]) -> dict[str, Points]:
    """Values of every policy that has one, MIN left out."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for outcome in sorted(outcomes, key=lambda each: each.capacity):
        found = value(outcome)
        if found is not None and outcome.policy != "min":
            lines.setdefault(outcome.policy, []).append((outcome.capacity, found))
    return dict(lines)


def _apart(capacities: Iterable[float]) -> list[float]:
    """Capacities that can be labelled, powers of two first.

    >>> _apart([128, 160, 166, 168, 176, 192, 256])
    [128, 160, 192, 256]
    """

    def off_a_power(value: float) -> float:
        return abs(math.log2(value) - round(math.log2(value)))

    kept: list[float] = []
    for value in sorted(capacities, key=lambda each: (round(off_a_power(each), 2), each)):
        if all(max(value, each) >= APART * min(value, each) for each in kept):
            kept.append(value)
    return sorted(kept)


def _tick(value: float) -> str:
    """Three digits are enough, and none after the point for a thousand.

    >>> _tick(64.0), _tick(12_000.0), _tick(0.0625), _tick(127.94)
    ('64', '12,000', '0.0625', '128')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
