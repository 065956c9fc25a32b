"""KL estimators: values, expectations, and their gradients as terms of a loss. Also the controller of the KL
coefficient.
"""

from __future__ import annotations

from math import exp
from statistics import median
from typing import get_args

import pytest
import torch
from torch import Tensor

from roll.algorithms.kl import adapted_coefficient, token_kl
from roll.algorithms.losses import LossInputs
from roll.algorithms.objectives import PolicyLoss
from roll.config.schema.rlvr import RlvrConfig

KL_IN_LOSS = get_args(RlvrConfig.model_fields["kl_loss_type"].annotation)
STALENESS = (0.0, 0.1, 0.5, 1.5)
"""Standard deviations of the logits' changes since the tokens were sampled."""


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_estimators_by_hand() -> None:
    policy, ref = tensor(-1.0, -1.0), tensor(-1.5, -0.5)
    torch.testing.assert_close(token_kl(policy, ref, "k1"), tensor(0.5, -0.5))
    torch.testing.assert_close(token_kl(policy, ref, "k2"), tensor(0.125, 0.125))
    torch.testing.assert_close(token_kl(policy, ref, "k3"), tensor(exp(-0.5) - 0.5, exp(0.5) - 1.5))
    torch.testing.assert_close(token_kl(policy, ref, "abs"), tensor(0.5, 0.5))
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(token_kl(policy, ref, f"{estimator}+"), token_kl(policy, ref, estimator))


def test_k3_is_never_negative_even_where_rounding_rules() -> None:
    d = torch.cat([torch.linspace(-20, 20, 4001), torch.logspace(-9, -1, 200), -torch.logspace(-9, -1, 200)])
    assert (token_kl(torch.zeros_like(d), d, "k3") >= 0).all()


def test_expectations_over_a_categorical_approach_the_true_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, ref = torch.randn(2, 6, dtype=torch.float64, generator=generator).mul(0.7).log_softmax(-1)
    true = (policy.exp() * (policy - ref)).sum()
    for estimator in ("k1", "k3"):
        exact = (policy.exp() * token_kl(policy, ref, estimator)).sum()
        torch.testing.assert_close(exact, true, msg=f"{estimator} is biased")
    samples = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    drawn = {name: token_kl(policy[samples], ref[samples], name) for name in ("k1", "k2", "k3")}
    assert drawn["k3"].mean().item() == pytest.approx(true.item(), rel=0.02)
    assert drawn["k3"].var() < drawn["k1"].var()
    # k2 is biased, but agrees with the KL divergence to second order, so it is accurate near the reference.
    near = (policy + 0.05 * (ref - policy)).log_softmax(-1)
    expected = (policy.exp() * (policy - near)).sum()
    assert (policy.exp() * token_kl(policy, near, "k2")).sum().item() == pytest.approx(expected.item(), rel=0.05)


def test_unknown_kl_estimator_names_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'k4'; known: k1, k2, k3, abs, k1\+, k3\+"):
        token_kl(tensor(0), tensor(0), "k4")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def test_expected_gradient_of_each_kl_estimator(estimator: str) -> None:
    """Exact expectations over a categorical distribution: each token's gradient is weighted by the token's detached
    probability.
    """
    generator = torch.Generator().manual_seed(1)
    ref = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(-1)
    logits = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    policy = logits.log_softmax(-1)
    (policy.detach().exp() * token_kl(policy, ref, estimator)).sum().backward()
    assert logits.grad is not None
    found, logits.grad = logits.grad.clone(), None
    policy = logits.log_softmax(-1)
    match estimator:
        case "k1":
            true = 0 * policy.sum()
        case "k3":
            true = (ref.exp() * (ref - policy)).sum()
        case _:
            true = (policy.exp() * (policy - ref)).sum()
    true.backward()
    assert logits.grad is not None
    torch.testing.assert_close(found, logits.grad)
    assert estimator == "k1" or found.abs().max() > 0.01


