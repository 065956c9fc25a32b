"""docs/configuration.md is up to date and describes every key."""

from __future__ import annotations

from roll.config.docs import reference_page
from roll.config.schema.fields import walk
from roll.config.schema.pipelines import PIPELINES
from roll.config.shipped import PACKAGE


def test_the_page_in_docs_is_current() -> None:
    page = PACKAGE.parent / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference_page(), "run: python -m roll.config.docs docs/configuration.md"


def test_every_key_has_description_and_documentation() -> None:
    page = reference_page()
    for root in PIPELINES.values():
        for key in walk(root):
            assert key.field.description, key.path
            assert f"`{key.path[-1]}`" in page
