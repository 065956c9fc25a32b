"""KL estimators: values, expectations, and the gradients they have as terms of a loss; the controller of the weight."""

from __future__ import annotations

from math import exp

import pytest
import torch
from torch import Tensor

from roll.algorithms.kl import adapted_coefficient, kl_estimate


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_estimators_by_hand() -> None:
    policy, ref = tensor(-1.0, -1.0), tensor(-1.5, -0.5)
    torch.testing.assert_close(kl_estimate(policy, ref, "k1"), tensor(0.5, -0.5))
    torch.testing.assert_close(kl_estimate(policy, ref, "k2"), tensor(0.125, 0.125))
    torch.testing.assert_close(kl_estimate(policy, ref, "k3"), tensor(exp(-0.5) - 0.5, exp(0.5) - 1.5))
    torch.testing.assert_close(kl_estimate(policy, ref, "abs"), tensor(0.5, 0.5))
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(kl_estimate(policy, ref, f"{estimator}+"), kl_estimate(policy, ref, estimator))


def test_k3_is_never_negative_even_where_rounding_rules() -> None:
    d = torch.cat([torch.linspace(-20, 20, 4001), torch.logspace(-9, -1, 200), -torch.logspace(-9, -1, 200)])
    assert (kl_estimate(torch.zeros_like(d), d, "k3") >= 0).all()


def test_expectations_over_a_categorical_approach_the_true_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, ref = torch.randn(2, 6, dtype=torch.float64, generator=generator).mul(0.7).log_softmax(-1)
    true = (policy.exp() * (policy - ref)).sum()
    for estimator in ("k1", "k3"):
        exact = (policy.exp() * kl_estimate(policy, ref, estimator)).sum()
        torch.testing.assert_close(exact, true, msg=f"{estimator} is biased")
    samples = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    drawn = {name: kl_estimate(policy[samples], ref[samples], name) for name in ("k1", "k2", "k3")}
    assert drawn["k3"].mean().item() == pytest.approx(true.item(), rel=0.02)
    assert drawn["k3"].var() < drawn["k1"].var()
    # k2 is biased, but right to second order: near the reference it agrees.
    near = (policy + 0.05 * (ref - policy)).log_softmax(-1)
    expected = (policy.exp() * (policy - near)).sum()
    assert (policy.exp() * kl_estimate(policy, near, "k2")).sum().item() == pytest.approx(expected.item(), rel=0.05)


def test_an_unknown_estimator_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'k4'; known: k1, k2, k3, abs, k1\+, k3\+"):
        kl_estimate(tensor(0), tensor(0), "k4")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k1+", "k3+"])
def test_the_expected_gradient_of_each_estimator_as_a_term_of_a_loss(estimator: str) -> None:
    """Exact expectations over a categorical: every token's gradient counts with the token's probability, which has none."""
    generator = torch.Generator().manual_seed(1)
    ref = torch.randn(6, dtype=torch.float64, generator=generator).log_softmax(-1)
    logits = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    policy = logits.log_softmax(-1)
    (policy.detach().exp() * kl_estimate(policy, ref, estimator)).sum().backward()
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


def test_the_weight_follows_the_kl_within_bounds() -> None:
    # Ten percent above the target, 50 of 1000 responses: 1 + 0.1 / 20.
    assert adapted_coefficient(0.2, kl=0.11, target=0.1, samples=50, horizon=1000) == pytest.approx(0.2 * 1.005)
    assert adapted_coefficient(0.2, kl=9.0, target=0.1, samples=50, horizon=1000) == pytest.approx(0.2 * 1.01)
    assert adapted_coefficient(0.2, kl=-1.0, target=0.1, samples=50, horizon=1000) == pytest.approx(0.2 * 0.99)
    assert adapted_coefficient(0.2, kl=0.1, target=0.1, samples=50, horizon=1000) == pytest.approx(0.2)


def test_a_policy_that_answers_to_the_weight_comes_to_its_target() -> None:
    weight, kl = 0.5, 0.0
    for _ in range(400):
        kl = 0.01 / weight
        weight = adapted_coefficient(weight, kl, target=0.1, samples=512, horizon=5000)
    assert kl == pytest.approx(0.1, rel=0.01)