def gradients(estimator: str, staleness: float, *, importance: bool, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return the exact gradients with respect to six logits: of the loss's KL term, with tokens of a stale policy, and
    of the KL itself.
    """
    ref, logits, moved = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ref, sampled = ref.log_softmax(-1), (logits + staleness * moved).log_softmax(-1)
    leaf = logits.requires_grad_()
    policy = leaf.log_softmax(-1)
    inputs = LossInputs(torch.zeros(6, dtype=torch.float64), torch.tensor([6]), sampled, ref_log_probs=ref)
    loss = PolicyLoss(kl_coef=1.0, kl_estimator=estimator, kl_importance=importance)
    found = torch.autograd.grad((sampled.exp() * loss(policy, torch.zeros(6), inputs).losses).sum(), leaf)[0]
    policy = leaf.log_softmax(-1)
    return found, torch.autograd.grad((policy.exp() * (policy - ref)).sum(), leaf)[0]


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("estimator", KL_IN_LOSS)
def test_ratio_weighted_kl_estimators_have_exact_gradient(estimator: str, staleness: float) -> None:
    found, true = gradients(estimator, staleness, importance=True)
    assert true.norm() > 0.1
    assert (found - true).abs().max() < 1e-10


def test_unweighted_kl_gradient_errors_match_documentation() -> None:
    def error(estimator: str, staleness: float) -> float:
        pairs = [gradients(estimator, staleness, importance=False, seed=seed) for seed in range(20)]
        return median(float((found - true).norm() / true.norm()) for found, true in pairs)

    assert error("k2", 0.0) < 1e-10
    assert error("k2", 0.1) == pytest.approx(0.06, abs=0.005)
    assert error("k2", 0.5) == pytest.approx(0.31, abs=0.005)
    assert error("k3", 0.0) == pytest.approx(0.54, abs=0.005)
    assert error("k3", 0.1) == pytest.approx(0.50, abs=0.005)
    assert error("k3", 0.5) == pytest.approx(0.53, abs=0.005)


def test_kl_ratio_prefers_the_behaviour_policy() -> None:
    """The ratio is 2 to the behaviour policy and 4 to the proximal policy. The log-ratio to the reference is -1/2, so
    k2 is 1/8.
    """
    log_probs, ref = tensor(-1.0), tensor(-1.0 + 0.5)
    behaviour, proximal = log_probs - tensor(2.0).log(), log_probs - tensor(4.0).log()
    loss = PolicyLoss(kl_coef=1.0, kl_estimator="k2", kl_importance=True)
    for given, ratio in (((behaviour, proximal), 2.0), ((None, proximal), 4.0)):
        inputs = LossInputs(tensor(0.0), torch.tensor([1]), *given, ref_log_probs=ref)
        assert loss(log_probs, tensor(0.0), inputs).losses.item() == pytest.approx(ratio * 0.125)
    alone = PolicyLoss(kl_coef=1.0, kl_estimator="k2", kl_importance=True, on_policy=True)
    said = alone(log_probs, tensor(0.0), LossInputs(tensor(0.0), torch.tensor([1]), ref_log_probs=ref))
    assert said.losses.item() == pytest.approx(0.125)
    assert said.metrics["policy/kl_ref"].item() == pytest.approx(0.125), "the metric must not be weighted"


def test_the_weight_follows_the_kl_within_bounds() -> None:
    # The KL is 10% above the target, after 50 responses of a horizon of 1000: the factor is 1 + 0.1 / 20.
    assert adapted_coefficient(0.2, kl=0.11, target=0.1, samples=50, horizon=1000) == pytest.approx(0.2 * 1.005)
    assert adapted_coefficient(0.2, kl=9.0, target=0.1, samples=50, horizon=1000) == pytest.approx(0.2 * 1.01)
    assert adapted_coefficient(0.2, kl=-1.0, target=0.1, samples=50, horizon=1000) == pytest.approx(0.2 * 0.99)
    assert adapted_coefficient(0.2, kl=0.1, target=0.1, samples=50, horizon=1000) == pytest.approx(0.2)


def test_adaptive_kl_weight_reaches_its_target() -> None:
    weight, kl = 0.5, 0.0
    for _ in range(400):
        kl = 0.01 / weight
        weight = adapted_coefficient(weight, kl, target=0.1, samples=512, horizon=5000)
    assert kl == pytest.approx(0.1, rel=0.01)
