"""GDPO (arXiv 2601.05242) by the recipe's keys, compared with its formula in plain Python, in float64."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest

from roll.algorithms.advantages import exact_advantages
from roll.rewards.verdicts import normalised
from roll.runs.rlvr.wiring import credit
from roll.types import RewardResult
from tests.unit.algorithms.build import build
from tests.unit.pipeline.conftest import configured

__all__ = ["configured"]
Configured = Callable[..., Any]
Group = Sequence[Mapping[str, float]]
"""The value of each reward, by name, of each response to one prompt."""


def random_step(draw: random.Random) -> tuple[dict[str, float], list[Group], list[list[int]]]:
    """Return weights, groups, and the number of tokens of each response. In some groups, all values of one reward are
    equal.
    """
    weights = {name: draw.choice([1.0, 0.5, -0.25, 3.0]) for name in ("a", "b", "c")[: draw.randint(1, 3)]}
    groups: list[Group] = []
    for _ in range(draw.randint(2, 5)):
        scales = {name: draw.choice([0.0, 1.0, 100.0]) for name in weights}
        size = draw.randint(2, 6)
        groups.append(
            [{name: 1.0 + scales[name] * draw.choice([0, 1, draw.random()]) for name in weights} for _ in range(size)]
        )
    return weights, groups, [[draw.randint(1, 5) for _ in group] for group in groups]


def gdpo(weights: Mapping[str, float], groups: Sequence[Group], lengths: Sequence[Sequence[int]]) -> list[float]:
    """Return the advantage of each response: eq. 4 to 6 of the paper, with all response tokens as the batch, as in
    verl, but n - 1.
    """
    sums = []
    for group in groups:
        for response in group:
            total = 0.0
            for name, weight in weights.items():
                values = [one[name] for one in group]
                total += weight * (response[name] - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6)
            sums.append(total)
    tokens = [value for value, length in zip(sums, sum(map(list, lengths), []), strict=True) for _ in range(length)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [(value - mean) / sqrt(variance + 1e-8) for value in sums]


def by_roll(
    config: Any, weights: Mapping[str, float], groups: Sequence[Group], lengths: Sequence[Sequence[int]]
) -> list[float]:
    """Return roll's advantages of the first token of each response, with the estimator and the normalisation of a
    configuration.
    """
    wired = credit(config)
    results = [normalised(weights, [RewardResult(0.0, parts=dict(one)) for one in group]) for group in groups]
    rows = [(0.0, index, "." + "x" * count) for index, counts in enumerate(lengths) for count in counts]
    scores = replace(build(rows), rewards=np.array([one.value for group in results for one in group]))
    tokens = exact_advantages(wired.estimator, scores, wired.normalisation, wired.estimator_args)
    return tokens[scores.sequences.offsets[:-1] + 1].tolist()


@pytest.mark.parametrize("words", [[], ["adv_estimator=reinforce"]])
def test_the_recipe_equals_the_formula(words: list[str], configured: Configured) -> None:
    config, draw = configured("algorithms/gdpo", *words), random.Random(5)
    section = config.rewards["arithmetic"]
    assert section.normalise == "group" and list(section.parts) == ["right", "brief"]
    for _ in range(200):
        step = random_step(draw)
        expected = gdpo(*step)
        if any(expected):
            assert by_roll(config, *step) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_normalised_parts_under_grpo_are_not_gdpo(configured: Configured) -> None:
    draw, config = random.Random(5), configured("algorithms/gdpo", "adv_estimator=grpo")
    steps = [random_step(draw) for _ in range(50)]
    several = [step for step in steps if len(step[0]) > 1]
    worst = [max(abs(a - b) for a, b in zip(by_roll(config, *step), gdpo(*step), strict=True)) for step in several]
    assert max(worst) > 0.5
