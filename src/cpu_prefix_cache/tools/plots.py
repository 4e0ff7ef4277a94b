"""Shared by all plots: whether they can be drawn, a figure to draw on, and the file it is written to.

Matplotlib is no dependency. It is imported when a plot is drawn.
"""

import importlib.util
from pathlib import Path
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError


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
