"""Parses the project's Markdown pages: fenced blocks, code spans, links and tables."""

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
    "SECURITY.md",
    "docs/ARCHITECTURE.md",
    "docs/agents.md",
    "docs/algorithms.md",
    "docs/clusters.md",
    "docs/deepspeed.md",
    "docs/environments.md",
    "docs/extending.md",
    "docs/moving/from_openrlhf.md",
    "docs/moving/from_roll.md",
    "docs/moving/from_trl.md",
    "docs/moving/from_verl.md",
    "docs/post_training.md",
    "docs/quickstart.md",
    "docs/recipes.md",
    "docs/rewards.md",
    "docs/running.md",
)
"""Pages written by hand. `docs/configuration.md` is generated."""
PAGES = (*WRITTEN, "docs/configuration.md")
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    info: str
    """Info string after the opening fence, such as `bash` or `python file=my_rewards.py`."""
    text: str

    def option(self, name: str) -> str | None:
        """Return the value of `name=value` in the info string; None without it."""
        return dict(word.split("=", 1) for word in self.info.split() if "=" in word).get(name)


def read(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [Block(page, found["info"].strip(), found["text"]) for found in FENCE.finditer(read(page))]


def prose(page: str) -> str:
    """Return the text of a page without its fenced blocks."""
    return FENCE.sub("", read(page))


def spans(page: str) -> list[str]:
    """Return the inline code of a page."""
    return SPAN.findall(prose(page))


def links(page: str) -> list[str]:
    """Return the targets of a page's links."""
    return LINK.findall(prose(page))


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as written after `#` in a link."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def first_column(page: str, heading: str) -> list[str]:
    """Return the inline code in the first column of every table whose first heading is `heading`."""
    found: list[str] = []
    head = ""
    for line in prose(page).splitlines():
        first = line.strip().strip("|").split("|")[0].strip()
        if not line.startswith("|"):
            head = ""
        elif not head:
            head = first or " "
        elif head == heading:
            found += SPAN.findall(first)
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a block, without the file that gets its output. A backslash at the end of a
    line joins it with the next line.
    """
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words[: words.index(">")] if ">" in words else words
