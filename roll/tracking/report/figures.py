"""Plotly figures of the pages. They set no colours for text and grid, because these follow the light or dark theme of
the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from roll.tracking.report.curves import BUCKETS, SMOOTHED_POINTS, extremes, half_width, short, smoothed, spread_indices

# Mid-tones, legible on white and on near-black.
PALETTE = ("#4f83e0", "#e8833a", "#2fa37c", "#9467d6", "#d9534f", "#3aa9c4", "#b8901c", "#c2629b")
DASHES = ("solid", "dash", "dot", "dashdot")
"""Dash styles of lines. After all colours are used, they repeat with the next dash style."""
VERTICAL = {"automargin": True, "zeroline": False, "nticks": 6, "exponentformat": "e"}
"""Settings of all vertical axes."""
FAINT = 0.38
"""Opacity of the unsmoothed values behind a smoothed curve."""
EXACT = ("policy/lr", "critic/lr", "staleness/min", "staleness/max", "epoch")
"""Metrics without noise. They are not smoothed, because the mean would show values that they never had."""
SHORTEST_LINE = 3
"""Smallest number of points that is drawn as a line without markers."""


@dataclass(frozen=True)
class Style:
    """Style of a curve."""

    label: str
    number: int
    """Index of the line in its figure, from 0. It determines colour and dash style, and is stored as `meta` of the
    traces.
    """
    markers: bool = False
    """Whether points are drawn with markers and are not smoothed, for sparse measurements."""
    buckets: int = BUCKETS
    """Number of buckets of the unsmoothed values."""
    points: int = SMOOTHED_POINTS
    """Largest number of points of the smoothed curve."""

    @property
    def colour(self) -> str:
        return PALETTE[self.number % len(PALETTE)]

    @property
    def dash(self) -> str:
        return DASHES[self.number // len(PALETTE) % len(DASHES)]


def add_curve(figure: go.Figure, name: str, steps: Sequence[int], values: Sequence[float], style: Style) -> None:
    """Add the curve of the metric `name` to a figure. A long series becomes a smoothed curve in front of its faint
    unsmoothed values.
    """
    half = 0 if style.markers or name in EXACT or min(values) == max(values) else half_width(len(values))
    raw = extremes(values, style.buckets)
    raw_x, raw_y = [steps[index] for index in raw], [short(values[index]) for index in raw]
    line = {"color": style.colour, "width": 2, "dash": style.dash}
    if not half:
        mode = "lines+markers" if style.markers or len(raw) < SHORTEST_LINE else "lines"
        figure.add_scatter(
            x=raw_x, y=raw_y, name=style.label, meta=style.number, mode=mode, line=line, marker={"size": 6}
        )
        return
    both = {"mode": "lines", "legendgroup": style.label, "meta": style.number}
    faint = {"opacity": FAINT, "line": {"color": style.colour, "width": 1}, "hoverinfo": "skip", "showlegend": False}
    figure.add_scatter(x=raw_x, y=raw_y, name=f"{style.label}, raw", **both, **faint)
    at = spread_indices(len(values), style.points)
    means = [short(value) for value in smoothed(values, at, half)]
    x = [steps[index] for index in at]
    figure.add_scatter(x=x, y=means, name=style.label, line=line, **both)


def blank(height: int = 240) -> go.Figure:
    """Return an empty figure whose horizontal axis is the step. `height` is in pixels."""
    figure = go.Figure()
    figure.update_layout(
        template={},
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={
            "automargin": True,
            "showgrid": False,
            "zeroline": False,
            "title": {"text": "step", "standoff": 6, "font": {"size": 12}},
        },
        yaxis=VERTICAL,
    )
    return figure
