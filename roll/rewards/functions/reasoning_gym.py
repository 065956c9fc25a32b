"""A reward for tasks of the package reasoning-gym (arXiv 2505.24760): the verdict of the package's own verifier."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardOutcome, RewardResult

FAMILY = "source_dataset"
"""Key of a task's metadata with the name of its family."""
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
Verifier = Callable[[str, dict[str, Any]], float]


def metadata_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the verifier compares with: the row's `metadata`, an object or its JSON text, which names the family.

    Raises:
        ValueError: the row has no such column.
    """
    written = row.get("metadata")
    if isinstance(written, str):
        try:
            written = json.loads(written)
        except ValueError as error:
            raise ValueError(f"the row's 'metadata' is not JSON: {error}") from error
    if not isinstance(written, Mapping) or not isinstance(written.get(FAMILY), str):
        raise ValueError(
            f"the row has no 'metadata' with '{FAMILY}'; prepare it with python -m roll.data.prepare "
            "reasoning_gym:FAMILY"
        )
    return dict(written)


@cache
def verifier(family: str) -> Verifier:
    """Return the verifier of a family. Raises ValueError if the package does not know the family."""
    return import_module("reasoning_gym").get_score_answer_fn(family)


def check_row(row: Mapping[str, Any]) -> None:
    """Raise ValueError if the row has no metadata, or those of a family that the package does not know."""
    verifier(metadata_of(row)[FAMILY])


@REWARDS.register("reasoning_gym")
@declares(RewardTraits(check_row=check_row))
def reasoning_gym(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return the verdict of the verifier of the row's family on the answer: 1 if it is right, less otherwise.

    The answer is the text between the last `<answer>` and `</answer>` of the text after the thinking, or without such
    tags all of that text. Many verifiers pay a little for a wrong answer in the right form. An answer that the verifier
    cannot read gets 0.

    Raises:
        ValueError: see `check_row`.
    """
    metadata = metadata_of(row)
    text = final_text(response)
    answer = tagged[-1].strip() if (tagged := TAGGED.findall(text)) else text
    verify = verifier(metadata[FAMILY])
    expected = row.get("ground_truth")
    # JSON has lists where the package has tuples, and some verifiers compare with tuples.
    forms = [metadata] if (tuples := as_tuples(metadata)) == metadata else [metadata, tuples]
    try:
        verdicts = [
            verify(answer, {"question": row.get("prompt"), "answer": expected, "metadata": one}) for one in forms
        ]
    except Exception as error:  # a verifier that parses the answer raises whatever its parser does
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note=f"{type(error).__name__}: {error}")
    return RewardResult(float(max(verdicts)), note=metadata[FAMILY])


def as_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples for its lists."""
    if isinstance(value, Mapping):
        return {key: as_tuples(inner) for key, inner in value.items()}
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
