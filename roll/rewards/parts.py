"""The parts of a domain's reward, and their weighted sum. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.algorithms.moments import standardise
from roll.types import FP32_MAX, NO_VERDICT, RewardOutcome, RewardResult, TurnReward

if TYPE_CHECKING:  # reward processes do not import the schema
    from roll.config.schema.roles import RewardConfig


@dataclass(frozen=True)
class RewardPart:
    """One reward function of a domain, with its arguments and weight."""

    place: str
    """Key path of its block in the configuration."""
    name: str
    """Name of the part; empty if the domain has a single reward instead of parts."""
    reward: str
    """Name of the reward function."""
    reward_args: Mapping[str, Any]
    group: bool
    """Whether the function is called once for all responses to a prompt."""
    weight: float
    failed_value: float
    """Value of a result whose outcome is not SCORED."""


def parts_of(domain: str, section: RewardConfig) -> tuple[RewardPart, ...]:
    """Return the parts of a domain's reward. A domain without `parts` has exactly one."""
    place = f"rewards.{domain}"
    if not section.parts:
        return (
            RewardPart(
                place, "", section.reward or domain, section.reward_args, section.group, 1.0, section.failed_value
            ),
        )
    return tuple(
        RewardPart(
            f"{place}.parts.{name}",
            name,
            part.reward or name,
            part.reward_args,
            part.group,
            part.weight,
            part.failed_value,
        )
        for name, part in section.parts.items()
    )


def summed(parts: Sequence[RewardPart], results: Sequence[Sequence[RewardResult]]) -> list[RewardResult]:
    """Return one result for each response: the sum of weight times value over the parts, or the result of the single
    reward.

    If a part has no verdict, the sum has none either, and `RewardResult.failures` has that part's result. A sum that
    overflows fp32 is CRASHED. An UNPARSABLE part counts with its `failed_value`, and the sum is then UNPARSABLE.
    `RewardResult.parts` has the value of each part under the part's name, and the part's own parts as `name/part`. The
    sum has a turn end wherever a part has one. The result of a single reward has the value `failed_value` if its
    outcome is not SCORED.

    Args:
        results: results of each part, [parts][responses].
    """
    if parts[0].name:
        return [_sum(parts, of_one) for of_one in zip(*results, strict=True)]
    failed = parts[0].failed_value
    return [
        result if result.outcome is RewardOutcome.SCORED else replace(result, value=failed) for result in results[0]
    ]


def _sum(parts: Sequence[RewardPart], results: Sequence[RewardResult]) -> RewardResult:
    outcomes = [result.outcome for result in results]
    worst = next((outcome for outcome in outcomes if outcome in NO_VERDICT), None)
    outcome = worst or (RewardOutcome.UNPARSABLE if RewardOutcome.UNPARSABLE in outcomes else RewardOutcome.SCORED)
    values: dict[str, float] = {}
    turns: dict[int, float] = defaultdict(float)
    for part, result in zip(parts, results, strict=True):
        values[part.name] = result.value if result.outcome is RewardOutcome.SCORED else part.failed_value
        values |= {f"{part.name}/{name}": value for name, value in result.parts.items()}
        for turn in result.turns:
            turns[turn.end] += part.weight * turn.value
    value = sum(part.weight * values[part.name] for part in parts)
    if worst is None and not all(
        abs(number) <= FP32_MAX for number in (value, *turns.values())
    ):  # also true if a number is nan
        return RewardResult(
            0.0,
            RewardOutcome.CRASHED,
            values,
            f"the weighted sum of the parts ({value}) or of their turns is too large for fp32",
        )
    return RewardResult(
        value=value,
        outcome=outcome,
        parts=values,
        note="; ".join(
            f"{part.name}: {result.note}" for part, result in zip(parts, results, strict=True) if result.note
        ),
        turns=tuple(TurnReward(*turn) for turn in sorted(turns.items())) if worst is None else (),
        score=_score(parts, results),
        failures={
            part.name: result for part, result in zip(parts, results, strict=True) if result.outcome in NO_VERDICT
        },
    )


def _score(parts: Sequence[RewardPart], results: Sequence[RewardResult]) -> float | None:
    """Return the weighted sum of the parts' scores; None if no part has a score apart from its value."""
    if all(result.score is None for result in results):
        return None
    is_scored = [result.outcome is RewardOutcome.SCORED for result in results]
    graded = [
        result.graded if scored else part.failed_value
        for part, result, scored in zip(parts, results, is_scored, strict=True)
    ]
    return sum(part.weight * value for part, value in zip(parts, graded, strict=True))


def normalised(weights: Mapping[str, float], results: Sequence[RewardResult]) -> list[RewardResult]:
    """Return a group's results with each value replaced by the sum over the parts of weight times (value - mean) / (std
    + 1e-6).

    The mean and the standard deviation (n - 1) of a part are taken over the responses of the group that have a verdict.
    Results without a verdict are not changed. A part whose values are all equal adds 0. `RewardResult.parts` keeps the
    original values. The results have no `score` of their own: filters see the normalised rewards.

    Source: GDPO, arXiv 2601.05242, eq. 4 and 5: the first of its two steps. The second is `whiten_advantages: true`
    with an estimator that does not divide by a group's standard deviation again: `dr_grpo` or `reinforce`, not `grpo`.

    Args:
        weights: weight of each part, by name. The `parts` of every result has a value for each of these names.
    """
    judged = [index for index, result in enumerate(results) if result.outcome not in NO_VERDICT]
    one_group, sums = np.zeros(len(judged), np.int32), np.zeros(len(judged))
    for name, weight in weights.items():
        values = np.array([results[index].parts[name] for index in judged])
        if len(set(values.tolist())) > 1:
            sums += weight * standardise(values, one_group, "group", "group")
    out = list(results)
    for index, value in zip(judged, sums.tolist(), strict=True):
        out[index] = replace(results[index], value=value, score=None)
    return out
