"""A reward for multiple choice: the letter of the right choice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS
from roll.types import Prompt, RewardOutcome, RewardResult

CHOICE = r"[\s(*\[$\"'`]*+([A-Z])(?![A-Za-z]|'[a-z])"
ALONE = re.compile(rf"{CHOICE}[\s).*:\]$\"'`]*")
LED_BY = re.compile(rf"{CHOICE}[).:\]]")
STATED = re.compile(rf"(?i:\b(?:answer|choice|option)\b\**+(?:\s+is)?\s*+[:-]?){CHOICE}")
TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


@REWARDS.register("multiple_choice")
def multiple_choice(prompt: Prompt, response: str, row: Mapping[str, Any]) -> RewardResult:
    """Return 1 for the right letter, 0 for another letter, and UNPARSABLE if the response has no choice or the reference is not a letter.

    The choice is read from the last `\\boxed{...}`, else from the last "answer is B" or "Answer: (B)", else from the last line, if that is
    a letter or begins with one as in "B) because". The reference is the row's `ground_truth`, else its `answer`.

    Raises:
        ValueError: the row has no reference answer.
    """
    reference = _letter(ground_truth(row))
    if reference is None:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note="the reference answer is not a letter")
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
