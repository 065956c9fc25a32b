"""The project's documents, taken apart: fenced blocks, code spans, links, tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WRITTEN = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/ARCHITECTURE.md",
    "docs/agents.md",
    "docs/algorithms.md",
    "docs/clusters.md",
    "docs/deepspeed.md",
    "docs/environments.md",
    "docs/extending.md",
    "docs/post_training.md",
    "docs/quickstart.md",
    "docs/rewards.md",
    "docs/running.md",
)
"""Pages that people write. `docs/configuration.md` is generated."""
PAGES = (*WRITTEN, "docs/configuration.md")
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    info: str
    """What stands behind the opening fence: `bash`, `python file=my_rewards.py`."""
    text: str

    def option(self, name: str) -> str | None:
        """The value of `name=value` in the info string."""
        return dict(word.split("=", 1) for word in self.info.split() if "=" in word).get(name)


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Fenced blocks, in order."""
    return [Block(page, found["info"].strip(), found["text"]) for found in FENCE.finditer(read(page))]


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", read(page))


def spans(page: str) -> list[str]:
    """Inline code."""
    return SPAN.findall(prose(page))


def links(page: str) -> list[str]:
    """Targets of links."""
    return LINK.findall(prose(page))


def anchors(page: str) -> set[str]:
    """Names of a page's headings, as they stand behind `#` in a link."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def first_column(page: str, heading: str) -> list[str]:
    """Inline code in the first column of every table whose first heading is `heading`."""
    found: list[str] = []
    inside = False
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == heading:
            inside = True
        elif inside:
            found += SPAN.findall(cells[0])
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block; a backslash joins lines."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words
