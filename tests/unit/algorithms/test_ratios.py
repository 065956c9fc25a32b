"""Extreme log-ratios: losses and gradients stay finite, and other tokens and smaller ratios are not changed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import exp

import pytest
import torch
from torch import Tensor

from roll.algorithms.corrections import Correction
from roll.algorithms.kl import token_kl
from roll.algorithms.losses import LossInputs
from roll.algorithms.methods import CORRECTIONS
from roll.algorithms.objectives import (
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    Objective,
    PolicyGradient,
    PolicyLoss,
    Ppo,
    Sapo,
    Topr,
)
from roll.algorithms.ratios import ratio_of

OBJECTIVES: list[Objective] = [
    *(
        Ppo(),
        Ppo(dual_clip=3.0),
        PolicyGradient(),
        Gspo(),
        Gmpo(),
        Cispo(),
        Sapo(),
        Dppo(),
        Dppo("kl", 0.05),
        Topr(),
        ClipCov(),
        KlCov(),
    )
]
PRESETS = {name: method.traits for name, method in CORRECTIONS.items() if name != "none"}
FAR = (-3e4, -400.0, -90.0, -21.0, 0.0, 21.0, 90.0, 400.0, 3e4)
"""Log-ratios; in fp32 exp(89) is infinite."""
ROWS = list(itertools.product(FAR, (-2.0, 0.0, 2.0)))


def update(loss: PolicyLoss, log_ratios: Tensor, advantages: Tensor, *, far: str) -> tuple[Tensor, Tensor, LossInputs]:
    """Return losses, gradient and inputs in fp32. Each token is a sequence.

    The log-probs named `far` differ from the policy's by the log-ratios; the other log-probs are equal to the policy's.
    """
    log_probs = torch.full_like(log_ratios, -2.0).requires_grad_()
    near, away = log_probs.detach().clone(), log_probs.detach() - log_ratios
    given = {
        name: away if name == far else near for name in ("behaviour_log_probs", "proximal_log_probs", "ref_log_probs")
    }
    lengths, selected = torch.ones(len(log_ratios), dtype=torch.int64), torch.zeros(len(log_ratios), dtype=torch.bool)
    inputs = LossInputs(advantages, lengths, token_selection=selected, **given)
    said = loss(log_probs, torch.zeros_like(log_probs), inputs)
    said.losses.sum().backward()
    assert log_probs.grad is not None
    assert all(torch.isfinite(values).all() for values in said.metrics.values())
    torch.testing.assert_close(said.metrics["policy/clamped_fraction"].bool(), clamped(loss, log_ratios, far))
    return said.losses.detach(), log_probs.grad, inputs


def clamped(loss: PolicyLoss, log_ratios: Tensor, far: str) -> Tensor:
    match far:
        case "proximal_log_probs":
            return log_ratios > 20
        case "behaviour_log_probs":
            return (log_ratios > 20) & loss.kl_importance
        case _:  # of the reference to the policy
            return (log_ratios < -20) & loss.kl_estimator.startswith("k3")


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_losses_and_gradients_are_finite_at_extreme_ratios(objective: Objective) -> None:
    log_ratios, advantages = torch.tensor(ROWS).T
    losses, gradient, _ = update(PolicyLoss(objective), log_ratios, advantages, far="proximal_log_probs")
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()
    assert not gradient[advantages == 0].any()


@pytest.mark.parametrize("name", PRESETS)
def test_correction_weights_are_finite_and_rejection_stops_gradient(name: str) -> None:
    one = PRESETS[name]
    log_ratios, advantages = torch.tensor(ROWS).T
    for far in ("proximal_log_probs", "behaviour_log_probs"):
        loss = PolicyLoss(Ppo(), Correction(one.weight, one.cap, one.reject, one.low or 0.0, one.high or float("inf")))
        losses, gradient, inputs = update(loss, log_ratios, advantages, far=far)
        assert torch.isfinite(losses).all() and torch.isfinite(gradient).all()
        assert (
            loss.correction is not None
            and inputs.behaviour_log_probs is not None
            and inputs.proximal_log_probs is not None
        )
        weights = loss.correction(inputs.proximal_log_probs - inputs.behaviour_log_probs, inputs.lengths).weights
        assert torch.isfinite(weights).all()
        if one.reject:
            assert (weights == 0).any() and not gradient[weights == 0].any()


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
@pytest.mark.parametrize("far", ["ref_log_probs", "behaviour_log_probs"])
def test_every_kl_is_finite(far: str, estimator: str, importance: bool) -> None:
    loss = PolicyLoss(Ppo(), kl_coef=0.1, kl_estimator=estimator, kl_importance=importance)
    log_ratios, advantages = torch.tensor(ROWS).T
    losses, gradient, _ = update(loss, log_ratios, advantages, far=far)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(gradient).all()


def test_clipped_token_with_extreme_ratio_has_bounded_loss() -> None:
    """With A = 1, the clip bounds the loss at -1.2, however large the ratio. With A = -1, only the bound e^20 on ratios
    applies.
    """
    losses, gradient, _ = update(
        PolicyLoss(), torch.tensor([400.0, 400.0]), torch.tensor([1.0, -1.0]), far="proximal_log_probs"
    )
    assert losses.tolist() == pytest.approx([-1.2, exp(20)])
    assert gradient.tolist() == [0, 0]


def test_below_the_bound_nothing_changes_by_a_bit() -> None:
    values = 4 * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    ours, plain = (values.clone().requires_grad_() for _ in range(2))
    assert values.max() < 20
    ratio_of(ours).sum().backward()
    plain.exp().sum().backward()
    assert torch.equal(ratio_of(values), values.exp())
    assert ours.grad is not None and plain.grad is not None and torch.equal(ours.grad, plain.grad)
    assert torch.equal(token_kl(torch.zeros_like(values), values, "k3"), torch.expm1(values) - values)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_a_token_far_off_changes_no_other_sequence(objective: Objective) -> None:
    log_ratios, advantages = torch.tensor([0.1, -0.3, 400.0]), torch.tensor([1.0, -1.0, 1.0])
    loss = replace(PolicyLoss(), objective=objective)
    _, alone, _ = update(loss, log_ratios[:2], advantages[:2], far="proximal_log_probs")
    _, beside, _ = update(loss, log_ratios, advantages, far="proximal_log_probs")
    assert torch.equal(beside[:2], alone)
