"""Rewrites the imports of roll in own code, such as rewards and environments, to the rooms and names of this version.

    python benchmarks/follow_names.py FOLDER

Modules follow `rooms.tsv` and then `merged.tsv`; classes and functions that have another name or module follow
`names.tsv` and keep their old name in the file, as in `from roll.data.examples import LengthLimits as Limits`. A module
or a name that moved more than once is followed to its last place.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path

from move_rooms import HERE, rewritten, tracked


def main() -> int:
    """Rewrite every file of the folder, and print those that changed. Return 0."""
    folder = Path(sys.argv[1]).resolve()
    rooms, merged, names = (table(HERE / name) for name in ("rooms.tsv", "merged.tsv", "names.tsv"))
    for path in tracked(folder):
        text = path.read_text(encoding="utf-8")
        is_python = path.suffix == ".py"
        new = moved(text, rooms, is_python)
        before = None
        while new != before:
            before = new
            new = renamed_imports(new, names) if is_python else new
            new = moved(new, merged, is_python)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(path)
    return 0


def table(path: Path) -> dict[str, str]:
    """Return the new name of each old name of a table."""
    return dict(line.split("\t")[:2] for line in path.read_text(encoding="utf-8").splitlines())


def moved(text: str, moves: Mapping[str, str], is_python: bool) -> str:
    """Return a text with the new names of modules."""
    return rewritten(text, moves, {module: {"*"} for module in moves}, is_python)


def renamed_imports(text: str, names: Mapping[str, str]) -> str:
    """Return a program whose imports from roll have the new modules and names of what they import."""
    lines = text.splitlines(keepends=True)
    for node in sorted(ast.walk(ast.parse(text)), key=lambda node: -getattr(node, "lineno", 0)):
        if not (
            isinstance(node, ast.ImportFrom) and any(f"{node.module}.{alias.name}" in names for alias in node.names)
        ):
            continue
        indent, new = " " * node.col_offset, []
        for alias in node.names:
            module, _, name = names.get(f"{node.module}.{alias.name}", f"{node.module}.{alias.name}").rpartition(".")
            own = alias.asname or alias.name
            new.append(f"{indent}from {module} import {name}{f' as {own}' if own != name else ''}\n")
        lines[node.lineno - 1 : node.end_lineno] = new
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
