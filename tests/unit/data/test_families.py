"""Which renderer a model folder gets, and that the library's tokens are those of the model's own template."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.data.renderers.bridges import TemplateRenderer
from roll.data.renderers.library import FamilyRenderer
from tests.unit.data.formats import FORMATS, make_renderer, make_tokenizer

KNOWN = {"qwen3", "llama3", "deepseek", "glm"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_library_is_used_for_the_families_that_it_knows(name: str, tmp_path: Path) -> None:
    chosen = make_renderer(FORMATS[name], make_tokenizer(FORMATS[name]), tmp_path)
    assert type(chosen) is (FamilyRenderer if name in KNOWN else TemplateRenderer)


def test_a_template_that_the_library_does_not_follow_is_continued_by_what_it_writes(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FORMATS["llama3"])
    tokenizer.chat_template = str(tokenizer.chat_template).replace(
        "Cutting Knowledge Date: December 2023", "Cutting Knowledge Date: May 2026"
    )
    assert type(make_renderer(FORMATS["llama3"], tokenizer, tmp_path)) is TemplateRenderer
