"""Preference losses: against their formulas in plain Python, their gradients, and their independence of the split of a
batch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.losses import Loss, LossInputs
from roll.algorithms.preference import (
    BradleyTerry,
    ChosenLikelihood,
    Dpo,
    DpoNorm,
    Ipo,
    Kto,
    Mixture,
    OrPo,
    PairObjective,
    PreferenceLoss,
    SimPo,
)
from roll.data import packing
from roll.ray.group import WorkerGroup
from roll.training.actor_train import ActorTrain, TrainShape
from roll.types import TrainBatch
from tests import limits
from tests.unit.algorithms.test_split import TOKENS, AddingRanks

POLICY = [[-0.5, -1.0], [-2.0, -0.25, -1.5], [-0.1], [-3.0, -0.5]]
REFERENCE = [[-0.7, -0.9], [-1.0, -0.5, -1.0], [-0.4], [-2.5, -0.75]]
LABELS = [1.0, 0.0, 0.0, 1.0]
LOSSES: Mapping[str, Loss] = {
    "dpo": PreferenceLoss(Dpo(0.5)),
    "cdpo": PreferenceLoss(Dpo(0.5, 0.2)),
    "ipo": PreferenceLoss(Ipo(0.5)),
    "dpo_norm": PreferenceLoss(DpoNorm(3.0, 0.2)),
    "sft": PreferenceLoss(ChosenLikelihood()),
    "dpo + 0.3 sft": PreferenceLoss(Mixture(Dpo(0.5), ((0.3, ChosenLikelihood()),))),
    "simpo + 0.4 ipo + 2 sft": PreferenceLoss(Mixture(SimPo(2.0, 0.3), ((0.4, Ipo(0.5)), (2.0, ChosenLikelihood())))),
    "simpo": PreferenceLoss(SimPo(2.0, 0.3)),
    "orpo": PreferenceLoss(OrPo(0.4)),
    "kto": Kto(0.5, 1.5, 0.7, kl=0.3),
}
SPLIT = LOSSES | {"reward model": BradleyTerry()}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, LossInputs]:
    """Return log-probs and inputs of two pairs, which are also four labelled responses."""
    log_probs, reference = (torch.tensor(sum(table, []), dtype=dtype) for table in (POLICY, REFERENCE))
    lengths = torch.tensor([len(row) for row in POLICY])
    return log_probs.requires_grad_(), LossInputs(
        torch.zeros_like(log_probs), lengths, ref_log_probs=reference, labels=torch.tensor(LABELS)
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def pair_loss(name: str, c: list[float], r: list[float], rc: list[float], rr: list[float]) -> float:
    """Return the loss of one pair by the papers' formulas.

    `c` and `r` are the policy's log-probs of the chosen and the rejected response, `rc` and `rr` those of the
    reference.
    """
    mean_c, mean_r = sum(c) / len(c), sum(r) / len(r)
    h = sum(c) - sum(rc) - sum(r) + sum(rr)
    match name:
        case "dpo":
            return -math.log(sigmoid(0.5 * h))
        case "cdpo":
            return -0.8 * math.log(sigmoid(0.5 * h)) - 0.2 * math.log(sigmoid(-0.5 * h))
        case "ipo":
            return (mean_c - sum(rc) / len(rc) - mean_r + sum(rr) / len(rr) - 1.0) ** 2
        case "dpo_norm":
            h = 3 * (
                sum(a - b for a, b in zip(c, rc, strict=True)) / len(c)
                - sum(a - b for a, b in zip(r, rr, strict=True)) / len(r)
            )
            return -0.8 * math.log(sigmoid(h)) - 0.2 * math.log(sigmoid(-h))
        case "sft":
            return -mean_c
        case "dpo + 0.3 sft":
            return pair_loss("dpo", c, r, rc, rr) - 0.3 * mean_c
        case "simpo + 0.4 ipo + 2 sft":
            return pair_loss("simpo", c, r, rc, rr) + 0.4 * pair_loss("ipo", c, r, rc, rr) - 2 * mean_c
        case "simpo":
            return -math.log(sigmoid(2 * mean_c - 2 * mean_r - 0.3))
        case _:
            odds_c, odds_r = (math.exp(m) / (1 - math.exp(m)) for m in (mean_c, mean_r))
            return -mean_c - 0.4 * math.log(sigmoid(math.log(odds_c / odds_r)))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "kto"])
def test_pair_loss_is_repeated_at_each_token(name: str) -> None:
    log_probs, given = inputs()
    said = LOSSES[name](log_probs, log_probs, given)
    first = pair_loss(name, POLICY[0], POLICY[1], REFERENCE[0], REFERENCE[1])
    second = pair_loss(name, POLICY[2], POLICY[3], REFERENCE[2], REFERENCE[3])
    assert said.losses.tolist() == pytest.approx([first] * 5 + [second] * 3, rel=1e-12)
    values, counts = said.counted["dpo/loss"]
    assert values.tolist() == pytest.approx([first, second]) and counts.all()


def test_kto_by_hand() -> None:
    log_probs, given = inputs()
    said = LOSSES["kto"](log_probs, log_probs, given)
    ratios = [sum(row) - sum(ref) for row, ref in zip(POLICY, REFERENCE, strict=True)]
    losses = [
        1.5 * (1 - sigmoid(0.5 * (ratio - 0.3))) if label else 0.7 * (1 - sigmoid(0.5 * (0.3 - ratio)))
        for ratio, label in zip(ratios, LABELS, strict=True)
    ]
    assert said.losses.tolist() == pytest.approx(
        [loss for loss, row in zip(losses, POLICY, strict=True) for _ in row], rel=1e-7
    )
    rewards, desirable = said.counted["dpo/chosen_reward"]
    assert rewards[desirable].tolist() == pytest.approx([0.5 * ratios[0], 0.5 * ratios[3]])
    assert said.counted["dpo/rejected_reward"][1].tolist() == [False, True, True, False]


def test_metrics_of_pairs_by_hand() -> None:
    log_probs, given = inputs()
    counted = LOSSES["dpo"](log_probs, log_probs, given).counted
    up = [0.5 * (sum(POLICY[i]) - sum(REFERENCE[i])) for i in (0, 2)]
    down = [0.5 * (sum(POLICY[i]) - sum(REFERENCE[i])) for i in (1, 3)]
    assert counted["dpo/chosen_reward"][0].tolist() == pytest.approx(up)
    assert counted["dpo/reward_margin"][0].tolist() == pytest.approx([a - b for a, b in zip(up, down, strict=True)])
    assert counted["dpo/accuracy"][0].tolist() == [float(a > b) for a, b in zip(up, down, strict=True)]
    assert counted["dpo/chosen_log_prob"][0].tolist() == pytest.approx([-0.75, -0.1])


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    log_probs, given = inputs()
    assert torch.autograd.gradcheck(lambda values: LOSSES[name](values, values.detach(), given).losses, [log_probs])


@pytest.mark.parametrize(
    "objective", [Dpo(0.1), DpoNorm(5.0), Mixture(DpoNorm(5.0), ((0.2, ChosenLikelihood()), (1.0, Dpo(0.1))))], ids=str
)
@pytest.mark.parametrize("far", [-3e4, -100.0, 100.0, 3e4])
def test_log_ratios_beyond_all_measure_stay_finite(objective: PairObjective, far: float) -> None:
    """The policy's log-prob of the chosen response exceeds the reference's by `far`. If `far` is negative, the loss is
    large but finite.
    """
    log_probs = torch.full((4,), -2.0).requires_grad_()
    reference = torch.tensor([-2.0 - far, -2.0, -2.0, -2.0])
    given = LossInputs(torch.zeros(4), torch.tensor([2, 2]), ref_log_probs=reference)
    losses = PreferenceLoss(objective)(log_probs, log_probs, given).losses
    losses.sum().backward()
    assert log_probs.grad is not None and torch.isfinite(losses).all() and torch.isfinite(log_probs.grad).all()


def test_normalised_loss_of_equal_lengths_equals_dpo() -> None:
    """The losses are equal if the beta of `dpo_norm` is the beta of `dpo` times the length."""
    log_probs, reference = (
        torch.tensor([-0.5, -1.0, -2.0, -0.25], dtype=torch.float64) * scale for scale in (1.0, 0.7)
    )
    given = LossInputs(torch.zeros_like(log_probs), torch.tensor([2, 2]), ref_log_probs=reference)
    ours, theirs = (PreferenceLoss(one)(log_probs, log_probs, given) for one in (DpoNorm(1.0, 0.1), Dpo(0.5, 0.1)))
    torch.testing.assert_close(ours.losses, theirs.losses)
    torch.testing.assert_close(ours.counted["dpo/reward_margin"][0], theirs.counted["dpo/reward_margin"][0])


def long_pairs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two pairs of responses of up to `tokens` tokens: log-probs of policy and reference in fp32, and the
    lengths.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([tokens, tokens - 1, tokens // 3, tokens])
    policy = -torch.empty(int(lengths.sum())).exponential_(generator=generator)
    return policy, policy + 0.05 * torch.randn(len(policy), generator=generator), lengths


def test_margins_of_long_responses_match_exact_sums() -> None:
    policy, reference, lengths = long_pairs(32768)
    parts = [[part.double().tolist() for part in values.split(lengths.tolist())] for values in (policy, reference)]
    ratios = [math.fsum(ours) - math.fsum(theirs) for ours, theirs in zip(*parts, strict=True)]
    margins = [ratios[0] - ratios[1], ratios[2] - ratios[3]]
    given = LossInputs(torch.zeros_like(policy), lengths, ref_log_probs=reference, labels=torch.tensor(LABELS))
    said = PreferenceLoss(Dpo(1.0))(policy, policy, given)
    assert said.counted["dpo/reward_margin"][0].tolist() == pytest.approx(margins, abs=1e-5)
    kto = Kto(1.0)(policy, policy, given)
    assert kto.counted["dpo/chosen_reward"][0].tolist() == pytest.approx(ratios, abs=1e-5)
    assert said.losses.dtype == kto.losses.dtype == torch.float32


def test_a_response_that_is_certain_has_finite_odds() -> None:
    log_probs = torch.zeros(2, requires_grad=True)
    loss = LOSSES["orpo"](log_probs, log_probs, LossInputs(log_probs.detach(), torch.tensor([1, 1]))).losses.sum()
    loss.backward()
    assert log_probs.grad is not None and torch.isfinite(log_probs.grad).all()


@cache
def pairs() -> TrainBatch:
    """Return a batch of six pairs of unequal lengths."""
    generator = np.random.default_rng(1)
    lengths = [9, 4, 14, 6, 11, 3, 8, 5, 7, 10, 12, 6]
    sequences = packing.concatenate(
        [generator.integers(0, TOKENS, length).astype(np.int32) for length in lengths],
        [np.arange(length) >= 2 for length in lengths],
    )
    mask = sequences.response_mask
    reference = np.where(mask, generator.normal(-2.0, 1.0, len(mask)), 0).astype(np.float32)
    nothing = np.zeros(len(mask), np.float32)
    labels = generator.integers(0, 2, len(lengths)).astype(np.float32)
    return TrainBatch(
        sequences,
        nothing,
        None,
        nothing.astype(np.int32),
        ref_log_probs=reference,
        labels=labels,
        sequences_per_example=2,
    )


def gradient(name: str, ranks: int, token_budget: int) -> Tensor:
    """Return the gradient of one update. Of each sequence, a reward model scores the last token alone."""
    batch = replace(pairs(), sequences_per_example=1) if name == "kto" else pairs()
    if name == "reward model":
        ends = np.zeros_like(batch.sequences.response_mask)
        ends[batch.sequences.offsets[1:] - 1] = True
        batch = replace(batch, sequences=replace(batch.sequences, response_mask=ends))
    group = AddingRanks(ranks)
    shape = TrainShape(1, 1, token_budget, "seq-mean-token-mean", 1.0)
    trainer = ActorTrain(cast(WorkerGroup, group), shape, Path(), limits.CALL, limits.CALL, limits.CALL)
    asyncio.run(trainer.train_step(batch, SPLIT[name], 0))
    return group.gradient


@pytest.mark.parametrize("name", SPLIT)
def test_no_split_changes_the_gradient(name: str) -> None:
    whole = gradient(name, 1, 10**6)
    assert whole.norm() > 1e-3
    for ranks, token_budget in [
        (1, 40),
        (1, 1),
        (2, 10**6),
        (2, 30),
        (4, 25),
        (7, 10**6),
    ]:  # one of seven ranks gets the filler
        difference = (gradient(name, ranks, token_budget) - whole).norm() / whole.norm()
        assert difference < 1e-5, f"{ranks} ranks, {token_budget} tokens: {difference:.1e}"
