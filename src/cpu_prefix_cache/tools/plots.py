"""Shared by all plots: the colours of policies, whether a plot can be drawn, a figure, and the file it is written to.

Matplotlib is no dependency. It is imported when a plot is drawn.
"""

import importlib.util
from pathlib import Path
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError

COLOURS = {"lru": "#0072b2", "arc": "#009e73", "adaptive": "#d55e00", "min": "#cc79a7"}
OTHER = "#555555"  # a policy of another package


def colour_of(policy: str) -> str:
    """The same in every picture. `adaptive@N` is `adaptive` here."""
    return COLOURS.get(policy.partition("@")[0], OTHER)


def check_plot_can_be_drawn(path: str) -> None:
    """Raises ConfigurationError without matplotlib, and for a format it lacks: before the work, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib: pip install matplotlib")
    known = new_figure((1, 1)).canvas.get_supported_filetypes()
    if Path(path).suffix.lower().removeprefix(".") not in known:
        raise ConfigurationError(f"a plot's name ends in one of .{', .'.join(known)}; got {path}")


def new_figure(inches: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    return Figure(figsize=inches, layout="constrained")


def save(figure: Any, path: str) -> None:
    """Write the plot in the format of the suffix of `path`. Raises ConfigurationError for a path that cannot be
    written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigurationError(f"the plot cannot be written to {path}: {error.strerror}") from error
