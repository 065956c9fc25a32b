"""Reads declarations from the source of an installed package, without importing it: importing vLLM takes seconds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PLACEHOLDER = "\0"


def folder(package: str) -> Path:
    """Return the folder in which a package is installed."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent


@cache
def parsed(path: str) -> ast.Module:
    """Parse the file at a path that starts with its package, such as `vllm/outputs.py`."""
    package, _, below = path.partition("/")
    file = folder(package) / below
    assert file.is_file(), f"{path} has moved"
    return ast.parse(file.read_text(encoding="utf-8"))


def declared(path: str, name: str) -> str | None:
    """Return how a file declares a dotted name, or None if it does not.

    - A function: `(model, device=None) -> int`, after `async` if it is a coroutine function.
    - A class: `class (Base)`.
    - An attribute: its type, or its value if it has no type.
    - An imported name: `from .layerwise`.
    """
    where: ast.AST = parsed(path)
    for step in name.split("."):
        found = [node for node in _statements(where) if step in names(node)]
        if not found:
            return None
        where = found[0]
    return _described(where)


def names(node: ast.AST) -> list[str]:
    """Return the names that a statement binds: a definition's name, imported names, or the targets of an assignment."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [ast.unparse(target).removeprefix("self.") for target in targets]


def messages(path: str, function: str) -> list[re.Pattern[str]]:
    """Return patterns of the messages with which a function raises exceptions. Expressions in f-strings match any
    text.
    """
    raised = [node for node in ast.walk(_function(path, function)) if isinstance(node, ast.Raise)]
    texts = [node.exc.args[0] for node in raised if isinstance(node.exc, ast.Call) and node.exc.args]
    return [re.compile(re.escape(_text(text)).replace(re.escape(PLACEHOLDER), ".*"), re.DOTALL) for text in texts]


def _function(path: str, name: str) -> ast.AST:
    found = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(found) == 1, f"{path} has {len(found)} functions {name}"
    return found[0]


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else PLACEHOLDER for part in node.values)
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return str(node.value)


def _statements(where: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module, including those for type checkers, or of a class, including assignments in
    `__init__`.
    """
    for node in getattr(where, "body", []):
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from node.body
        if isinstance(where, ast.ClassDef) and isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from (each for each in ast.walk(node) if isinstance(each, ast.Assign | ast.AnnAssign))


def _described(node: ast.AST) -> str:
    if isinstance(node, ast.ImportFrom):
        return f"from {'.' * node.level}{node.module or ''}"
    if isinstance(node, ast.ClassDef):
        return f"class ({', '.join(map(ast.unparse, node.bases))})"
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation)
    if isinstance(node, ast.Assign):
        return ast.unparse(node.value)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    returned = "" if node.returns is None or ast.unparse(node.returns) == "None" else f" -> {ast.unparse(node.returns)}"
    return f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}({_parameters(node.args)}){returned}"


def _parameters(arguments: ast.arguments) -> str:
    """Return a function's parameters with their kinds and defaults, without types."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    types = [(one, one.annotation) for one in every if one is not None]
    for one, _ in types:
        one.annotation = None
    text = ast.unparse(arguments)
    for one, annotation in types:
        one.annotation = annotation
    return text
