"""Does the response keep to the instruction of its row? The checks of IFEval (arXiv 2311.07911), in its strict reading."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from roll.rewards.base import REWARDS
from roll.rewards.instructions import layout, whole, words
from roll.types import Prompt, RewardResult

CHECKS: Mapping[str, Callable[..., bool]] = {
    name: check for module in (words, layout, whole) for name, check in vars(module).items() if name.startswith(("verify_", "validate_"))
}
"""Checks by name in the RLVR-IFeval data set."""
NUMBERS, LISTS = ("N", "i"), ("keyword_list", "forbidden_words", "options")


@REWARDS.register("ifeval")
def ifeval(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 1 if the text after the last `</think>` follows the instruction, else 0; 0 for an empty text.

    The row's `ground_truth` is a JSON object, as text or as such: `func_name` and the check's arguments; keys that are null do not count.

    Raises:
        ValueError: it cannot be read, names no check, or has not the check's arguments.
    """
    name, arguments = instruction_of(row)
    text = response.rpartition("</think>")[2].strip()
    followed = bool(text) and CHECKS[name](text, **arguments)
    return RewardResult(float(followed), note=name)


def instruction_of(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a row's check.

    Raises:
        ValueError: see `ifeval`.
    """
    written = row.get("ground_truth")
    try:
        found = json.loads(written) if isinstance(written, str) else written
    except ValueError as error:
        raise ValueError(f"the row's 'ground_truth' is no JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"the row's 'ground_truth' is a {type(found).__name__}, not an object with 'func_name'")
    name = found.get("func_name")
    if not isinstance(name, str) or name not in CHECKS:
        raise ValueError(f"'ground_truth' names the check {name!r}; there are {', '.join(sorted(CHECKS))}")
    needed = [parameter for parameter in inspect.signature(CHECKS[name]).parameters if parameter != "text"]
    missing = [key for key in needed if found.get(key) is None]
    if missing:
        raise ValueError(f"'ground_truth' has no {', '.join(missing)} for the check {name}")
    return name, {key: _argument(key, found[key]) for key in needed}


def _argument(key: str, value: Any) -> Any:
    if key in LISTS:
        if isinstance(value, str):
            return [part.strip() for part in value.replace("/", ",").split(",")]
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return value
    elif key in NUMBERS:
        if isinstance(value, int | float) and not isinstance(value, bool) and int(value) == value:
            return int(value)
    elif isinstance(value, str):
        return value
    raise ValueError(f"the {key} of 'ground_truth' is {value!r}")
