"""Checks of instructions about paragraphs, sections, lists and markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

DIVIDER = re.compile(r"\s?(?:\*\*\*|\* \* \*)\s?")
"""Divider between paragraphs: `***` in IFEval, `* * *` in the RLVR-IFeval data set."""
THREE_STARS = re.compile(r"\s?\*\*\*\s?")
PLACEHOLDER = re.compile(r"\[.*?\]")
STARRED, DASHED = re.compile(r"^\s*\*[^\*].*$", re.MULTILINE), re.compile(r"^\s*-.*$", re.MULTILINE)
TITLE = re.compile(r"<<[^\n]+>>")
HIGHLIGHT, DOUBLE = re.compile(r"\*[^\n\*]*\*"), re.compile(r"\*\*[^\n\*]*\*\*")
FIRST_WORD = re.compile(r"""'*"*([^.,?!'"]*)""")
POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
"""Patterns of the usual markers, which may contain spaces."""
SIX_STARS = "******"


def verify_paragraph_count(text: str, N: int, *, divider: re.Pattern[str] = DIVIDER) -> bool:
    """Return whether dividers separate N paragraphs. Only the text before the first and after the last divider may be
    empty.
    """
    parts = [part.strip() for part in divider.split(text)]
    if not all(parts[1:-1]):
        return False
    return len(parts) - (not parts[0]) - (len(parts) > 1 and not parts[-1]) == N


def validate_paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    """Return whether empty lines separate N paragraphs, and paragraph number i (from 1) begins with `first_word`."""
    paragraphs = text.split("\n\n")
    count = sum(1 for paragraph in paragraphs if paragraph.strip())
    if not 1 <= i <= count or not (paragraph := paragraphs[i - 1].strip()):
        return False
    found = FIRST_WORD.match(paragraph.split()[0])
    return count == N and found is not None and found[1].lower() == first_word.strip().lower()


def verify_postscript(text: str, postscript_marker: str) -> bool:
    """Return whether the marker of a postscript occurs, ignoring case."""
    marker = postscript_marker.strip()
    return re.search(POSTSCRIPTS.get(marker, re.escape(marker.lower())), text.lower()) is not None


def validate_placeholders(text: str, N: int) -> bool:
    """Return whether there are at least N placeholders in square brackets."""
    return len(PLACEHOLDER.findall(text)) >= N


def verify_bullet_points(text: str, N: int) -> bool:
    """Return whether exactly N lines begin with `-` or a single `*`."""
    return len(STARRED.findall(text)) + len(DASHED.findall(text)) == N


def validate_title(text: str) -> bool:
    """Return whether there is a non-empty title in double angle brackets."""
    return any(title.lstrip("<").rstrip(">").strip() for title in TITLE.findall(text))


def validate_choice(text: str, options: Sequence[str]) -> bool:
    """Return whether one of the options occurs, not within a word: `no` does not occur in `nothing`."""
    return any(re.search(rf"(?<!\w){re.escape(option)}(?!\w)", text) for option in options if option)


def validate_highlighted_sections(text: str, N: int) -> bool:
    """Return whether there are at least N non-empty parts between single or double asterisks.

    Both kinds are counted separately, as in IFEval, so a part can count twice, such as `a` in `***a***`.
    """
    single = sum(1 for part in HIGHLIGHT.findall(text) if part.strip("*").strip())
    return single + sum(1 for part in DOUBLE.findall(text) if part.removeprefix("**").removesuffix("**").strip()) >= N


def validate_sections(text: str, N: int, section_splitter: str) -> bool:
    """Return whether there are at least N sections that begin with the splitter and a number."""
    return len(re.findall(rf"\s?{re.escape(section_splitter.strip())}\s?\d+\s?", text)) >= N


def validate_two_responses(text: str) -> bool:
    """Return whether there are two different responses, separated by six asterisks."""
    parts = [part.strip() for part in text.split(SIX_STARS)]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]
