"""The plan as one HTML file that needs no other: sentences, curves, areas, tables, what was assumed.

A policy has the same colour on every page: coded it is dashed, above a tier dotted.
"""

from collections.abc import Iterator, Sequence
from html import escape

from cpu_prefix_cache.tools.plan.curves import CODED, TIER, shares_of
from cpu_prefix_cache.tools.plan.drawing import Line, areas, curves, swatch
from cpu_prefix_cache.tools.plan.plan import Plan, size_name
from cpu_prefix_cache.tools.plan.sentences import sentences
from cpu_prefix_cache.tools.plan.table import marks, notes, origins, savings
from cpu_prefix_cache.tools.plots import colour_of

DASHES = {CODED: "8 4", TIER: "2 4"}
ORIGINS = {"device": "#4c4c4c", "host": "#0072b2", "tier": "#56b4e9", "computed": "#e69f00"}
STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 940px; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
svg text { font: 12px sans-serif; fill: #333 }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px }
td, th { padding: 2px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid #ddd }
td:first-child, th:first-child, td.mark { text-align: left }
td.mark { min-width: 9em; white-space: normal }
tr.marked { background: #fff3c4 }
.key { margin-right: 1.5em; white-space: nowrap }
.small { font-size: 13px; color: #555; overflow-wrap: anywhere }
@media (max-width: 600px) { svg text { font-size: 20px } body { margin-top: 1em } h1 { font-size: 1.5em } }
"""


def page(plan: Plan, title: str, described: Sequence[str]) -> str:
    """The whole file. It is also XML, so that a parser can check it."""
    return "".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
            f"<title>Host memory for {escape(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>Host memory for {escape(title)}</h1>",
            *(f"<p>{escape(sentence)}</p>" for sentence in sentences(plan)),
            f"<h2>Prefill time that the host saves</h2>{_curves(plan)}",
            _table(savings(plan), marks(plan)),
            f'<p class="small">GPUs and money are those with {escape(plan.preferred.name)}. ',
            f"{escape(' '.join(notes(plan)))}</p>",
            f"<h2>Where tokens came from, with {escape(plan.deepest.name)}</h2>{_areas(plan)}",
            _table(origins(plan), []),
            '<h2>What this is based on</h2><p class="small">',
            "<br/>".join(escape(line) for text in described for line in text.splitlines()),
            "</p></body></html>\n",
        ]
    )


def _curves(plan: Plan) -> str:
    lines = [
        Line(curve.name, curve.shares, colour_of(curve.policy), DASHES.get(curve.variant, "none"))
        for curve in plan.curves
    ]
    keys = [f'<span class="key">{swatch(line.colour, line.dashes)} {escape(line.name)}</span>' for line in lines]
    sizes = [size_name(size) for size in plan.sizes]
    return f"<p>{' '.join(keys)}</p>{curves(lines, sizes, plan.knee, 'the knee')}"


def _areas(plan: Plan) -> str:
    found = plan.origins()
    shares = [*map(shares_of, found.values())]
    layers = {name: [each[name] for each in shares] for name in ORIGINS}
    keys = [f'<span class="key">{swatch(colour, width=12)} {name}</span>' for name, colour in ORIGINS.items()]
    return f"<p>{' '.join(keys)}</p>{areas(layers, ORIGINS, list(found))}"


def _table(rows: Sequence[Sequence[str]], marked: Sequence[str]) -> str:
    return f'<div class="wide"><table>{"".join(_rows(rows, marked))}</table></div>'


def _rows(rows: Sequence[Sequence[str]], marked: Sequence[str]) -> Iterator[str]:
    for at, row in enumerate(rows):
        cell = "td" if at else "th"
        cells = "".join(f"<{cell}>{escape(text)}</{cell}>" for text in row)
        mark = f'<td class="mark">{escape(marked[at])}</td>' if marked else ""
        row_class = ' class="marked"' if marked and marked[at] else ""
        yield f"<tr{row_class}>{cells}{mark}</tr>"
