"""Renders the pages. Each is one self-contained HTML file. Jinja escapes all text that comes from a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from roll.tracking.report.charts import Chart
from roll.tracking.report.records import number_text

PARTS = Path(__file__).parent / "parts"
"""Templates, styles and scripts."""
NAMED_LINES = 6
"""Largest number of lines that a chart's description names."""


@dataclass(frozen=True)
class PageChart:
    """A chart, with the id of the HTML element that it is drawn into."""

    id: str
    chart: Chart

    @property
    def description(self) -> str:
        """Return a description for screen readers: the start and the end of the first lines, and the names of the
        bars.
        """
        lines = [
            trace for trace in self.chart.figure.data if isinstance(trace, go.Scatter) and trace.hoverinfo != "skip"
        ]
        spans = [_span(line) for line in lines[:NAMED_LINES]]
        more = [f"{len(lines) - NAMED_LINES} more lines"] if len(lines) > NAMED_LINES else []
        bars = [str(trace.name) for trace in self.chart.figure.data if isinstance(trace, go.Bar)]
        stacks = [f"bars of {', '.join(bars)}"] if bars else []
        return f"Chart: {self.chart.title}. " + "; ".join([*spans, *more, *stacks])


@dataclass(frozen=True)
class PageSection:
    """Charts under one heading."""

    title: str
    charts: Sequence[PageChart]

    @property
    def id(self) -> str:
        return anchor(self.title)


def render(template: str, page: Mapping[str, Any], sections: Sequence[PageSection], scripts: Sequence[str]) -> str:
    """Return the HTML of a page.

    Args:
        template: name of a template in `parts/`.
        page: variables of the template.
        sections: the charts. Scripts find their figures, and the samples if there are any, as JSON in elements of the
            page.
        scripts: names of scripts in `parts/`.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, loader=FileSystemLoader(PARTS), trim_blocks=True
    )
    environment.filters["anchor"] = anchor
    figures = {
        chart.id: json.loads(chart.chart.figure.to_json() or "") for section in sections for chart in section.charts
    }
    return environment.get_template(template).render(
        **page,
        sections=sections,
        style=_part("page.css"),
        figures=in_script(figures),
        groups=in_script((page.get("samples") or {}).get("groups", [])),
        plotly=get_plotlyjs(),
        scripts=[_part(name) for name in scripts],
    )


def in_script(value: object) -> str:
    """Return the JSON text of a value, with `<` escaped so that no text can end the script element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def anchor(title: str) -> str:
    """Return the id of the heading with this title."""
    return title.lower().replace(" ", "-")


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def _span(line: go.Scatter) -> str:
    x, y = list(line.x or ()), list(line.y or ())
    return f"{line.name}: {number_text(y[0])} at step {x[0]:g}, {number_text(y[-1])} at step {x[-1]:g}"
