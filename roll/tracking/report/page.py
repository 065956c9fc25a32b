"""Renders the pages. Each is one self-contained HTML file. Jinja escapes all text that comes from a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from roll.tracking.report.charts import Section

PARTS = Path(__file__).parent / "parts"
"""The template, the style sheet and the script."""


@dataclass(frozen=True)
class PageTable:
    """A table with a heading. The first column names the rows."""

    title: str
    columns: Sequence[str]
    """Names of the columns; empty for a table without a head."""
    rows: Sequence[Sequence[str]]
    note: str = ""
    is_numeric: bool = True
    """Whether the columns after the first are numbers."""
    is_folded: bool = False
    """Whether the page shows the rows only on demand."""


@dataclass(frozen=True)
class Page:
    """The contents of a page, from top to bottom."""

    title: str
    subtitle: str
    alerts: Sequence[Sequence[str]] = ()
    """Paragraphs of each alert."""
    tiles: Sequence[Mapping[str, str]] = ()
    """`label`, `value` and `note` of each main result."""
    tables: Sequence[PageTable] = ()
    """Tables before the charts."""
    sections: Sequence[Section] = ()
    sample_counts: Sequence[str] = ()
    """Lines with the number of responses; empty for a page without samples."""
    sample_groups: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """Records for the script, one for each prompt."""
    appendix: Sequence[PageTable] = ()
    """Tables after the charts and the samples."""
    config: str = ""
    refresh_seconds: float | None = None
    """Seconds after which an opened page loads itself again; None if the page is final."""
    remarks: Sequence[str] = ()


def render(page: Page) -> str:
    """Return the HTML of a page. The script finds the figures and the samples as JSON in elements of the page."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, loader=FileSystemLoader(PARTS), trim_blocks=True
    )
    environment.filters["anchor"] = lambda title: title.lower().replace(" ", "-")
    figures = {
        f"chart-{i}-{j}": json.loads(chart.figure.to_json() or "")
        for i, section in enumerate(page.sections)
        for j, chart in enumerate(section.charts)
    }
    return environment.get_template("page.html.jinja").render(
        page=page,
        style=(PARTS / "page.css").read_text(encoding="utf-8"),
        script=(PARTS / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
        figures=_in_script(figures),
        groups=_in_script(page.sample_groups),
    )


def write_page(path: Path, page: Page) -> Path:
    """Write a page atomically and return its path. Raises OSError, with a previous page in place."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(render(page), encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _in_script(value: object) -> str:
    """Return the JSON text of a value, with `<` escaped so that no text can end the script element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
