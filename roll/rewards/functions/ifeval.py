"""A reward for responses that follow the row's instructions, by the strict checks of IFEval (arXiv 2311.07911)."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from roll.algorithms.methods import declares
from roll.rewards.answers import after_thinking
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.functions import instructions
from roll.rewards.functions.instructions import INSTRUCTIONS, holds
from roll.types import Prompt, RewardResult

CHECKS: Mapping[str, Callable[..., bool]] = {
    name: check for name, check in vars(instructions).items() if name.startswith(("verify_", "validate_"))
}
"""Check functions by their names in the RLVR-IFeval data set."""
NUMBERS, LISTS, IDS = (
    ("N", "i"),
    ("keyword_list", "forbidden_words", "options"),
    ("instruction_id_list", "instruction_id"),
)


@dataclass(frozen=True)
class RequestedRule:
    """An instruction of a row."""

    name: str
    check: Callable[..., bool]
    arguments: Mapping[str, Any]

    def is_followed(self, text: str) -> bool:
        """Return whether a text follows the instruction. An empty text follows none."""
        return bool(text) and self.check(text, **self.arguments)


@REWARDS.register("ifeval")
@declares(RewardTraits(check_row=lambda row: instructions_of(row)))
def ifeval(
    prompt: Prompt, response: str, row: Mapping[str, Any], *, pays: Literal["all", "share"] = "all"
) -> RewardResult:
    """Return 1 if the text after the thinking follows every instruction of the row, else 0. An empty text gets 0.

    A row has one of two forms. In the form of RLVR-IFeval, `ground_truth` is a mapping with `func_name`, the name of a
    check, and the arguments of that check. In the form of IFEval, the row has `instruction_id_list`, a list of ids, and
    `kwargs`, a list with a mapping of arguments for each id; or its `ground_truth` has them, or is a list of such
    mappings. A `ground_truth` may be a text: JSON, or a literal of Python. Keys whose value is null are ignored.

    Args:
        pays: `share` returns the share of the instructions that are followed.

    Raises:
        ValueError: the row cannot be read, names no known check or instruction, or lacks an argument.
    """
    if pays not in ("all", "share"):
        raise ValueError(f"pays is '{pays}'; it must be all or share")
    asked, text = instructions_of(row), after_thinking(response)
    followed = [one.is_followed(text) for one in asked]
    share = sum(followed) / len(followed)
    missed = [one.name for one, is_followed in zip(asked, followed, strict=True) if not is_followed]
    note = f"not followed: {', '.join(missed)}" if missed and len(asked) > 1 else ", ".join(one.name for one in asked)
    parts = {"followed": share} if len(asked) > 1 else {}
    return RewardResult(share if pays == "share" else float(all(followed)), parts=parts, note=note)


def instructions_of(row: Mapping[str, Any]) -> list[RequestedRule]:
    """Return the instructions of a row. Raises ValueError, see `ifeval`."""
    if row.get(IDS[0]) is not None:
        if row.get("ground_truth") not in (None, ""):
            raise ValueError(f"the row has both '{IDS[0]}' and 'ground_truth'; which of them is meant?")
        return _by_ids(row, "the row")
    found = _parsed(row.get("ground_truth"), "the row's 'ground_truth'")
    several = found if isinstance(found, list) and found and all(isinstance(one, Mapping) for one in found) else [found]
    return [asked for one in several for asked in _of_mapping(one)]


def _parsed(written: Any, where: str) -> Any:
    if not isinstance(written, str):
        return written
    try:
        return json.loads(written)
    except ValueError as error:
        try:
            return ast.literal_eval(written)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{where} is not JSON: {error}") from error


def _of_mapping(found: Any) -> list[RequestedRule]:
    if not isinstance(found, Mapping):
        problem = f"the row's 'ground_truth' is a {type(found).__name__}, not an object with 'func_name' or '{IDS[0]}'"
        raise ValueError(f"{problem}, and the row has no '{IDS[0]}'")
    if any(found.get(key) is not None for key in IDS):
        return _by_ids(found, "'ground_truth'")
    name = found.get("func_name")
    if not isinstance(name, str) or name not in CHECKS:
        raise ValueError(f"'ground_truth' names the unknown check {name!r}; known checks: {', '.join(sorted(CHECKS))}")
    needed = [
        one.name
        for one in inspect.signature(CHECKS[name]).parameters.values()
        if one.name != "text" and one.kind != one.KEYWORD_ONLY
    ]
    missing = [key for key in needed if found.get(key) is None]
    if missing:
        raise ValueError(f"'ground_truth' has no {', '.join(missing)} for the check {name}")
    return [_instructions(name, CHECKS[name], {key: (key, found[key]) for key in needed}, "'ground_truth'")]


def _by_ids(found: Mapping[str, Any], where: str) -> list[RequestedRule]:
    key = next(key for key in IDS if found.get(key) is not None)
    ids, given = found[key], _parsed(found.get("kwargs"), f"the kwargs of {where}")
    ids, given = [ids] if isinstance(ids, str) else ids, [given] if isinstance(given, Mapping) else given
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"the {key} of {where} is {ids!r}, not a list of instructions")
    given = [None] * len(ids) if given is None else given
    if not isinstance(given, list) or len(given) != len(ids):
        raise ValueError(
            f"the kwargs of {where} are {given!r}, not a list with arguments for each of the {len(ids)} instructions"
        )
    return [
        _by_id(name, _parsed(arguments, f"the kwargs of {name}"), where)
        for name, arguments in zip(ids, given, strict=True)
    ]


def _by_id(name: Any, given: Any, where: str) -> RequestedRule:
    if not isinstance(name, str) or name not in INSTRUCTIONS:
        raise ValueError(
            f"{where} names the unknown instruction {name!r}; known instructions: {', '.join(sorted(INSTRUCTIONS))}"
        )
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"the kwargs of {name} are {given!r}, not an object")
    instruction = INSTRUCTIONS[name]
    there = {key: value for key, value in (given or {}).items() if value is not None}
    if missing := [key for key in instruction.arguments if key not in there]:
        raise ValueError(f"the kwargs of {name} have no {', '.join(missing)}")
    if unknown := [key for key in there if key not in instruction.arguments]:
        raise ValueError(f"the kwargs of {name} have {', '.join(unknown)}, which it does not take")
    return _instructions(
        name,
        instruction.check,
        {ours: (key, there[key]) for key, ours in instruction.arguments.items()},
        f"the kwargs of {name}",
    )


def _instructions(
    name: str, check: Callable[..., bool], values: Mapping[str, tuple[str, Any]], where: str
) -> RequestedRule:
    """Return an instruction. `values` are the arguments by name, each with the row's key."""
    arguments = {ours: _argument(ours, key, value, where) for ours, (key, value) in values.items()}
    if "quantifier" in arguments:
        holds(0, arguments["quantifier"], 0)  # raises for an unknown one
    return RequestedRule(name, check, arguments)


def _argument(name: str, key: str, value: Any, where: str) -> Any:
    if name in LISTS:
        if isinstance(value, str):
            return [part.strip() for part in value.replace("/", ",").split(",")]
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return value
    elif name in NUMBERS:
        if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
            return int(value)
    elif isinstance(value, str):
        return value
    raise ValueError(f"the {key} of {where} is {value!r}, which has the wrong type")
