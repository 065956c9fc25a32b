"""Parses `device_mapping` without `eval`: a list, or an expression as in files of ROLL (`list(range(0,16))`)."""

from __future__ import annotations

import ast
from collections.abc import Sequence

LARGEST = 1_000_000
FORMS = "[0, 1], range(4), list(range(0,16)), or several of them joined by +"


def parse_devices(text: str) -> list[int]:
    """Return the device numbers of integer lists, `range(...)`, `list(...)` and `+`. Raises ValueError for others."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("this is not a valid expression") from None
    return _devices(tree)


def _devices(node: ast.expr) -> list[int]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _devices(node.left) + _devices(node.right)
    if isinstance(node, ast.List | ast.Tuple):
        return [_integer(item) for item in node.elts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "list" and len(node.args) == 1:
            return _devices(node.args[0])
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            return _range([_integer(bound) for bound in node.args])
    raise ValueError(f"'{ast.unparse(node)}' is not a list of devices")


def _range(bounds: list[int]) -> list[int]:
    if len(bounds) == 3 and bounds[2] == 0:
        raise ValueError("the step of a range cannot be 0")
    if any(abs(bound) > LARGEST for bound in bounds):
        raise ValueError(f"the bounds of a range must be within {LARGEST}")
    return list(range(*bounds))


def _integer(node: ast.expr) -> int:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return sign * node.value
    raise ValueError(f"'{ast.unparse(node)}' is not a whole number")


def visible_devices(devices: Sequence[int], of_node: str | None) -> str:
    """Return `CUDA_VISIBLE_DEVICES` for a process on these devices of its node.

    `of_node` is the value that a batch system, a user or a container has set for the node, if any.
    """
    return ",".join(of_node.split(",")[device] if of_node else str(device) for device in devices)
