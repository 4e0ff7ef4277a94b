"""Draws the figures that serve.py has written, over host memory or over users.

    python -m benchmarks.vllm.serve_plot PLOT.png FILE.json ... [--over users]

Over host memory a line is an engine of one file, since a file is of one machine. Over users a line is an engine with
one size of host memory, and the points of several files join: of two of the same place the last counts.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cpu_prefix_cache.tools.plots import check_plot_can_be_drawn, new_figure, save

FIGURES = {
    "prompt tokens/s": lambda served: served["prompt_tokens_per_s"],
    "hit": lambda served: served["hit"],
    "first token, ms: median": lambda served: served["first_token_ms"]["p50"],
    "first token, ms: 95 %": lambda served: served["first_token_ms"]["p95"],
    "between tokens, ms: median": lambda served: (served["between_tokens_ms"] or {}).get("p50"),
    "between tokens, ms: 95 %": lambda served: (served["between_tokens_ms"] or {}).get("p95"),
}
TITLES = {"host": "host memory, GiB", "users": "users"}


def points(runs: Iterable[tuple[str, Mapping[str, Any]]], over: str) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Served figures by line, and by host memory or users. `runs` are results of serve.py, with names.

    Convoys and, over users, open loops are left out.
    """
    lines = defaultdict[str, dict[int, Mapping[str, Any]]](dict)
    for file, run in runs:
        for cell in (cell for cell in run.get("cells", ()) if "served" in cell):
            name, _, behind = cell["engine"].partition("@")
            gib, _, rest = behind.partition(" ")
            if over == "host":
                lines[f"{name} {rest}".strip() + f", {file}"][int(gib or 0)] = cell["served"]
            elif (users := run["load"].get("users")) is not None:
                lines[f"{cell['engine']} GiB, {cell['device']}"][users] = cell["served"]
    return dict(lines)


def draw(lines: Mapping[str, Mapping[int, Mapping[str, Any]]], over: str) -> Any:
    figure = new_figure((11, 10))
    panels = list(figure.subplots(3, 2, sharex=True).flat)
    for panel, (title, figure_of) in zip(panels, FIGURES.items(), strict=True):
        for name, served in sorted(lines.items()):
            places = sorted(served)
            panel.plot(places, [figure_of(served[place]) for place in places], marker="o", label=name)
        panel.set_title(title)
        panel.set_xlabel(TITLES[over])
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--over", choices=TITLES, default="host")
    options = parser.parse_args(arguments)
    check_plot_can_be_drawn(options.plot)
    lines = points(((file.stem, json.loads(file.read_text())) for file in options.files), options.over)
    if not lines:
        parser.error(f"these files have nothing to draw over {TITLES[options.over]}")
    save(draw(lines, options.over), options.plot)


if __name__ == "__main__":
    main()
