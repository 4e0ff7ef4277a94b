"""Rates of copies by method and fragment size, as a text table and as a plot."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from cpu_prefix_cache.tools.plots import check_plot_can_be_drawn, new_figure, save

LIMIT = "one large copy"
BAR = 20  # characters of a full one
DIRECTIONS = ("store", "load")


class Rate(NamedTuple):
    """The rate of copies with fragments of `fragment_bytes`. GB/s are 1e9 bytes a second."""

    method: str
    fragment_bytes: int
    direction: str
    gb_per_s: float


def table(rates: Sequence[Rate], limits: dict[str, float]) -> str:
    """Each rate with its share of the limit of its direction, as a number and as a bar.

    >>> print(table([Rate("staged", 4096, "store", 50.0)], {"store": 100.0}))
    fragment   method   direction    GB/s  share of one large copy
         4 KiB staged   store        50.0   50.0% ##########
    """
    lines = [f"fragment   method   direction    GB/s  share of {LIMIT}"]
    for method, fragment_bytes, direction, rate in rates:
        share = rate / limits[direction]
        size, bar = f"{fragment_bytes // 1024:>6} KiB", "#" * round(share * BAR)
        lines.append(f"{size} {method:<8} {direction:<9} {rate:>7.1f} {share:>7.1%} {bar}".rstrip())
    return "\n".join(lines)


def as_json(device: str, limits: dict[str, float], tflops: float, rates: Sequence[Rate]) -> dict[str, Any]:
    """`replay --host-rate` reads `load_gb_per_s`, and `--tflops` reads `matmul_tflops`."""
    return {
        "device": device,
        "load_gb_per_s": limits["load"],
        "store_gb_per_s": limits["store"],
        "matmul_tflops": tflops,
        "rates": [rate._asdict() for rate in rates],
    }


def draw(path: str, title: str, rates: Sequence[Rate], limits: dict[str, float]) -> None:
    """Write a plot of GB/s over fragment size, and the limits, to `path`, in the format of its suffix.

    Raises ConfigurationError without matplotlib, for a format it lacks, and for a path that cannot be written.
    """
    check_plot_can_be_drawn(path)
    figure = new_figure((9, 4))
    figure.suptitle(title)
    both: Any = figure.subplots(1, 2, sharey=True)
    for axes, direction in zip(both, DIRECTIONS, strict=True):
        _draw_direction(axes, direction, [rate for rate in rates if rate.direction == direction], limits[direction])
    both[0].set_ylabel("GB/s")
    both[0].legend()
    save(figure, path)


def _draw_direction(axes: Any, direction: str, rates: Sequence[Rate], limit: float) -> None:
    for method in dict.fromkeys(rate.method for rate in rates):
        points = sorted((rate.fragment_bytes / 1024, rate.gb_per_s) for rate in rates if rate.method == method)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=method)
    axes.axhline(limit, linestyle="--", color="gray", label=LIMIT)
    sizes = sorted({rate.fragment_bytes // 1024 for rate in rates})
    axes.set(xscale="log", xlabel="fragment (KiB)", title=direction)
    axes.set_xticks(sizes, [str(size) for size in sizes], rotation=60)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
