"""The policy loss with PPO, and the negative log-likelihood: by hand, against the formulas in float64, and by their
gradients.
"""

from __future__ import annotations

import pickle
from math import exp, log

import pytest
import torch
from torch import Tensor

from roll.algorithms.losses import Loss, LossInputs, NegativeLogLikelihood
from roll.algorithms.objectives import PolicyLoss, Ppo


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(advantages: Tensor, behaviour: Tensor | None, ref: Tensor | None = None) -> LossInputs:
    """Return the inputs of one sequence."""
    return LossInputs(advantages, torch.tensor([len(advantages)]), behaviour, ref_log_probs=ref)


def loss_of(
    loss: Loss, ratios: list[float], advantages: list[float], ref: Tensor | None = None, entropy: Tensor | None = None
) -> Tensor:
    """Return the token losses for these ratios of the policy's probabilities to the behaviour policy's."""
    behaviour = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    log_probs = behaviour + tensor(*ratios).log()
    entropy = torch.zeros_like(log_probs) if entropy is None else entropy
    return loss(log_probs, entropy, inputs_of(tensor(*advantages), behaviour, ref)).losses


def test_the_clip_by_hand() -> None:
    # With A = 1, the loss is flat for ratios above 1.2; with A = -1, below 0.8. On the other side it is not clipped.
    got = loss_of(PolicyLoss(Ppo(0.2, 0.2)), [1, 1.1, 1.5, 0.5, 1.5, 0.5], [1, 1, 1, 1, -1, -1])
    torch.testing.assert_close(got, tensor(-1, -1.1, -1.2, -0.5, 1.5, 0.8))


def test_the_clip_has_two_bounds() -> None:
    got = loss_of(PolicyLoss(Ppo(0.1, 0.3)), [1.5, 1.25, 0.5, 0.95], [2, 2, -2, -2])
    torch.testing.assert_close(got, tensor(-2.6, -2.5, 1.8, 1.9))


def test_dual_clip_bounds_loss_of_negative_advantages() -> None:
    got = loss_of(PolicyLoss(Ppo(dual_clip=3.0)), [2.5, 4, 100, 0.5, 100], [-1, -1, -2, -1, 1])
    torch.testing.assert_close(got, tensor(2.5, 3, 6, 0.8, -1.2))


def test_clip_fraction_counts_tokens_whose_clip_applies() -> None:
    behaviour = torch.zeros(4, dtype=torch.float64)
    inputs = inputs_of(tensor(1, 1, -1, -1), behaviour, None)
    metrics = PolicyLoss()(tensor(log(1.5), log(0.5), log(1.5), log(0.5)), behaviour, inputs).metrics
    assert metrics["policy/clip_fraction"].tolist() == [1, 0, 0, 1]
    dual = PolicyLoss(Ppo(dual_clip=1.4))(tensor(log(1.5), log(0.5), log(1.5), log(0.5)), behaviour, inputs).metrics
    assert dual["policy/clip_fraction"].tolist() == [1, 0, 1, 1], "the dual clip counts as a clip, too"
    torch.testing.assert_close(metrics["policy/ratio"], tensor(1.5, 0.5, 1.5, 0.5))
    # k3 of d = log(policy / behaviour) = log r: r - 1 - log r.
    torch.testing.assert_close(metrics["policy/kl_behaviour"][:2], tensor(1.5 - 1 - log(1.5), 0.5 - 1 - log(0.5)))


def test_policy_kl_metric_is_unbiased_over_samples() -> None:
    """Exact expectation over a categorical distribution, with the behaviour policy's probabilities. The current policy
    is far from it.
    """
    behaviour, policy = tensor(2, 1, 0, -1).log_softmax(-1), tensor(-3, 1, 1, 2).log_softmax(-1)
    said = PolicyLoss()(policy, tensor(0, 0, 0, 0), inputs_of(tensor(1, 1, 1, 1), behaviour))
    expected = (behaviour.exp() * (behaviour - policy)).sum()
    torch.testing.assert_close((behaviour.exp() * said.metrics["policy/kl_behaviour"]).sum(), expected)


def test_kl_and_entropy_terms_by_hand() -> None:
    ref = tensor(-3.0, -1.0)
    loss = PolicyLoss(kl_coef=0.5, kl_estimator="k3", entropy_coef=0.1)
    got = loss_of(loss, [1, 1], [1, -1], ref, tensor(2.0, 4.0))
    # d = ref - policy = -1 and 1; k3 = exp(d) - 1 - d.
    torch.testing.assert_close(got, tensor(-1 + 0.5 * exp(-1) - 0.2, 1 + 0.5 * (exp(1) - 2) - 0.4))


