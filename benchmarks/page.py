"""Writes a benchmark's tables into a page of the documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """The text between two marks of a page."""

    begin: str
    end: str

    def write(self, page: Path, tables: str) -> None:
        """Replace the text with the tables.

        Raises:
            ValueError: the page does not have both marks.
        """
        text = page.read_text(encoding="utf-8")
        between = re.compile(re.escape(self.begin) + ".*?" + re.escape(self.end), re.DOTALL)
        if not between.search(text):
            raise ValueError(f"{page} has no marks '{self.begin}' and '{self.end}'")
        page.write_text(between.sub(lambda _: f"{self.begin}\n{tables}\n{self.end}", text), encoding="utf-8")

    def read(self, page: Path) -> str:
        """Return the text between the marks. Empty if a mark is missing."""
        return page.read_text(encoding="utf-8").partition(self.begin)[2].partition(self.end)[0]
