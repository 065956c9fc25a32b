"""Tables that benchmarks write between two marks of a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.page import Place

PLACE = Place("<!-- here -->", "<!-- there -->")


def test_tables_are_rewritten_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- here -->\nold\n<!-- there -->\nafter\n", encoding="utf-8")
    for tables in ("| one |", "| two\\1 |"):
        PLACE.write(page, tables)
    assert page.read_text(encoding="utf-8") == "before\n<!-- here -->\n| two\\1 |\n<!-- there -->\nafter\n"
    assert PLACE.read(page).strip() == "| two\\1 |"


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="has no marks"):
        PLACE.write(page, "| one |")
    assert page.read_text(encoding="utf-8") == "no marks"
