"""The site of the documentation has every page, and links work there as in the repository. `make site` builds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.site.hooks import as_mkdocs_reads, site_files, summary, with_recipes
from tests.unit.docs.pages import ROOT, anchors, links


class SiteLoader(yaml.SafeLoader):
    """Reads `mkdocs.yml`, whose function for anchors is a tag of Python."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def nav_pages(entry: object) -> Iterator[str]:
    """Yield the pages of a part of `nav`."""
    if isinstance(entry, str):
        yield entry
    for below in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from nav_pages(below)


WRITTEN_NAV = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), SiteLoader)["nav"]
NAV = list(nav_pages(with_recipes(WRITTEN_NAV, ROOT)))


def test_nav_lists_every_page_once() -> None:
    assert sorted(NAV) == sorted(path for path in site_files(ROOT) if Path(path).suffix == ".md")
    assert {file.name for file in (ROOT / "docs").glob("*.md")} <= {Path(page).name for page in NAV}


@pytest.mark.parametrize("page", NAV)
def test_links_of_a_page_stay_on_the_site(page: str) -> None:
    there = set(site_files(ROOT))
    for target in links(page):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        name = ((ROOT / page).parent / path).resolve().relative_to(ROOT).as_posix() if path else page
        assert name in there, target
        assert not anchor or anchor in anchors(name), target


def test_pages_of_recipes_follow_their_index(tmp_path: Path) -> None:
    (tmp_path / "docs" / "recipes").mkdir(parents=True)
    for name in ("b.md", "a.md", "a.svg"):
        (tmp_path / "docs" / "recipes" / name).touch()
    added = [page for page in nav_pages(with_recipes(WRITTEN_NAV, tmp_path)) if page.startswith("docs/recipes")]
    assert added == ["docs/recipes.md", "docs/recipes/a.md", "docs/recipes/b.md"]


def test_a_page_is_rewritten_for_mkdocs() -> None:
    page = "- a\n  - b\n\n<!-- made -->\n| c |\n```python file=x.py\n  - d\n```\n"
    assert as_mkdocs_reads(page) == "- a\n    - b\n\n| c |\n```python\n  - d\n```\n"


def test_a_summary_is_the_first_paragraph() -> None:
    assert summary("# Title\n\n![picture](a.svg)\n\n```text\nno\n```\n\nOne\ntwo.\n\nThree.") == ("Title", "One two.")
