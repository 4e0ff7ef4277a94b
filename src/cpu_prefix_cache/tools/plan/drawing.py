"""Curves and stacked areas as SVG that needs nothing else. Sizes are evenly apart: each is twice the one before.

value  top  +-----------------+
            |       o---o     |   a curve: a line, and a point with its value at each size
         0  +--+----+---+-----+
             64 GiB  ...          sizes
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 60, 36, 24, 40
STEPS = (0.01, 0.02, 0.05, 0.1, 0.2)  # between two lines of the grid
MOST_LINES = 6


@dataclass(frozen=True, slots=True)
class Line:
    """A curve; one with fewer values than sizes ends early."""

    name: str
    values: Sequence[float]
    colour: str
    dashes: str = "none"


@dataclass(frozen=True, slots=True)
class Frame:
    """Places of sizes and values on the drawing."""

    sizes: Sequence[str]
    step: float
    lines: int

    @classmethod
    def up_to(cls, highest: float, sizes: Sequence[str]) -> "Frame":
        step = next((step for step in STEPS if highest <= step * MOST_LINES), STEPS[-1])
        return cls(sizes, step, max(1, -int(-highest / step // 1)))

    def x(self, at: int) -> float:
        return LEFT + at * (WIDTH - LEFT - RIGHT) / (len(self.sizes) - 1)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / (self.step * self.lines) * (HEIGHT - TOP - BOTTOM)

    def path(self, values: Sequence[float], start: int = 0) -> list[str]:
        return [f"{self.x(start + at):.1f},{self.y(value):.1f}" for at, value in enumerate(values)]

    def grid(self) -> Iterator[str]:
        for line in range(self.lines + 1):
            y = self.y(line * self.step)
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            yield _text(LEFT - 8, y + 4, f"{line * self.step:.0%}", "end")
        for at, size in enumerate(self.sizes):
            yield _text(self.x(at), HEIGHT - BOTTOM + 26, size, "middle")


def curves(lines: Sequence[Line], sizes: Sequence[str], marked: int | None, mark: str) -> str:
    """Lines over sizes; the size with index `marked` has a vertical one, named `mark`."""
    frame = Frame.up_to(max(value for line in lines for value in line.values), sizes)
    parts = list(frame.grid())
    if marked is not None:
        x = frame.x(marked)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#333"/>')
        parts.append(_text(x, TOP - 8, mark, "middle"))
    for line in lines:
        parts.append(
            f'<polyline fill="none" stroke="{line.colour}" stroke-width="2" stroke-dasharray="{line.dashes}" '
            f'points="{" ".join(frame.path(line.values))}"/>'
        )
        for at, value in enumerate(line.values):
            title = escape(f"{line.name}, {sizes[at]}: {value:.1%}")
            parts.append(
                f'<circle cx="{frame.x(at):.1f}" cy="{frame.y(value):.1f}" r="3.5" fill="{line.colour}">'
                f"<title>{title}</title></circle>"
            )
    return _drawing(parts)


def areas(layers: Mapping[str, Sequence[float]], colours: Mapping[str, str], sizes: Sequence[str]) -> str:
    """Layers on each other, the first lowest."""
    frame = Frame.up_to(1.0, sizes)
    heights = list(accumulate(layers.values(), lambda below, more: [a + b for a, b in zip(below, more, strict=True)]))
    floor: Sequence[float] = [0.0] * len(sizes)
    parts = []
    for name, ceiling in zip(layers, heights, strict=True):
        outline = frame.path(ceiling) + frame.path(floor)[::-1]
        title = f"<title>{escape(name)}</title>"
        parts.append(f'<polygon fill="{colours[name]}" points="{" ".join(outline)}">{title}</polygon>')
        floor = ceiling
    return _drawing([*parts, *frame.grid()])


def swatch(colour: str, dashes: str = "none", width: float = 3) -> str:
    line = f'<line x1="0" x2="28" y1="6" y2="6" stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}"/>'
    return f'<svg width="28" height="12">{line}</svg>'


def _drawing(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
