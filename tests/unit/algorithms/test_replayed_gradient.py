"""The expected gradient of replayed groups, by all groups of a categorical policy, against the gradient of the solve
rate.

A policy chooses one of four answers, of which two are right. Groups are sampled by an older policy. Each test sums the
gradient of the loss over all groups of three answers, with the probability of each under the older policy.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.advantages import Normalisation, advantages
from roll.algorithms.corrections import Correction
from roll.algorithms.losses import LossInputs
from roll.algorithms.methods import ESTIMATORS
from roll.algorithms.objectives import PolicyGradient, PolicyLoss, Ppo
from roll.config.checks.curriculum import compares_alone
from tests.unit.algorithms.build import scores

RIGHT = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
CURRENT = torch.tensor([0.3, -0.2, 0.5, -1.0], dtype=torch.float64)
OLDER = torch.tensor([0.9, -1.3, 0.1, -0.6], dtype=torch.float64)
SIZE = 3
RATIO = PolicyLoss(Ppo(clip_low=1.0, clip_high=1e6))
WEIGHT = PolicyLoss(PolicyGradient(), Correction(weight="token"))
NEITHER = PolicyLoss(PolicyGradient())
ALL, RARE = range(SIZE + 1), (1,)
"""Numbers of right answers of the groups that are trained on."""


def solve_rate_gradient() -> Tensor:
    logits = CURRENT.clone().requires_grad_()
    (RIGHT * logits.softmax(0)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def ascent(loss: PolicyLoss, estimator: str, counts: tuple[int, ...] | range, sampled_by: Tensor) -> Tensor:
    """Return minus the gradient of the expected loss of one group, restricted to groups with these counts."""
    logits, sampling = CURRENT.clone().requires_grad_(), sampled_by.log_softmax(0)
    expected = torch.zeros((), dtype=torch.float64)
    for answers in product(range(len(RIGHT)), repeat=SIZE):
        chosen = torch.tensor(answers)
        rewards = RIGHT[chosen]
        if int(rewards.sum()) not in counts:
            continue
        estimated = advantages(estimator, scores(rewards.tolist(), [0] * SIZE, [".x"] * SIZE), Normalisation(), {})
        inputs = LossInputs(
            torch.from_numpy(estimated[1::2].astype(np.float64)),
            torch.ones(SIZE, dtype=torch.int64),
            behaviour_log_probs=sampling[chosen],
            proximal_log_probs=None if loss is RATIO else CURRENT.log_softmax(0)[chosen],
        )
        tokens = loss(logits.log_softmax(0)[chosen], torch.zeros(SIZE, dtype=torch.float64), inputs)
        expected = expected + sampling[chosen].sum().exp() * tokens.losses.mean()
    expected.backward()
    assert logits.grad is not None
    return -logits.grad


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / one.norm() / other.norm())


@pytest.mark.parametrize("loss", [RATIO, WEIGHT])
def test_groups_of_an_older_policy_have_the_gradient(loss: PolicyLoss) -> None:
    assert torch.allclose(ascent(loss, "rloo", ALL, OLDER), solve_rate_gradient(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("loss", [RATIO, WEIGHT])
@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "grpo", "maxrl"])
def test_rare_successes_keep_the_direction(loss: PolicyLoss, estimator: str) -> None:
    """A choice by the number of right answers changes the weight of the prompt alone."""
    found = ascent(loss, estimator, RARE, OLDER)
    assert cosine(found, solve_rate_gradient()) == pytest.approx(1, abs=1e-9)


def test_the_weight_of_rare_successes() -> None:
    """With k of n right, `rloo` has k (n - k) / (n (n - 1)) times the gradient of p, over p (1 - p) of the older
    policy.
    """
    rate = float((RIGHT * OLDER.softmax(0)).sum())
    probability = 3 * rate * (1 - rate) ** 2
    weight = probability * (1 * 2 / 2 / 3) / (rate * (1 - rate))
    assert torch.allclose(ascent(RATIO, "rloo", RARE, OLDER), weight * solve_rate_gradient(), rtol=0, atol=1e-7)


def test_without_a_ratio_the_direction_is_wrong() -> None:
    assert cosine(ascent(NEITHER, "rloo", RARE, OLDER), solve_rate_gradient()) < 0.98


def test_clipped_ratios_have_another_direction() -> None:
    """The bound of PPO biases the gradient of older tokens, as it does without a replay."""
    found = ascent(PolicyLoss(Ppo(clip_low=0.2, clip_high=0.2)), "rloo", RARE, OLDER)
    assert 0 < cosine(found, solve_rate_gradient()) < 0.999


ACCEPTED = [name for name, method in ESTIMATORS.items() if compares_alone(method.traits)]
"""Estimators with which groups may be replayed."""


def of_equal_rewards(estimator: str, whiten: bool = False) -> np.ndarray:
    """Return the advantages of the response tokens of a group of equal rewards, among other groups."""
    rewards = [1.0, 0.0, 0.0, 0.3, 0.3, 0.3, 1.0, 1.0, 0.0]
    masks = [".x", ".xxx", ".xx", ".x", ".xx", ".xxx", ".xxxxx", ".x", ".xx"]
    built = scores(rewards, [0] * 3 + [1] * 3 + [2] * 3, masks)
    keys = {"pass_k": 2} if estimator == "pass_at_k" else {}
    estimated = advantages(estimator, built, Normalisation(whiten=whiten), keys)
    begin, end = built.sequences.offsets[[3, 6]]
    return estimated[begin:end][built.sequences.response_mask[begin:end]]


@pytest.mark.parametrize("estimator", ACCEPTED)
def test_equal_rewards_teach_accepted_estimators_nothing(estimator: str) -> None:
    assert np.abs(of_equal_rewards(estimator)).max() < 1e-6


def test_equal_rewards_teach_something_after_whitening() -> None:
    """So whitening is refused."""
    assert np.abs(of_equal_rewards("grpo", whiten=True)).max() > 1e-3
    assert "reinforce_plus_plus_baseline" not in ACCEPTED and len(ACCEPTED) >= 6
    assert np.abs(of_equal_rewards("reinforce_plus_plus_baseline")).max() > 1e-3
