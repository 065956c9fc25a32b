"""Off-policy sequence masking: against its formula in plain Python, with several objectives, and with extreme
log-ratios.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roll.algorithms.losses import LossInputs
from roll.algorithms.objectives import Dppo, Gspo, Objective, PolicyGradient, PolicyLoss, Ppo, Sapo

LENGTHS = [4, 1, 0, 7, 3]
OBJECTIVES: list[Objective] = [Ppo(), PolicyGradient(), Gspo(0.05, 0.1), Sapo(), Dppo()]
each = pytest.mark.parametrize("objective", OBJECTIVES, ids=str)


def tokens(seed: int = 2) -> tuple[Tensor, LossInputs]:
    """Return log-probs of the current policy, and inputs with nearby ones of the engine, the proximal policy and the
    reference.
    """
    generator = torch.Generator().manual_seed(seed)
    scale, engine, before, reference, advantages = torch.randn(
        5, sum(LENGTHS), dtype=torch.float64, generator=generator
    )
    log_probs = -1.0 - scale.abs()
    given = (
        advantages,
        torch.tensor(LENGTHS),
        log_probs + 0.3 * engine,
        log_probs + 0.2 * before,
        log_probs + 0.3 * reference,
    )
    return log_probs.requires_grad_(), LossInputs(*given)


def masked_by_hand(log_probs: Tensor, sampled: Tensor, advantages: Tensor, threshold: float) -> list[bool]:
    """Return, for each token of all sequences in order, whether the paper's formula masks it."""
    bounds, out = [0, *itertools.accumulate(LENGTHS)], []
    for begin, end in itertools.pairwise(bounds):
        apart = [old - new for old, new in zip(sampled[begin:end].tolist(), log_probs[begin:end].tolist(), strict=True)]
        out += [a < 0 and sum(apart) / len(apart) > threshold for a in advantages[begin:end].tolist()]
    return out


@each
@pytest.mark.parametrize("engine", [True, False])
def test_off_policy_mask_removes_only_masked_tokens(objective: Objective, engine: bool) -> None:
    log_probs, inputs = tokens()
    if not engine:
        inputs = replace(inputs, behaviour_log_probs=None)
    sampled = inputs.behaviour_log_probs if engine else inputs.proximal_log_probs
    assert sampled is not None
    expected = masked_by_hand(log_probs, sampled, inputs.advantages, 0.02)
    assert 0 < sum(expected) < sum(LENGTHS)
    terms = {"kl_coef": 0.1, "kl_estimator": "k2", "entropy_coef": 0.01}
    plain, masking = PolicyLoss(objective, **terms), PolicyLoss(objective, mask_threshold=0.02, **terms)
    without = PolicyLoss(PolicyGradient(), **terms)
    zero = replace(inputs, advantages=torch.zeros_like(inputs.advantages))  # only the KL and entropy terms

    def of(loss: PolicyLoss, given: LossInputs) -> tuple[Tensor, Tensor]:
        losses = loss(log_probs, log_probs.exp(), given).losses
        return losses.detach(), torch.autograd.grad(losses.sum(), log_probs)[0]

    chosen = torch.tensor(expected)
    for ours, usual, rest in zip(of(masking, inputs), of(plain, inputs), of(without, zero), strict=True):
        assert torch.equal(ours, torch.where(chosen, rest, usual))
    said = masking(log_probs, log_probs.exp(), inputs)
    assert said.metrics["policy/off_policy_masked_fraction"].tolist() == [float(one) for one in expected]


def test_by_hand() -> None:
    """Two sequences have become less likely, by 0.6 and by 0.4 nats per token. Only in the first are tokens with A < 0
    masked.
    """
    log_probs = torch.tensor([-2.0, -2.2, -1.4, -1.4])
    inputs = LossInputs(
        torch.tensor([-1.0, 1.0, -1.0, -1.0]), torch.tensor([2, 2]), torch.tensor([-1.0, -2.0, -1.0, -1.0])
    )
    losses = PolicyLoss(PolicyGradient(), mask_threshold=0.5)(log_probs, log_probs, inputs).losses
    torch.testing.assert_close(losses, torch.tensor([0.0, 2.2, -1.4, -1.4]))


def test_a_threshold_that_nothing_reaches_changes_no_bit() -> None:
    log_probs, inputs = tokens(1)
    plain, masking = (
        PolicyLoss(kl_coef=0.1)(log_probs, log_probs, inputs),
        PolicyLoss(kl_coef=0.1, mask_threshold=1e9)(log_probs, log_probs, inputs),
    )
    assert torch.equal(plain.losses, masking.losses)
    assert "policy/off_policy_masked_fraction" not in plain.metrics


@pytest.mark.parametrize("far", [-3e4, -100.0, 100.0, 3e4])
def test_log_ratios_beyond_all_measure_stay_finite(far: float) -> None:
    advantages = torch.tensor([-2.0, 0.0, 2.0])
    log_probs = torch.full((3,), -2.0).requires_grad_()
    behaviour = log_probs.detach() - far
    said = PolicyLoss(mask_threshold=0.5)(
        log_probs, log_probs, LossInputs(advantages, torch.ones(3, dtype=torch.int64), behaviour)
    )
    said.losses.sum().backward()
    assert log_probs.grad is not None and torch.isfinite(said.losses).all() and torch.isfinite(log_probs.grad).all()
    assert said.metrics["policy/off_policy_masked_fraction"].tolist() == [float(far < 0), 0, 0]
    assert far > 0 or log_probs.grad[0] == 0
