"""Builds the judge's prompt, and parses its answer. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from roll.rewards.answers import final_text
from roll.types import RewardOutcome, RewardResult

PLACEHOLDER = re.compile(r"\{(question|response|reference)\}")
YES = r"(?i)\byes\b"
SCORE = r"(?i)\bscore:?[\s*]*:?[\s*]*(\d+(?:\.\d+)?)"
"""Matches `Score: 8`, also with the asterisks of bold text."""
SCORE_OF = 10.0
SCORE_TEMPLATE = "score"
"""Name of the default template, which requests a score. The other shipped template requests YES or NO."""
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""Words that a pattern's group may match instead of a number, with their values."""
SEARCHED_CHARACTERS = 20_000
"""Number of characters at the end of an answer to search for the pattern."""
NOTE_CHARACTERS = 200


@dataclass(frozen=True)
class JudgeTemplate:
    """A text with the placeholders `{question}`, `{response}` and `{reference}`. All other braces are literal."""

    text: str

    @property
    def needs_reference(self) -> bool:
        """Whether rows must have a reference answer."""
        return "reference" in PLACEHOLDER.findall(self.text)

    def filled(self, question: str, response: str, reference: str) -> str:
        """Return the text with its placeholders filled in. Placeholders within the inserted texts are left as they
        are.
        """
        values = {"question": question, "response": response, "reference": reference}
        return PLACEHOLDER.sub(lambda found: values[found[1]], self.text)


@dataclass(frozen=True)
class AnswerPattern:
    """Settings for parsing the verdict from a judge's answer."""

    pattern: str
    """Regular expression. If it has a group, the verdict is the group of the last match: a number or one of `WORDS`. If
    it has none, the verdict is 1 for a match and 0 for no match.
    """
    max_score: float | None = None
    """Largest valid number; the verdict is the number divided by it. If None, the verdict is the number itself."""

    @property
    def has_largest(self) -> bool:
        """Whether 1 is the largest verdict. A number without `max_score` has no largest."""
        return self.max_score is not None or not re.compile(self.pattern).groups

    def read(self, answer: str) -> float | None:
        """Return the verdict, or None if the answer has none. Text before `</think>` is ignored."""
        text = final_text(answer)[-SEARCHED_CHARACTERS:]
        if not text:
            return None
        matches = list(re.finditer(self.pattern, text))
        if not re.compile(self.pattern).groups:
            return float(bool(matches))
        return self._number(matches[-1][1]) if matches else None

    def _number(self, found: str | None) -> float | None:
        word = (found or "").strip().lower()
        if word in WORDS:
            return WORDS[word]
        try:
            value = float(word)
        except ValueError:
            return None
        if not math.isfinite(value):
            return None
        if self.max_score is None:
            return value
        return value / self.max_score if 0 <= value <= self.max_score else None


def answer_pattern(pattern: str | None, max_score: float | None, prompt: str | None) -> AnswerPattern:
    """Return the settings of a domain.

    `prompt` is the domain's `judge_prompt`, which determines the default pattern. With the template `score`, the judge
    must write `Score: x`, where x is at most `max_score` (default: 10). With any other prompt, it must write "yes" or
    "no".
    """
    if pattern is not None:
        return AnswerPattern(pattern, max_score)
    return AnswerPattern(SCORE, max_score or SCORE_OF) if prompt in (None, SCORE_TEMPLATE) else AnswerPattern(YES)


def judges_verdict(answers: Sequence[str], pattern: AnswerPattern) -> RewardResult:
    """Return the mean of the verdicts that can be parsed, or UNPARSABLE if none can."""
    note = "judge: " + " ".join(final_text(answers[0]).split())[-NOTE_CHARACTERS:] if answers else ""
    values = [value for answer in answers if (value := pattern.read(answer)) is not None]
    if not values:
        return RewardResult(0.0, RewardOutcome.UNPARSABLE, note=note or "the judge's answer is empty")
    return RewardResult(fmean(values), note=note)
