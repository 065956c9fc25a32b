"""Moves modules of roll to other rooms, and rewrites every name and path of them in the tree.

    python benchmarks/move_rooms.py [MAP] [CHECKOUT]

MAP has a line `old.module<tab>new.module` for each module that moves (default: `rooms.tsv`). Dotted names, paths,
imports of modules and the texts of all tracked files are rewritten; nothing else changes. Files that follow the names
of roll from outside, such as an own reward, can be rewritten too: give their folder as CHECKOUT.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOTTED = re.compile(r"\broll(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"\broll(?:/[A-Za-z_]\w*)+(?:\.py\b|/(?![\w*]))")
TEXTS = {".py", ".md", ".yaml", ".yml", ".toml", ".tsv", ".ipynb", ".sh", ".cfg", ".txt", ""}


def main() -> int:
    """Move and rewrite. Return 0."""
    table = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "rooms.tsv"
    root = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else HERE.parent
    moves = dict(line.split("\t") for line in table.read_text(encoding="utf-8").splitlines())
    names = {module: top_level(root, module) for module in moves}
    moved = move_files(root, moves)
    for path in tracked(root):
        text = path.read_text(encoding="utf-8")
        new = rewritten(text, moves, names, path.suffix == ".py")
        if new != text:
            path.write_text(new, encoding="utf-8")
    print(f"{moved} files moved")
    return 0


def tracked(root: Path) -> list[Path]:
    """Return the text files that git tracks, or all of a folder outside git."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    names = (
        done.stdout.split("\0") if done.returncode == 0 else [str(path.relative_to(root)) for path in root.rglob("*")]
    )
    paths = [root / name for name in names if name and Path(name).suffix in TEXTS]
    return [
        path
        for path in paths
        if path.is_file() and not path.is_symlink() and path.name not in ("rooms.tsv", "merged.tsv")
    ]


def file_of(root: Path, module: str) -> Path:
    """Return the file of a module."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if (path / "__init__.py").exists() else path.with_suffix(".py")


def top_level(root: Path, module: str) -> set[str]:
    """Return the names that a module defines or imports; all names if the module is not in the tree."""
    path = file_of(root, module)
    if not path.exists():
        return {"*"}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def move_files(root: Path, moves: Mapping[str, str]) -> int:
    """Move the files with git, and make the packages of their new places. Return how many files moved."""
    count = 0
    for old, new in moves.items():
        path = root.joinpath(*old.split("."))
        source = path.with_suffix(".py")
        if source.exists():
            target = root.joinpath(*new.split(".")).with_suffix(".py")
        elif (path / "__init__.py").exists():
            source, target = path / "__init__.py", root.joinpath(*new.split("."), "__init__.py")
        else:
            continue
        for folder in list(target.relative_to(root).parents)[:-1]:
            package = root / folder
            package.mkdir(parents=True, exist_ok=True)
            if not (package / "__init__.py").exists() and target != package / "__init__.py":
                (package / "__init__.py").touch()
                subprocess.run(["git", "add", str(package / "__init__.py")], cwd=root, check=True)
        subprocess.run(["git", "mv", "-f", str(source), str(target)], cwd=root, check=True)
        count += 1
    return count


def rewritten(text: str, moves: Mapping[str, str], names: Mapping[str, set[str]], is_python: bool) -> str:
    """Return a text with the new names and paths of the modules."""
    if is_python:
        text = module_imports(text, moves)
    return PATH.sub(
        lambda found: new_path(found[0], moves), DOTTED.sub(lambda found: new_name(found[0], moves, names), text)
    )


def new_name(dotted: str, moves: Mapping[str, str], names: Mapping[str, set[str]]) -> str:
    """Return a dotted name with its module's new name. Names of other projects that begin alike stay."""
    parts = dotted.split(".")
    for end in range(len(parts), 1, -1):
        module = ".".join(parts[:end])
        if module in moves:
            rest = parts[end:]
            if not rest and f"{module}.__main__" in moves:  # `python -m module`
                return moves[f"{module}.__main__"]
            return (
                ".".join([moves[module], *rest])
                if not rest or rest[0] in names[module] or names[module] == {"*"}
                else dotted
            )
    return dotted


def new_path(path: str, moves: Mapping[str, str]) -> str:
    """Return the new path of a file or of a folder whose package moved."""
    end = ".py" if path.endswith(".py") else "/"
    module = path.removesuffix(end).replace("/", ".").removesuffix(".__init__")
    return (
        moves[module].replace(".", "/") + path[len(path.removesuffix(end).removesuffix("/__init__")) :]
        if module in moves
        else path
    )


def module_imports(text: str, moves: Mapping[str, str]) -> str:
    """Rewrite `from package import module` of modules that moved."""
    lines = text.splitlines(keepends=True)
    for node in sorted(ast.walk(ast.parse(text)), key=lambda node: -getattr(node, "lineno", 0)):
        if not (isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("roll")):
            continue
        goes = [alias for alias in node.names if f"{node.module}.{alias.name}" in moves]
        if not goes:
            continue
        indent = " " * node.col_offset
        stays = [alias for alias in node.names if alias not in goes]
        new = [f"{indent}from {node.module} import {', '.join(map(ast.unparse, stays))}\n"] if stays else []
        for alias in goes:
            package, _, leaf = moves[f"{node.module}.{alias.name}"].rpartition(".")
            name = alias.asname or alias.name
            new.append(f"{indent}from {package} import {leaf}{f' as {name}' if name != leaf else ''}\n")
        lines[node.lineno - 1 : node.end_lineno] = new
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
