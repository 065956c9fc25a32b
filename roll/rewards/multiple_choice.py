"""A reward for multiple choice: the letter of the right choice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods.base import declares
from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardOutcome, RewardResult

CHOICE = r"[\s(*\[$\"'`]*+([A-Z])(?![A-Za-z]|'[a-z])"
ALONE = re.compile(rf"{CHOICE}[\s).*:\]$\"'`]*")
LED_BY = re.compile(rf"{CHOICE}[).:\]]")
STATED = re.compile(rf"(?i:\b(?:answer|choice|option)\b\**+(?:\s+is)?\s*+[:-]?){CHOICE}")
TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


def right_letter(row: Mapping[str, Any]) -> str:
    """Return the letter of the right choice. Raises ValueError if the row has no reference answer, or one that is not a letter."""
    letter = _letter(ground_truth(row))
    if letter is None:
        raise ValueError(f"the reference answer {ground_truth(row)[:80]!r} is not a letter")
    return letter


@REWARDS.register("multiple_choice")
@declares(RewardTraits(check_row=right_letter))
def multiple_choice(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 1 for the right letter, 0 for another letter, and UNPARSABLE for a response without a choice.

    The choice is read from the last `\\boxed{...}`, else from the last "answer is B" or "Answer: (B)", else from the last line, if that is
    a letter or begins with one as in "B) because". The reference is the row's `ground_truth`, else its `answer`.

    Raises:
        ValueError: the row has no reference answer, or one that is not a letter.
    """
    reference = right_letter(row)
    text = TEXT.sub(r"\1", final_text(response))
    boxed = last_boxed(text)
    letter = _stated(text) if boxed is None else _letter(boxed)
    if letter is None:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note="no choice in the response")
    return RewardResult(float(letter == reference), note=f"answer {letter}")


def _stated(text: str) -> str | None:
    stated = STATED.findall(text)
    if stated:
        return stated[-1]
    return _letter(text.splitlines()[-1]) if text else None


def _letter(text: str) -> str | None:
    match = ALONE.fullmatch(text) or LED_BY.match(text)
    return match[1] if match else None
