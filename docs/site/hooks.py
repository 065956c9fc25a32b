"""Hooks of MkDocs: the repository's Markdown files become the site, unchanged and at their own paths, so that each link
between them, and to an example, works on the site as it does in the repository. MkDocs alone needs all pages in one
folder, and reads some Markdown in another way than forges do.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BESIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "Dockerfile")
"""Files of the site outside `docs/` and `examples/`."""
KINDS = {".md", ".svg", ".yaml", ".yml", ".py", ".ipynb", ".sh", ".slurm", ".jsonl", ".tsv", ".csv"}
RECIPES = "Recipes"
"""Title of the section of the recipes."""
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)


def site_files(root: Path) -> list[str]:
    """Return the paths of the site's files, relative to the repository."""
    below = [file for folder in ("docs", "examples") for file in sorted((root / folder).rglob("*")) if file.is_file()]
    kept = [file.relative_to(root) for file in below if file.suffix in KINDS and file.parent != root / "docs" / "site"]
    return [*BESIDE, *(file.as_posix() for file in kept)]


def as_mkdocs_reads(text: str) -> str:
    """Return a page as Python-Markdown reads it: comments and what follows a fence's language left out, and four spaces
    for each level of a list.
    """
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [_prose(text[end : fence.start()]), re.sub(r"^(```\w*)[^\n]*", r"\1", fence[0])]
        end = fence.end()
    return "".join([*parts, _prose(text[end:])])


def _prose(text: str) -> str:
    without = re.sub(r"^<!--.*?-->\n", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {2,}", lambda indent: "    " * (len(indent[0]) // 2), without, flags=re.MULTILINE)


def summary(text: str) -> tuple[str, str]:
    """Return the title of a page and its first paragraph, in one line."""
    title, _, rest = text.partition("\n")
    paragraph = re.search(r"^(?:\w|`\w).*?(?=\n\n|\Z)", FENCE.sub("", rest), re.MULTILINE | re.DOTALL)
    return title.removeprefix("# ").strip(), " ".join(paragraph[0].split()) if paragraph else ""


def with_recipes(nav: list[dict[str, Any]], root: Path) -> list[dict[str, Any]]:
    """Return `nav` with the pages of `docs/recipes/` behind their index, in the order of their names."""
    pages = [file.relative_to(root).as_posix() for file in sorted((root / "docs" / "recipes").glob("*.md"))]
    return [{title: [*below, *pages] if title == RECIPES else below for title, below in entry.items()} for entry in nav]


def on_config(config: Any) -> Any:
    """Add the pages of recipes to `nav`."""
    config.nav = with_recipes(config.nav, ROOT)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Replace the files of the folder by those of the repository; the theme's files stay."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in site_files(ROOT):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page for Python-Markdown. The search lists the page of all keys first, the changelog last."""
    boost = {"docs/configuration.md": 4.0, "CHANGELOG.md": 0.5}.get(page.file.src_uri)
    if boost:
        page.meta["search"] = {"boost": boost}
    return as_mkdocs_reads(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Return the page with its formulas as MathML, which needs no script."""
    from latex2mathml.converter import convert  # pyright: ignore[reportMissingImports]

    return FORMULA.sub(
        lambda found: convert(unescape(found["tex"]), display="inline" if found["tag"] == "span" else "block"), html
    )


def on_post_build(config: Any) -> None:
    """Write `llms.txt`, a list of the pages for language models, `llms-full.txt` with their text, and each source."""
    site, lines, whole = Path(config.site_dir), [f"# {config.site_name}", "", f"> {config.site_description}"], []
    for entry in config.nav:
        [(title, pages)] = entry.items()
        lines += ["", f"## {title}", ""]
        for page in [pages] if isinstance(pages, str) else pages:
            text = (ROOT / page).read_text(encoding="utf-8")
            (site / page).write_text(text, encoding="utf-8")
            name, sentence = summary(text)
            lines.append(f"- [{name}]({page}): {sentence}")
            whole.append(f"<!-- {page} -->\n\n{text}")
    (site / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    (site / "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")
