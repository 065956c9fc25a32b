"""A page of the documents into which a benchmark writes its tables."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """What stands between two marks on a page."""

    begin: str
    end: str

    def write(self, page: Path, tables: str) -> None:
        """Put the tables there, in place of what was.

        Raises:
            ValueError: the page does not have both marks.
        """
        text = page.read_text(encoding="utf-8")
        between = re.compile(re.escape(self.begin) + ".*?" + re.escape(self.end), re.DOTALL)
        if not between.search(text):
            raise ValueError(f"{page} has no marks '{self.begin}' and '{self.end}'")
        page.write_text(between.sub(lambda _: f"{self.begin}\n{tables}\n{self.end}", text), encoding="utf-8")

    def read(self, page: Path) -> str:
        """What stands there; empty where a mark is missing."""
        return page.read_text(encoding="utf-8").partition(self.begin)[2].partition(self.end)[0]
