"""Every policy objective: by hand, against the papers' formulas in float64, and by its gradient."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from math import exp, fsum, log
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.algorithms.objectives import (
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    Objective,
    PolicyGradient,
    PolicyTokens,
    Ppo,
    Sapo,
    Topr,
    binary_divergence,
)
from tests.unit.algorithms.losses_by_hand import Row, formula

OBJECTIVES: list[Objective] = [
    Ppo(),
    Ppo(0.1, 0.4, dual_clip=1.5),
    PolicyGradient(),
    Gspo(0.05, 0.1),
    Gmpo(0.3, 0.5),
    Cispo(0.2, 0.4),
    Cispo(1.0, 2.0),
    Sapo(0.8, 1.4),
    Dppo(threshold=0.02),
    Dppo("kl", 0.005),
    Topr(0.7, 1.3),
    ClipCov(0.2, 0.3),
    KlCov(coef=0.6),
]
each = pytest.mark.parametrize("objective", OBJECTIVES, ids=str)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def of_ratios(
    ratios: list[float], advantages: list[float], lengths: list[int], token_selection: list[bool] | None = None
) -> PolicyTokens:
    """Return tokens with these ratios of the current to the old probability. The old probability is exp(-2)."""
    old = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    chosen = None if token_selection is None else torch.tensor(token_selection)
    return PolicyTokens(old + tensor(*ratios).log(), old, tensor(*advantages), torch.tensor(lengths), chosen)


def random_tokens(lengths: list[int], seed: int = 3) -> PolicyTokens:
    generator = torch.Generator().manual_seed(seed)
    scale, noise, advantages = torch.randn(3, sum(lengths), dtype=torch.float64, generator=generator)
    log_probs = -1.5 - scale.abs()
    token_selection = torch.rand(sum(lengths), generator=generator) < 0.3
    return PolicyTokens(log_probs, log_probs + 0.4 * noise, advantages, torch.tensor(lengths), token_selection)


def rows(tokens: PolicyTokens) -> list[Row]:
    """Return one row for each sequence that is not empty."""
    fields = (tokens.log_probs, tokens.old_log_probs, tokens.advantages, tokens.token_selection)
    lists = [[] if field is None else field.tolist() for field in fields]
    bounds = [0, *itertools.accumulate(tokens.lengths.tolist())]
    return [Row(*(values[begin:end] for values in lists)) for begin, end in itertools.pairwise(bounds) if end > begin]


def test_gspo_by_hand() -> None:
    # Ratios 2 and 1/2 give the sequence ratio 1. Ratios 1.5 and 1.5 give 1.5, which is clipped to 1.2 only if A > 0.
    said = Gspo(0.2, 0.2)(of_ratios([2, 0.5, 1.5, 1.5, 1.5], [1, 1, 3, 3, -3], [2, 2, 1]))
    torch.testing.assert_close(said.losses, tensor(-1, -1, -3.6, -3.6, 4.5))
    torch.testing.assert_close(said.ratio, tensor(1, 1, 1.5, 1.5, 1.5))
    assert said.clipped.tolist() == [False, False, True, True, False]


def test_gspo_pays_each_token_its_own_advantage() -> None:
    """The advantages sum to 0: if the tokens of the sequence shared their mean, the gradient on policy would be 0."""
    tokens = of_ratios([1, 1, 1, 1], [2, 0, 0, -2], [4])
    leaf = tokens.log_probs.clone().requires_grad_()
    Gspo()(replace(tokens, log_probs=leaf)).losses.sum().backward()
    torch.testing.assert_close(leaf.grad, tensor(-2, 0, 0, 2))


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_gspo_gradient_is_that_of_sequence_ratio(mode: str) -> None:
    """Against equation 5 of the paper: autograd differentiates through the sequence ratio itself and through its
    clip.
    """
    tokens = random_tokens([5, 1, 9, 3, 30])
    lengths = tokens.lengths.tolist()
    tokens = replace(tokens, advantages=torch.repeat_interleave(tensor(1.5, -2, -0.5, 1, 0.7), tokens.lengths))
    ours, theirs = (tokens.log_probs.clone().requires_grad_() for _ in range(2))
    for losses in Gspo(0.05, 0.1)(replace(tokens, log_probs=ours)).losses.split(lengths):
        (losses.mean() if mode == "mean" else losses.sum()).backward(retain_graph=True)
    for log_ratio, advantages in zip(
        (theirs - tokens.old_log_probs).split(lengths), tokens.advantages.split(lengths), strict=True
    ):
        s, a = log_ratio.mean().exp(), advantages[0]
        loss = -torch.minimum(s * a, s.clamp(0.95, 1.1) * a) * (1 if mode == "mean" else len(advantages))
        loss.backward(retain_graph=True)
    assert ours.grad is not None and (ours.grad != 0).any()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-14)


def test_ratios_of_long_sequences_match_exact_sums() -> None:
    """The log-ratios of 32,768 tokens in fp32 nearly cancel: the error of a sum in fp32 would be larger than the
    sum.
    """
    length = 32768
    generator = torch.Generator().manual_seed(0)
    d = torch.randn(length, generator=generator)
    d = d - d.mean()
    tokens = PolicyTokens(d, torch.zeros(length), torch.full((length,), -1.0), torch.tensor([length]))
    exact = fsum(d.tolist())
    assert Gspo()(tokens).ratio[0].item() == pytest.approx(exp(exact / length), abs=1e-7)
    assert Topr()(tokens).ratio[0].item() == pytest.approx(exp(min(exact, 0)), rel=1e-6)


def test_gmpo_by_hand() -> None:
    # If A > 0, log 2 is clipped to 0.4 and log 1/2 is kept: exp((0.4 - log 2) / 2). If A < 0, it is the reverse.
    said = Gmpo(0.4, 0.4)(of_ratios([2, 0.5, 2, 0.5], [1, 1, -1, -1], [2, 2]))
    up, down = exp((0.4 - log(2)) / 2), exp((log(2) - 0.4) / 2)
    torch.testing.assert_close(said.losses, tensor(-up, -up, down, down))
    assert said.clipped.tolist() == [True, False, False, True]


def test_cispo_by_hand() -> None:
    tokens = of_ratios([2, 0.5, 1.1], [1, -1, 1], [3])
    said = Cispo(0.2, 0.3)(tokens)
    torch.testing.assert_close(said.losses, -tensor(1.3, -0.8, 1.1) * tokens.log_probs)
    assert said.clipped.tolist() == [True, True, False]
    # A lower bound of 1 never clips: the weight 0.5 stays.
    assert Cispo(1.0, 0.3)(tokens).clipped.tolist() == [True, False, False]


def test_sapo_by_hand() -> None:
    """At ratio 1, the gate is 2 / tau. The weight of the gradient is the ratio times the slope of the gate.

    The slope is 1 at ratio 1, and less elsewhere.
    """
    tokens = of_ratios([1, 1, 3, 0.5], [1, -1, 2, -2], [4])
    leaf = tokens.log_probs.clone().requires_grad_()
    said = Sapo(1.0, 2.0)(replace(tokens, log_probs=leaf))
    said.losses.sum().backward()
    far, near = 1 / (1 + exp(-2)), 1 / (1 + exp(1))
    torch.testing.assert_close(said.losses.detach(), tensor(-2, 1, -2 * 4 * far, 2 * 2 * near))
    torch.testing.assert_close(leaf.grad, tensor(-1, 1, -2 * 3 * 4 * far * (1 - far), 2 * 0.5 * 4 * near * (1 - near)))
    assert not said.clipped.any()


def test_dppo_by_hand() -> None:
    """The distance is the change of the probability: 0.1 from 0.2 to 0.3 or to 0.1, and 0.2 from 0.2 to 0.4.

    A token beyond the threshold that moves back keeps its gradient.
    """
    old = tensor(0.2, 0.2, 0.2, 0.2, 0.9, 0.001).log()
    now, advantages = tensor(0.3, 0.4, 0.4, 0.1, 0.6, 0.1).log().requires_grad_(), tensor(1, 1, -1, -1, -1, 1)
    said = Dppo("tv", 0.15)(PolicyTokens(now, old, advantages, torch.tensor([6])))
    assert said.clipped.tolist() == [False, True, False, False, True, False]
    torch.testing.assert_close(said.losses.detach(), tensor(-1.5, 0, 2, 0.5, 0, -100))
    said.losses.sum().backward()
    torch.testing.assert_close(now.grad, said.losses.detach())


def test_the_divergences_of_dppo_are_exact_near_certainty() -> None:
    """Compare fp32 with float64 from the complements, also for probabilities that fp32 would round to 1."""
    rest = tensor(1e-9, 1e-8, 1e-4, 0.5, 1 - 1e-9)
    old_rest = tensor(1e-3, 1e-9, 1e-8, 0.1, 0.5)
    log_p, log_q = torch.log1p(-rest).float(), torch.log1p(-old_rest).float()
    p, q = -torch.expm1(log_p.double()), -torch.expm1(log_q.double())  # the complements, as represented in fp32
    expected = (1 - q) * (log_q.double() - log_p.double()) + q * (q / p).log()
    torch.testing.assert_close(binary_divergence(log_p, log_q, "kl").double(), expected, rtol=1e-5, atol=1e-12)
    assert (binary_divergence(log_p, log_q, "kl") >= 0).all()
    certain = binary_divergence(tensor(0.0, -2.0, 0.0, -1e9), tensor(0.0, 0.0, -1.0, -1.0), "kl")
    assert torch.isfinite(certain).all() and certain[0] == 0


@pytest.mark.parametrize("gap", [15.5, 16.0, 17.0, 18.0])
@pytest.mark.parametrize("old", [0.9, 0.99, 0.999, 0.9999])
def test_divergence_of_rounded_certainty_matches_float64(old: float, gap: float) -> None:
    """The two logits are `gap` and 0. In fp32 the log-prob of the first rounds to 0, so its complement, at most 2e-7,
    is lost.

    With the smallest normal number in its place, the divergence would be eight times as large.
    """
    now = torch.tensor([gap, 0.0], dtype=torch.float64).log_softmax(0)
    logits = torch.tensor([gap, 0.0])
    rounded = logits[0] - logits.logsumexp(0)
    assert rounded == 0 and 1e-8 < now[1].exp() < 2e-7
    exact = old * (log(old) - now[0].item()) + (1 - old) * (log(1 - old) - now[1].item())
    found = binary_divergence(rounded[None], tensor(log(old)).float(), "kl")
    assert found.item() == pytest.approx(exact, rel=0.3)
    assert (found.item() > 0.05) == (exact > 0.05), "the usual threshold decides the same"


def test_a_divergence_is_never_negative() -> None:
    rests = [0.0, 1e-30, 1e-12, 1e-9, 1e-8, 6e-8, 1e-7, 1e-3, 0.5, 1 - 1e-3]
    log_p, log_q = (torch.log1p(-tensor(*one)).float() for one in zip(*itertools.product(rests, rests), strict=True))
    found = binary_divergence(log_p, log_q, "kl")
    assert (found >= 0).all() and torch.isfinite(found).all() and not found[log_p == log_q].any()


def test_topr_by_hand() -> None:
    # Products of the ratios: 1, 4, 1/8 and 1/8. Only sequences with A < 0 are tapered: 4 to 1, and the first 1/8 is
    # kept.
    tokens = of_ratios([2, 0.5, 4, 0.5, 0.25, 0.125], [1, 1, -1, -2, -2, 1], [2, 1, 2, 1])
    said = Topr(positive=0.5, negative=2.0)(tokens)
    torch.testing.assert_close(said.losses, -tensor(0.5, 0.5, -2, -2 * 2 / 8, -2 * 2 / 8, 0.5) * tokens.log_probs)
    assert said.clipped.tolist() == [False, False, True, False, False, False]


def test_topr_losses_are_finite_for_extreme_ratios() -> None:
    tokens = of_ratios([1e-9] * 50 + [1e9] * 50, [-1.0] * 100, [50, 50])
    said = Topr()(replace(tokens, log_probs=tokens.log_probs.float(), old_log_probs=tokens.old_log_probs.float()))
    assert said.losses[:50].abs().max() == 0
    assert torch.isfinite(said.losses).all() and torch.isfinite(said.ratio).all()


def test_the_policy_gradient_is_the_advantage() -> None:
    tokens = of_ratios([2, 0.5], [3, -1], [2])
    torch.testing.assert_close(PolicyGradient()(tokens).losses, -tensor(3, -1) * tokens.log_probs)


def test_clip_cov_leaves_marked_tokens_out() -> None:
    said = ClipCov()(of_ratios([1.1, 1.1, 1.5], [1, 1, 1], [3], [True, False, False]))
    torch.testing.assert_close(said.losses, tensor(0, -1.1, -1.2))
    assert said.clipped.tolist() == [True, False, True]


def test_kl_cov_penalises_marked_tokens_in_both_directions() -> None:
    said = KlCov(coef=2.0)(of_ratios([1.5, 1.5, 0.5], [1, 1, -1], [3], [True, False, True]))
    torch.testing.assert_close(said.losses, tensor(-1.5 + 2 * log(1.5), -1.5, 0.5 + 2 * log(2)))


@each
def test_against_the_papers_formula_in_float64(objective: Objective) -> None:
    tokens = random_tokens([5, 1, 0, 9, 3, 30])
    expected = [loss for row in rows(tokens) for loss in formula(objective)(row, row)]
    torch.testing.assert_close(objective(tokens).losses, tensor(*expected))


@each
def test_gradients_against_finite_differences_of_the_formula(objective: Objective) -> None:
    tokens = random_tokens([4, 1, 6])
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(11, dtype=torch.float64, generator=generator)
    leaf = tokens.log_probs.clone().requires_grad_()
    (objective(replace(tokens, log_probs=leaf)).losses * weights).sum().backward()
    assert leaf.grad is not None
    held = rows(tokens)

    def total(current: Tensor) -> float:
        moved = rows(replace(tokens, log_probs=current))
        losses = [loss for row, fixed in zip(moved, held, strict=True) for loss in formula(objective)(row, fixed)]
        return float(tensor(*losses) @ weights)

    step = 1e-6
    for index in range(11):
        shift = torch.zeros(11, dtype=torch.float64)
        shift[index] = step
        slope = (total(tokens.log_probs + shift) - total(tokens.log_probs - shift)) / (2 * step)
        assert leaf.grad[index].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


@each
def test_on_policy_the_gradient_is_the_policy_gradients(objective: Objective) -> None:
    """At ratio 1, every method has the gradient of REINFORCE, up to the weights of TOPR. No token is selected by its
    covariance.
    """
    tokens = random_tokens([4, 7])
    advantages = torch.repeat_interleave(tensor(1, -1), tokens.lengths)
    token_selection = torch.zeros(11, dtype=torch.bool)
    leaf = tokens.log_probs.clone().requires_grad_()
    said = objective(PolicyTokens(leaf, leaf.detach(), advantages, tokens.lengths, token_selection))
    said.losses.sum().backward()
    expected = -advantages
    if isinstance(objective, Topr):
        expected = torch.where(advantages >= 0, objective.positive, objective.negative) * expected
    torch.testing.assert_close(leaf.grad, expected)
    assert (said.ratio == 1).all()
    assert not said.clipped.any()


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(any),
    index=st.integers(0, len(OBJECTIVES) - 1),
    cut=st.integers(0, 8),
    random=st.randoms(use_true_random=False),
)
def test_objectives_do_not_depend_on_sequence_order(lengths: list[int], index: int, cut: int, random: Random) -> None:
    objective, tokens = OBJECTIVES[index], random_tokens(lengths)
    whole = objective(tokens).losses.split(lengths)
    order = list(range(len(lengths)))
    random.shuffle(order)
    for part in (order[:cut], order[cut:]):
        if not part:
            continue

        def chosen(field: Tensor, part: list[int] = part) -> Tensor:
            return torch.cat([field.split(lengths)[i] for i in part])

        assert tokens.token_selection is not None
        of_part = [chosen(field) for field in (tokens.log_probs, tokens.old_log_probs, tokens.advantages)]
        said = objective(
            PolicyTokens(
                *of_part,
                lengths=torch.tensor([lengths[i] for i in part]),
                token_selection=chosen(tokens.token_selection),
            )
        )
        torch.testing.assert_close(said.losses, torch.cat([whole[i] for i in part]), rtol=1e-12, atol=1e-12)


@each
def test_nothing_to_learn_is_nothing(objective: Objective) -> None:
    empty = random_tokens([0])
    assert objective(empty).losses.shape == (0,)


@each
def test_objectives_travel_to_workers(objective: Objective) -> None:
    assert pickle.loads(pickle.dumps(objective)) == objective
