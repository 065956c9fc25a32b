"""A reward for values read from a chart: numbers within a tolerance, texts exactly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from roll.algorithms.methods import declares
from roll.rewards.answers import final_text, ground_truth, last_boxed
from roll.rewards.base import REWARDS, RewardTraits
from roll.types import Prompt, RewardResult

NUMBER = re.compile(r"[$€£]?\s*(-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(%?)")
LED_IN = re.compile(r"^.*\banswer(?:\s+is)?\s*:?\s*", re.IGNORECASE | re.DOTALL)
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def number_of(text: str) -> tuple[float, bool] | None:
    """Return the number that a text is, and whether it is a percentage; None for any other text."""
    match = NUMBER.fullmatch(text.strip())
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    return float(match[1].replace(",", "")), bool(match[2])


@REWARDS.register("relaxed_accuracy")
@declares(RewardTraits(check_row=ground_truth))
def relaxed_accuracy(prompt: Prompt, response: str, row: Mapping[str, Any], *, tolerance: float = 0.05) -> RewardResult:
    """Return 1 if the answer is the reference, within a relative tolerance if both are numbers, else 0.

    It is the relaxed accuracy of ChartQA (arXiv 2203.10244). The answer is the last `\\boxed{...}`, or else the last
    `<answer>...</answer>`, or else what follows the last "answer is" or "answer:", or else the whole text after the
    thinking. Texts are compared without regard to case, white space and a full stop at the end. A percentage equals its
    number and its hundredth, if only one of the two has the sign.

    Args:
        tolerance: largest difference of two numbers, as a share of the reference. A reference of 0 has none.

    Raises:
        ValueError: the row has no reference answer.
    """
    reference, answer = ground_truth(row), _answer(final_text(response))
    wanted, said = number_of(reference), number_of(answer)
    if wanted is None or said is None:
        return RewardResult(float(_plain(answer) == _plain(reference)))
    factors = (1.0,) if wanted[1] == said[1] else (1.0, 0.01) if said[1] else (1.0, 100.0)
    near = any(abs(said[0] * factor - wanted[0]) <= tolerance * abs(wanted[0]) for factor in factors)
    return RewardResult(float(near), note=f"answer {answer[:40]}")


def _answer(text: str) -> str:
    tagged = TAGGED.findall(text)
    answer = last_boxed(text) or (tagged[-1] if tagged else LED_IN.sub("", text))
    return answer.strip().removesuffix(".")


def _plain(text: str) -> str:
    return " ".join(text.removesuffix(".").split()).casefold()
