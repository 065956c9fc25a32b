"""Draws the curves of a recipe as an SVG that suits light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

from benchmarks.recipe_runs import Value

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 40, 66
"""Margins of the plot in pixels: axes, and the names of the lines above."""
COLOURS = ("#16a34a", "#2563eb", "#d97706", "#9333ea")
TICKS = 6
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #4b5563 } .grid { stroke: #d1d5db }
@media (prefers-color-scheme: dark) { text { fill: #9ca3af } .grid { stroke: #374151 } }
"""

Curve = Sequence[tuple[int, Value]]


@dataclass(frozen=True)
class Plot:
    """Converts steps and values to pixels."""

    last_step: int
    top: float
    """Value at the upper edge; the lower edge is 0."""

    def x(self, step: float) -> float:
        """Return the distance of a step from the left edge, in pixels."""
        return round(LEFT + step / max(self.last_step, 1) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Return the distance of a value from the upper edge, in pixels."""
        inside = min(max(value, 0.0), self.top)
        return round(HEIGHT - BOTTOM - inside / self.top * (HEIGHT - TOP - BOTTOM), 1)

    def path(self, points: Sequence[tuple[int, float]]) -> str:
        """Return the SVG path of a line through the points (step, value)."""
        return "M" + " L".join(f"{self.x(step)} {self.y(value)}" for step, value in points)


def picture(title: str, curves: Mapping[str, Curve], seconds: Mapping[int, float], shares: bool) -> str:
    """Return an SVG with a line and the interval of each curve.

    Args:
        curves: by name; steps with values of at least 0, and their intervals.
        seconds: seconds of training after each step, written below the steps.
        shares: whether the values are shares, written as percentages.
    """
    highest = max(value.value if value.high is None else value.high for curve in curves.values() for _, value in curve)
    unit = _unit(min(highest, 1.0) if shares else highest)
    plot = Plot(max(step for curve in curves.values() for step, _ in curve), unit * max(1, ceil(highest / unit - 1e-9)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>',
        f"<title>{escape(title)}</title>",
        *_axes(plot, unit, seconds, shares),
    ]
    for number, (name, curve) in enumerate(curves.items()):
        parts += _line(plot, curve, COLOURS[number % len(COLOURS)])
        at = LEFT + number * (WIDTH - LEFT - RIGHT) / len(curves)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<text x="{at:.0f}" y="22" style="fill: {colour}; font-weight: 600">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _unit(highest: float) -> float:
    """Return the distance between grid lines: 1, 2 or 5 times a power of ten, for at most `TICKS` lines."""
    if highest <= 0.0:
        return 0.1
    power = 10.0 ** floor(log10(highest / TICKS))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * TICKS >= highest)


def _axes(plot: Plot, unit: float, seconds: Mapping[int, float], shares: bool) -> list[str]:
    parts = list[str]()
    for number in range(round(plot.top / unit) + 1):
        y, value = plot.y(number * unit), number * unit
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        said = f"{value:.3g}" if not shares else f"{value * 100:.3g}%"
        parts.append(f'<text x="{LEFT - 10}" y="{y + 4}" text-anchor="end">{said}</text>')
    every = max(1, ceil(len(seconds) / 9))
    for step in sorted(seconds)[::every]:
        for line, said in ((20, str(step)), (38, f"{seconds[step]:.0f} s")):
            parts.append(
                f'<text x="{plot.x(step)}" y="{HEIGHT - BOTTOM + line}" text-anchor="middle">{said}</text>',
            )
    middle = plot.x(plot.last_step / 2)
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">step, and seconds of training</text>')
    return parts


def _line(plot: Plot, curve: Curve, colour: str) -> list[str]:
    low = [(step, one.value if one.low is None else one.low) for step, one in curve]
    high = [(step, one.value if one.high is None else one.high) for step, one in curve]
    band = plot.path([*low, *reversed(high)])
    line = plot.path([(step, one.value) for step, one in curve])
    dots = [f'<circle cx="{plot.x(step)}" cy="{plot.y(one.value)}" r="3" fill="{colour}"/>' for step, one in curve]
    return [
        f'<path d="{band} Z" fill="{colour}" fill-opacity="0.18"/>',
        f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>',
        *dots,
    ]
