"""Each constant is defined in one place: no two modules assign the same value to the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "roll").rglob("*.py"))
SEVERAL = {"LOOK_EVERY": "Ray's processes, the files of starting roles and the sizes of logs are checked independently"}
"""Names to which several modules assign the same value, and why."""


def constants(source: str) -> dict[str, str]:
    """Return the source text of a module's literal constants by name: numbers, strings, and tuples, lists, sets and
    dicts of them.
    """
    found = {}
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is not None and _is_literal(value):
            found |= {target.id: ast.unparse(value) for target in targets if isinstance(target, ast.Name)}
    return found


def _is_literal(value: ast.expr) -> bool:
    collections, arithmetic = (
        ast.Tuple | ast.List | ast.Set | ast.Dict,
        ast.UnaryOp | ast.BinOp | ast.operator | ast.unaryop,
    )
    return all(isinstance(node, ast.Constant | collections | arithmetic | ast.Load) for node in ast.walk(value))


def test_a_constant_stands_in_one_module() -> None:
    places = defaultdict(list)
    for path in SOURCES:
        for name, value in constants(path.read_text(encoding="utf-8")).items():
            places[name, value].append(str(path.relative_to(ROOT)))
    twice = {name: modules for (name, _), modules in places.items() if len(modules) > 1}
    assert twice.keys() == SEVERAL.keys(), twice


def test_literals_are_found() -> None:
    source = "A = 3\nB: int = 1 << 20\nC, D = 1, 2\nE = f(1)\nF = ('x', {'y': -1.5})\ndef f(): G = 1\n"
    assert constants(source) == {"A": "3", "B": "1 << 20", "F": "('x', {'y': -1.5})"}
