"""Formats a comparison for the terminal: plain text that fits its width."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roll.tracking.compare.comparison import PIPELINE, Cell, Comparison, is_median
from roll.tracking.console import duration
from roll.tracking.report.records import number_text

WIDEST_CELL = 20
"""Largest number of characters of a value in one line. Longer values are wrapped."""
GAP = 2
"""Number of blanks between columns."""


def comparison_text(comparison: Comparison, width: int) -> str:
    """Return tables that are at most `width` characters wide: the numbered runs, the main metrics, and the keys that
    differ.
    """
    parts: list[Table | str] = [
        _runs(comparison),
        *_by_run("result", list(_results(comparison)), comparison, width),
        _legend(comparison),
    ]
    if comparison.keys:
        parts += _by_run("differs", list(comparison.keys.items()), comparison, width)
    every = len(comparison.keys) + comparison.same_keys
    which = "common configuration keys" if PIPELINE in comparison.keys else "configuration keys"
    parts.append(f"{len(comparison.keys)} of {every} {which} differ")
    file = StringIO()
    console = Console(file=file, width=width, color_system=None)
    for part in parts:
        console.print(part, highlight=False, markup=False)
        console.print()
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())


def _runs(comparison: Comparison) -> Table:
    table = _table("run", "steps", "time", "ended")
    table.columns[0].justify = "left"
    for place, (run, label) in enumerate(zip(comparison.runs, comparison.labels, strict=True), 1):
        ended = run.end.outcome if run.end else "not yet"
        table.add_row(Text(f"{place}  {label}"), f"{run.last_step:,}", duration(run.seconds), ended)
    return table


def _legend(comparison: Comparison) -> str:
    """Return what the mark means, and which results have none because they are not comparable."""
    unmarked = [
        f"{row.name} is not comparable because {row.obstacle} differs" for row in comparison.results if row.obstacle
    ]
    return "; ".join(["* marks the best value of all runs", *unmarked])


def _results(comparison: Comparison) -> Iterator[tuple[str, Sequence[str]]]:
    for row in comparison.results:
        if is_median(row.name):
            yield (
                f"{row.name}, median",
                ["" if cell is None else number_text(cell.value) + "*" * cell.is_best for cell in row.cells],
            )
        else:
            yield f"{row.name}, last", ["" if cell is None else number_text(cell.value) for cell in row.cells]
            yield f"{row.name}, best (step)", [_best(cell) for cell in row.cells]


def _best(cell: Cell | None) -> str:
    if cell is None or cell.best is None:
        return ""
    return f"{number_text(cell.best)}{'*' * cell.is_best} ({cell.best_step})"


def _by_run(title: str, rows: Sequence[tuple[str, Sequence[str]]], comparison: Comparison, width: int) -> list[Table]:
    """Return a table with a column for each run, split into several tables if the width requires it."""
    count = len(comparison.runs)
    column = min(max(len(cell) for _, cells in rows for cell in cells), WIDEST_CELL) + GAP
    unbroken = max(len(piece) for name, _ in rows for piece in _pieces(name))
    narrowest = min(unbroken, width - column)
    at_a_time = min(count, max(1, (width - narrowest) // column))
    first = min(max(len(name) for name, _ in rows), width - at_a_time * column)
    tables = []
    for start in range(0, count, at_a_time):
        numbers = range(start, min(start + at_a_time, count))
        table = _table(title, *(str(place + 1) for place in numbers))
        for name, cells in rows:
            table.add_row(Text(wrapped(name, first)), *(Text(wrapped(cells[place], WIDEST_CELL)) for place in numbers))
        tables.append(table)
    return tables


def wrapped(text: str, width: int) -> str:
    """Return the text in lines of at most `width` characters, wrapped after dots, slashes and blanks.

    A word longer than a line is wrapped after underscores. A part that is still longer is cut at the width.
    """
    lines = [""]
    for word in _pieces(text):
        words = [word] if len(word) <= width else re.split(r"(?<=_)", word)
        for piece in (part[start : start + width] for part in words for start in range(0, len(part), width)):
            if len((lines[-1] + piece).rstrip()) <= width:
                lines[-1] += piece
            else:
                lines.append(piece)
    return "\n".join(line.rstrip(" ") for line in lines)


def _pieces(text: str) -> list[str]:
    """Return the parts of a text between which it may be wrapped."""
    return re.split(r"(?<=[./ ])", text)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold", max_width=WIDEST_CELL)
    return table
