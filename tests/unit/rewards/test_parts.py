"""Weighted and normalised sums of rewards, compared with explicit computations."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import pytest

from roll.config.schema.roles import RewardConfig
from roll.rewards.verdicts import RewardPart, normalised, parts_of, summed
from roll.types import RewardOutcome, RewardResult, TurnReward

EPSILON = 1e-6
PARTS = parts_of(
    "maths",
    RewardConfig.model_validate(
        {
            "parts": {
                "right": {"reward": "math_rule", "weight": 2.0},
                "brief": {"weight": -0.5, "failed_value": 4.0, "group": True},
            }
        }
    ),
)


def test_domain_has_unnamed_or_several_parts() -> None:
    alone = RewardConfig.model_validate({"failed_value": -1.0, "reward_args": {"a": 1}})
    assert parts_of("maths", alone) == (RewardPart("rewards.maths", "", "maths", {"a": 1}, False, 1.0, -1.0),)
    assert (
        RewardPart("rewards.maths.parts.right", "right", "math_rule", {}, False, 2.0, 0.0),
        RewardPart("rewards.maths.parts.brief", "brief", "brief", {}, True, -0.5, 4.0),
    ) == PARTS


def test_single_reward_is_unchanged_with_failed_value() -> None:
    results = [
        RewardResult(1.0),
        RewardResult(7.0, RewardOutcome.UNPARSABLE),
        RewardResult(7.0, RewardOutcome.UNAVAILABLE),
    ]
    (part,) = parts_of("maths", RewardConfig.model_validate({"failed_value": -1.0}))
    assert [result.value for result in summed([part], [results])] == [1.0, -1.0, -1.0]


def test_the_sum_weighs_and_keeps_each_part() -> None:
    right = RewardResult(0.5, parts={"answer": 1.0}, note="answer 4", turns=(TurnReward(3, 0.25), TurnReward(6, 0.5)))
    brief = RewardResult(3.0, turns=(TurnReward(6, 1.0), TurnReward(9, 2.0)))
    (result,) = summed(PARTS, [[right], [brief]])
    assert result == RewardResult(
        2.0 * 0.5 - 0.5 * 3.0,
        parts={"right": 0.5, "right/answer": 1.0, "brief": 3.0},
        note="right: answer 4",
        turns=(TurnReward(3, 0.5), TurnReward(6, 1.0 - 0.5), TurnReward(9, -1.0)),
    )


def test_score_of_sum_is_sum_of_verdicts() -> None:
    parts = parts_of("a", RewardConfig.model_validate({"parts": {"ifeval": {"weight": 2.0}, "repetition_penalty": {}}}))
    (both,) = summed(parts, [[RewardResult(1.0)], [RewardResult(-0.25, score=0.0)]])
    assert (both.value, both.score, both.graded) == (1.75, 2.0, 2.0)
    (neither,) = summed(parts, [[RewardResult(1.0)], [RewardResult(-0.25)]])
    assert (neither.score, neither.graded) == (None, 1.75)


@pytest.mark.parametrize("outcome", [RewardOutcome.CRASHED, RewardOutcome.TIMED_OUT, RewardOutcome.UNAVAILABLE])
def test_part_without_verdict_voids_the_sum(outcome: RewardOutcome) -> None:
    unread, failed = RewardResult(0.0, RewardOutcome.UNPARSABLE), RewardResult(0.0, outcome, note="gone")
    for results in ([unread, failed], [failed, RewardResult(1.0)]):
        (result,) = summed(PARTS, [[one] for one in results])
        assert (result.outcome, "gone" in result.note) == (outcome, True)


def test_an_unparsable_part_counts_with_its_failed_value() -> None:
    (result,) = summed(PARTS, [[RewardResult(1.0)], [RewardResult(9.0, RewardOutcome.UNPARSABLE)]])
    assert (result.value, result.outcome, result.parts) == (
        2.0 - 0.5 * 4.0,
        RewardOutcome.UNPARSABLE,
        {"right": 1.0, "brief": 4.0},
    )


@pytest.mark.parametrize("values", [(1e308, 1e308), (1e308, -1e308), (3e38, 3e38)])
def test_sum_beyond_fp32_range_is_no_verdict(values: tuple[float, float]) -> None:
    parts = parts_of("d", RewardConfig.model_validate({"parts": {"a": {"weight": 10.0}, "b": {"weight": 10.0}}}))
    (result,) = summed(parts, [[RewardResult(value)] for value in values])
    assert (result.value, result.outcome) == (0.0, RewardOutcome.CRASHED)
    assert "is too large for fp32" in result.note


def by_hand(group: Sequence[Sequence[float]], weights: Sequence[float], judged: Sequence[bool]) -> list[float]:
    """Return the normalised sum, [responses], of the values [responses][parts]. Only judged responses count in mean and
    deviation.
    """
    sums = [0.0] * len(group)
    for part, weight in enumerate(weights):
        values = [of_one[part] for of_one, counts in zip(group, judged, strict=True) if counts]
        mean = statistics.fmean(values)
        spread = statistics.stdev(values) if len(set(values)) > 1 else float("inf")
        for index, of_one in enumerate(group):
            sums[index] += weight * (of_one[part] - mean) / (spread + EPSILON)
    return sums


@pytest.mark.parametrize("seed", range(20))
def test_normalised_sum_matches_hand_computation(seed: int) -> None:
    drawn = random.Random(seed)
    weights = {"a": 1.0, "b": drawn.uniform(-2, 2), "c": 0.5}
    size = drawn.randint(1, 9)
    group = [[drawn.choice([0.0, 1.0]), drawn.gauss(100, 3), 7.0] for _ in range(size)]
    judged = [drawn.random() < 0.8 for _ in range(size)]
    judged[drawn.randrange(size)] = True
    results = [
        RewardResult(
            -3.0, RewardOutcome.SCORED if counts else RewardOutcome.UNAVAILABLE, dict(zip(weights, values, strict=True))
        )
        for counts, values in zip(judged, group, strict=True)
    ]
    expected = by_hand(group, list(weights.values()), judged)
    for result, before, counts, value in zip(normalised(weights, results), results, judged, expected, strict=True):
        if counts:
            assert result.value == pytest.approx(value, abs=1e-9)
            assert (result.parts, result.outcome) == (before.parts, before.outcome)
        else:
            assert result == before


def test_equal_parts_normalise_to_zero() -> None:
    results = [RewardResult(0.1, parts={"a": 0.1}) for _ in range(3)]
    assert [result.value for result in normalised({"a": 5.0}, results)] == [0.0, 0.0, 0.0]


def test_normalised_parts_do_not_depend_on_scale() -> None:
    small = [RewardResult(0.0, parts={"a": value, "b": 1 - value}) for value in (0.0, 1.0, 1.0, 0.0)]
    large = [RewardResult(0.0, parts={"a": 1000 * result.parts["a"], "b": result.parts["b"]}) for result in small]
    same = [result.value for result in normalised({"a": 1.0, "b": 2.0}, large)]
    assert same == pytest.approx([result.value for result in normalised({"a": 1.0, "b": 2.0}, small)], abs=1e-4)
