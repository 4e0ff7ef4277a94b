"""A plot of hit ratios over capacities: a line for each policy, and dashed lines for the infinite cache and MIN."""

from collections.abc import Sequence
from typing import Any

from cpu_prefix_cache.plots import new_figure, save
from cpu_prefix_cache.replay.outcome import Outcome, Ratios


def draw(path: str, title: str, ideal: Ratios, outcomes: Sequence[Outcome], clairvoyant: Sequence[Outcome]) -> None:
    """Write a plot to `path`, in the format of its suffix.

    Raises ConfigurationError for a path that cannot be written.
    """
    figure = new_figure((8, 5))
    axes = figure.add_subplot()
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        _line(axes, [outcome for outcome in outcomes if outcome.policy == policy], policy, "-")
    _line(axes, clairvoyant, "MIN with bypass (a ceiling)", "--")
    axes.axhline(ideal.block_hit_ratio, linestyle="--", color="gray", label="infinite cache")
    axes.set(xscale="log", xlabel="host capacity (blocks)", ylabel="prefix hit ratio (blocks)", title=title)
    capacities = sorted({outcome.capacity for outcome in clairvoyant})
    axes.set_xticks(capacities, [f"{capacity:,}" for capacity in capacities], rotation=45)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def _line(axes: Any, outcomes: Sequence[Outcome], label: str, style: str) -> None:
    points = sorted((outcome.capacity, outcome.ratios.block_hit_ratio) for outcome in outcomes)
    capacities, ratios = [capacity for capacity, _ in points], [ratio for _, ratio in points]
    axes.plot(capacities, ratios, style, marker="o", markersize=4, label=label)
