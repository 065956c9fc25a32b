"""A reward for responses that follow the row's instruction: the checks of IFEval (arXiv 2311.07911), in its strict variant."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from roll.algorithms.methods.base import declares
from roll.rewards.answers import after_thinking
from roll.rewards.base import REWARDS, RewardTraits
from roll.rewards.instructions import layout, whole, words
from roll.types import Prompt, RewardResult

CHECKS: Mapping[str, Callable[..., bool]] = {
    name: check for module in (words, layout, whole) for name, check in vars(module).items() if name.startswith(("verify_", "validate_"))
}
"""Check functions by their names in the RLVR-IFeval data set."""
NUMBERS, LISTS = ("N", "i"), ("keyword_list", "forbidden_words", "options")


@REWARDS.register("ifeval")
@declares(RewardTraits(check_row=lambda row: instruction_of(row)))
def ifeval(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 1 if the text after the thinking follows the instruction, else 0. An empty text gets 0.

    The row's `ground_truth` is a mapping, or its JSON text. It has `func_name`, the name of a check, and the arguments of that check.
    Keys whose value is null are ignored.

    Raises:
        ValueError: `ground_truth` cannot be read, does not name a check, or lacks an argument of the check.
    """
    name, arguments = instruction_of(row)
    text = after_thinking(response)
    followed = bool(text) and CHECKS[name](text, **arguments)
    return RewardResult(float(followed), note=name)


def instruction_of(row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a row's check.

    Raises:
        ValueError: see `ifeval`.
    """
    written = row.get("ground_truth")
    try:
        found = json.loads(written) if isinstance(written, str) else written
    except ValueError as error:
        raise ValueError(f"the row's 'ground_truth' is not JSON: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"the row's 'ground_truth' is a {type(found).__name__}, not an object with 'func_name'")
    name = found.get("func_name")
    if not isinstance(name, str) or name not in CHECKS:
        raise ValueError(f"'ground_truth' names the unknown check {name!r}; known checks: {', '.join(sorted(CHECKS))}")
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
    raise ValueError(f"the {key} of 'ground_truth' is {value!r}, which has the wrong type")
