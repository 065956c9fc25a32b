"""Corrections for the mismatch of engine and trainer: by hand, against the formulas in float64, and within the policy
loss.
"""

from __future__ import annotations

import itertools
import pickle
from math import exp, log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.corrections import Correction
from roll.algorithms.losses import LossInputs
from roll.algorithms.methods import CORRECTIONS as METHODS
from roll.algorithms.methods import Level
from roll.algorithms.objectives import PolicyGradient, PolicyLoss, Ppo

PRESETS = {name: method.traits for name, method in METHODS.items() if name != "none"}
INFINITY = float("inf")
CORRECTIONS = {
    name: Correction(one.weight, one.cap, one.reject, one.low or 0.0, INFINITY if one.high is None else one.high)
    for name, one in PRESETS.items()
}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


RATIOS = [4.0, 0.5, 1.0, 1.001, 0.25, 0.4]
LENGTHS = [3, 1, 2]
"""Lengths of the sequences. The products of their ratios are 2, 1.001 and 0.1; the geometric means are `ROOTS`."""
ROOTS = [2 ** (1 / 3)] * 3 + [1.001] + [0.1**0.5] * 2
BY_HAND = {
    "tis": [2, 0.5, 1, 1.001, 0.25, 0.4],
    "icepop": [4, 0.5, 1, 1.001, 0, 0],
    "seq_tis": [2, 2, 2, 1.001, 0.1, 0.1],
    "seq_mis": [2, 2, 2, 1.001, 0, 0],
    "geo_tis": ROOTS,
    "token_rs": [0, 1, 1, 1, 0, 0],
    "seq_rs": [1, 1, 1, 1, 0, 0],
    "geo_rs": [0, 0, 0, 1, 0, 0],
    "geo_rs_tis": [0, 0, 0, 1.001, 0, 0],
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_by_hand(name: str) -> None:
    # Ratios that equal a bound are moved slightly inside it.
    ratios = tensor(*RATIOS) * torch.where(tensor(*RATIOS) == 0.5, 1 + 1e-12, 1 - 1e-12)
    said = CORRECTIONS[name](ratios.log(), torch.tensor(LENGTHS))
    torch.testing.assert_close(said.weights, tensor(*BY_HAND[name]), rtol=1e-9, atol=1e-9)


def test_every_preset_has_its_numbers() -> None:
    assert BY_HAND.keys() == PRESETS.keys()


def test_metrics_count_tokens() -> None:
    said = Correction(weight="token", cap=2.0, reject="sequence", low=0.5, high=3.0)(
        tensor(*RATIOS).log(), torch.tensor(LENGTHS)
    )
    assert said.metrics["mismatch/capped_fraction"].tolist() == [1, 0, 0, 0, 0, 0]
    assert said.metrics["mismatch/rejected_fraction"].tolist() == [0, 0, 0, 0, 1, 1]
    torch.testing.assert_close(said.metrics["mismatch/weight"], tensor(2, 0.5, 1, 1.001, 0, 0))


@pytest.mark.parametrize("name", PRESETS)
def test_where_trainer_and_engine_agree_nothing_is_changed(name: str) -> None:
    said = CORRECTIONS[name](torch.zeros(6), torch.tensor(LENGTHS))
    assert (said.weights == 1).all()
    assert not said.metrics["mismatch/rejected_fraction"].any()
    assert not said.metrics["mismatch/capped_fraction"].any()


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("delta", [50.0, -50.0])
def test_no_difference_is_too_large(name: str, delta: float) -> None:
    weights = CORRECTIONS[name](torch.full((100,), delta), torch.tensor([100])).weights
    assert torch.isfinite(weights).all()
    bounded = {"tis": 2.0, "seq_tis": 2.0, "geo_tis": 2.0}.get(name, 0.0)
    assert weights.max() == pytest.approx(bounded if delta > 0 else 0.0, abs=1e-20)


def reference(correction: Correction, delta: list[float]) -> list[float]:
    """Return the weights of one sequence by the formula, token by token."""
    product = exp(sum(delta))
    rho = {
        "token": [exp(x) for x in delta],
        "sequence": [product] * len(delta),
        "geometric": [product ** (1 / len(delta))] * len(delta),
    }
    weights = rho[correction.weight] if correction.weight else [1.0] * len(delta)
    weights = [weight if correction.cap is None else min(weight, correction.cap) for weight in weights]
    if correction.reject:
        weights = [
            w if correction.low <= judged <= correction.high else 0.0
            for w, judged in zip(weights, rho[correction.reject], strict=True)
        ]
    return weights


@given(
    rows=st.lists(st.lists(st.floats(-2, 2), max_size=5), min_size=1, max_size=6).filter(any),
    name=st.sampled_from(sorted(PRESETS)),
)
def test_against_the_formula_in_float64(rows: list[list[float]], name: str) -> None:
    correction = CORRECTIONS[name]
    said = correction(tensor(*itertools.chain(*rows)), torch.tensor([len(row) for row in rows]))
    expected = [weight for row in rows if row for weight in reference(correction, row)]
    torch.testing.assert_close(said.weights, tensor(*expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_verls_bounds_are_those_of_the_inverse(ours: Level, theirs: str) -> None:
    """verl keeps a token if k1 = -log ratio, or its sum or mean over the sequence, is between log bounds (see
    docs/algorithms.md).
    """
    low, high = 0.7, 1.1
    lengths = [1, 3, 2, 1, 4]
    delta = 0.3 * torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected: list[bool] = []
    for part in delta.split(lengths):
        k1 = {"token_k1": -part, "seq_sum_k1": -part.sum() + 0 * part, "seq_mean_k1": -part.mean() + 0 * part}[theirs]
        expected += [log(low) <= value <= log(high) for value in k1.tolist()]
    weights = Correction(reject=ours, low=1 / high, high=1 / low)(delta, torch.tensor(lengths)).weights
    assert (weights == 1).tolist() == expected
    assert any(expected) and not all(expected)


def decoupled(loss: PolicyLoss, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return loss and gradient. Every log-prob is log 1/2 under the behaviour policy and log 3/4 under the proximal
    policy.
    """
    leaf = log_probs.clone().requires_grad_()
    behaviour, proximal = torch.full_like(log_probs, log(0.5)), torch.full_like(log_probs, log(0.75))
    inputs = LossInputs(torch.ones_like(log_probs), torch.tensor([len(log_probs)]), behaviour, proximal)
    said = loss(leaf, torch.zeros_like(leaf), inputs)
    said.losses.sum().backward()
    assert leaf.grad is not None
    return said.losses.detach(), leaf.grad


def test_decoupled_ppo_clips_around_proximal_policy() -> None:
    # Current 0.75 and 0.99: the ratios to the proximal 0.75 are 1 and 1.32, clipped to 1.2. Both have the weight 0.75 /
    # 0.5 = 1.5.
    losses, gradient = decoupled(PolicyLoss(Ppo(), Correction(weight="token", cap=5.0)), tensor(log(0.75), log(0.99)))
    torch.testing.assert_close(losses, tensor(-1.5, -1.8))
    torch.testing.assert_close(gradient, tensor(-1.5, 0))
    # The ratio to the behaviour policy, 1.5, would be clipped to 1.2. The weight is capped at 1.25.
    capped, _ = decoupled(PolicyLoss(Ppo(), Correction(weight="token", cap=1.25)), tensor(log(0.75)))
    torch.testing.assert_close(capped, tensor(-1.25))


def test_on_policy_correction_weight_carries_no_gradient() -> None:
    loss = PolicyLoss(Ppo(), Correction(weight="token", cap=5.0), on_policy=True)
    losses, gradient = decoupled(loss, tensor(log(0.6), log(0.9)))
    # The ratio is 1, so the loss is minus the weight, which is the current probability divided by the behaviour
    # policy's.
    torch.testing.assert_close(losses, tensor(-1.2, -1.8))
    torch.testing.assert_close(gradient, tensor(-1.2, -1.8))


def test_on_policy_needs_no_log_probs_of_anybody() -> None:
    leaf = tensor(-1, -2).requires_grad_()
    said = PolicyLoss(on_policy=True)(leaf, torch.zeros(2), LossInputs(tensor(3, -1), torch.tensor([2])))
    said.losses.sum().backward()
    assert said.metrics["policy/ratio"].tolist() == [1, 1]
    assert said.losses.tolist() == [-3, 1]
    assert leaf.grad is not None and leaf.grad.tolist() == [-3, 1]


def test_rejected_token_keeps_only_its_kl_gradient() -> None:
    loss = PolicyLoss(
        PolicyGradient(), Correction(reject="token", low=0.5, high=2.0), on_policy=True, kl_coef=0.5, kl_estimator="k1"
    )
    leaf = tensor(-1, -1).requires_grad_()
    inputs = LossInputs(tensor(4, 4), torch.tensor([2]), tensor(-1, -3), ref_log_probs=tensor(-1, -1))
    loss(leaf, torch.zeros(2), inputs).losses.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, tensor(-4 + 0.5, 0.5))


def test_stale_tokens_weigh_by_their_own_versions() -> None:
    """Tokens sampled by older versions carry those versions' log-probs, so the correction measures how far the policy
    has moved.
    """
    proximal = torch.full((3,), log(0.8), dtype=torch.float64)
    behaviour = tensor(log(0.8), log(0.6), log(0.4))
    weights = Correction(weight="token", cap=10.0)(proximal - behaviour, torch.tensor([3])).weights
    torch.testing.assert_close(weights, tensor(1, 0.8 / 0.6, 2))


@pytest.mark.parametrize("name", PRESETS)
def test_corrections_travel_to_workers(name: str) -> None:
    assert pickle.loads(pickle.dumps(CORRECTIONS[name])) == CORRECTIONS[name]
