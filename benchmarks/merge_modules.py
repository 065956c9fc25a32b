"""Merges modules of roll into others, and rewrites every name and path of them in the tree.

    python benchmarks/merge_modules.py TABLE [CHECKOUT]

TABLE has a line `module<tab>target` for each module that joins another. Its definitions come first in the target, below
the imports, or last if it imports the target, and its docstring becomes a paragraph of the target's. Names and paths
are rewritten as by `move_rooms.py`. The status is 1 if both define the same name differently.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from move_rooms import file_of, rewritten, top_level, tracked

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Source:
    """The parts of a module's text."""

    docstring: str
    imports: str
    """Imports at the top of the file, outside `if TYPE_CHECKING`."""
    typing: str
    """The indented imports for type checkers."""
    body: str


def main() -> int:
    """Merge. Return the status."""
    root = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else HERE.parent
    status = 0
    for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines():
        module, target = line.split("\t")
        if clash := merge(root, module, target):
            print(f"{module} and {target} define {', '.join(sorted(clash))} differently")
            status = 1
    return status


def merge(root: Path, module: str, target: str) -> set[str]:
    """Merge a module into another. Return the names that both define differently; then nothing is changed."""
    ours, theirs = file_of(root, module), file_of(root, target)
    mine, others = parts(ours.read_text(encoding="utf-8")), parts(theirs.read_text(encoding="utf-8"))
    both = defined(mine.body).keys() & defined(others.body).keys()
    different = {name for name in both if defined(mine.body)[name] != defined(others.body)[name]}
    if different:
        return different
    names = {module: top_level(root, module)}
    body = without(mine.body, both)
    docstring = f"{others.docstring.rstrip()}\n\n{mine.docstring.strip()}\n" if mine.docstring else others.docstring
    typing = f"\nif TYPE_CHECKING:\n{mine.typing}{others.typing}" if mine.typing or others.typing else ""
    builds_on_target = without_import(mine.imports, target) != mine.imports
    first, second = (others.body, body) if builds_on_target else (body, others.body)
    text = f'"""{docstring}"""\n\n{mine.imports}{others.imports}{typing}\n\n{first.strip()}\n\n\n{second.strip()}\n'
    theirs.write_text(without_import(without_import(text, module), target), encoding="utf-8")
    subprocess.run(["git", "rm", "-qf", str(ours)], cwd=root, check=True)
    for path in tracked(root):
        old = path.read_text(encoding="utf-8")
        new = rewritten(old, {module: target}, names, path.suffix == ".py")
        if new != old:
            path.write_text(new, encoding="utf-8")
    return set()


def parts(text: str) -> Source:
    """Split a module's text."""
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    docstring = ast.get_docstring(tree, clean=True) or ""
    imports, typing, end = "", "", 0
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and not end:
            end = node.end_lineno or 0
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports += "".join(lines[node.lineno - 1 : node.end_lineno])
            end = node.end_lineno or 0
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse:
            typing += "".join(lines[node.body[0].lineno - 1 : node.end_lineno])
            end = node.end_lineno or 0
        else:
            break
    return Source(f"{docstring}\n" if "\n" in docstring else docstring, imports, typing, "".join(lines[end:]))


def defined(body: str) -> dict[str, str]:
    """Return the definitions of module level by name, as text."""
    found = {}
    for node in ast.parse(body).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for place in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {name.id: ast.unparse(node) for name in ast.walk(place) if isinstance(name, ast.Name)}
    return found


def without(body: str, names: set[str]) -> str:
    """Return a body without the assignments of these names."""
    lines = body.splitlines(keepends=True)
    for node in reversed(ast.parse(body).body):
        if isinstance(node, ast.Assign) and {ast.unparse(place) for place in node.targets} <= names:
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)


def without_import(text: str, module: str) -> str:
    """Return a text without its imports of a module's names, at any depth."""
    lines = text.splitlines(keepends=True)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module == module]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