def test_a_reference_without_a_coefficient_is_only_measured() -> None:
    ref = tensor(-3.0)
    assert loss_of(PolicyLoss(), [1], [1], ref).item() == pytest.approx(-1)
    log_probs = tensor(-2.0)
    metrics = PolicyLoss(kl_estimator="k1")(log_probs, tensor(0.5), inputs_of(tensor(1), log_probs, ref)).metrics
    assert metrics["policy/kl_ref"].item() == pytest.approx(1.0)
    assert metrics["policy/entropy"].item() == 0.5
    assert "policy/kl_ref" not in PolicyLoss()(log_probs, tensor(0.5), inputs_of(tensor(1), log_probs, None)).metrics


def test_metrics_carry_no_gradient() -> None:
    log_probs = tensor(-2.0, -1.0).requires_grad_()
    inputs = inputs_of(tensor(1, -1), tensor(-2, -2), tensor(-3, -1))
    for loss in (PolicyLoss(kl_coef=0.1, entropy_coef=0.1), NegativeLogLikelihood()):
        said = loss(log_probs, log_probs * 2, inputs)
        assert said.losses.requires_grad
        assert not any(values.requires_grad for values in said.metrics.values())
        assert all(values.shape == (2,) for values in said.metrics.values())


def test_negative_log_likelihood_is_what_it_says() -> None:
    inputs = inputs_of(tensor(7, 7), tensor(0, 0), None)
    said = NegativeLogLikelihood()(tensor(-0.5, -3), tensor(1, 2), inputs)
    assert said.losses.tolist() == [0.5, 3]
    assert said.metrics["sft/loss"].tolist() == [0.5, 3]


def reference_formula(loss: PolicyLoss, log_probs: Tensor, entropy: Tensor, inputs: LossInputs) -> list[float]:
    """Return what `loss` must return: the losses, token by token and by cases, from the papers' formulas."""
    out = []
    assert inputs.ref_log_probs is not None
    assert inputs.behaviour_log_probs is not None
    ppo = loss.objective
    assert isinstance(ppo, Ppo)
    rows = zip(log_probs.tolist(), inputs.advantages.tolist(), inputs.behaviour_log_probs.tolist(), strict=True)
    for (policy, advantage, behaviour), ref, uncertainty in zip(
        rows, inputs.ref_log_probs.tolist(), entropy.tolist(), strict=True
    ):
        ratio = exp(policy - behaviour)
        if advantage >= 0:
            objective = advantage * min(ratio, 1 + ppo.clip_high)
        else:
            objective = advantage * max(ratio, 1 - ppo.clip_low)
            if ppo.dual_clip is not None:
                objective = max(objective, ppo.dual_clip * advantage)
        d = ref - policy
        kl = {"k1": -d, "k2": d * d / 2, "k3": exp(d) - 1 - d}[loss.kl_estimator]
        out.append(-objective + loss.kl_coef * kl - loss.entropy_coef * uncertainty)
    return out


LOSSES = [
    PolicyLoss(),
    PolicyLoss(Ppo(0.1, 0.4)),
    PolicyLoss(Ppo(dual_clip=1.5)),
    PolicyLoss(kl_coef=0.3, kl_estimator="k1"),
    PolicyLoss(kl_coef=0.3, kl_estimator="k2", entropy_coef=0.2),
    PolicyLoss(Ppo(0.3, dual_clip=2.0), kl_coef=0.7, kl_estimator="k3", entropy_coef=-0.1),
]


def random_tokens(count: int) -> tuple[Tensor, Tensor, LossInputs]:
    generator = torch.Generator().manual_seed(3)
    log_probs, behaviour, ref, advantages = torch.randn(4, count, dtype=torch.float64, generator=generator)
    entropy = torch.rand(count, dtype=torch.float64, generator=generator)
    return log_probs, entropy, inputs_of(advantages, behaviour, ref)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_against_the_papers_formula_in_float64(loss: PolicyLoss) -> None:
    log_probs, entropy, inputs = random_tokens(500)
    expected = reference_formula(loss, log_probs, entropy, inputs)
    torch.testing.assert_close(loss(log_probs, entropy, inputs).losses, tensor(*expected))


@pytest.mark.parametrize("loss", [*LOSSES, NegativeLogLikelihood()], ids=str)
def test_gradients_against_finite_differences(loss: Loss) -> None:
    log_probs, entropy, inputs = random_tokens(60)
    assert torch.autograd.gradcheck(
        lambda policy, uncertainty: loss(policy, uncertainty, inputs).losses,
        (log_probs.requires_grad_(), entropy.requires_grad_()),
        eps=1e-7,
        atol=1e-5,
    )


def test_a_clipped_token_has_no_gradient() -> None:
    log_probs = tensor(log(1.5), log(0.5), log(5)).requires_grad_()
    inputs = inputs_of(tensor(1, -1, -1), torch.zeros(3, dtype=torch.float64), None)
    PolicyLoss(Ppo(dual_clip=3.0))(log_probs, torch.zeros(3), inputs).losses.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize("loss", [*LOSSES, NegativeLogLikelihood()], ids=str)
def test_losses_travel_to_workers(loss: Loss) -> None:
    assert pickle.loads(pickle.dumps(loss)) == loss
