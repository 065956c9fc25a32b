"""Learning from a teacher, with and without rewards: an update's gradient against the formulas in float64, and in every
split.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.divergence import Distillation, DistilledPolicy, Divergence
from roll.algorithms.losses import Loss
from roll.algorithms.objectives import ClipCov, PolicyLoss, Ppo
from roll.backend import MicroBatch
from roll.models.packed import packed_inputs, scored_only
from roll.models.student import chunked_divergence
from roll.ray.group import WorkerGroup
from roll.training.actor_train import ActorTrain, TrainShape
from roll.training.deepspeed.strategy import loss_inputs
from roll.types import TrainBatch
from tests import limits
from tests.unit.algorithms.test_split import TOKENS, AddingRanks, budgets, step

WIDTH = 5
"""Width of the teacher's hidden states."""
COEF = 0.7
MEASURES = [Divergence("forward_kl"), Divergence("reverse_kl", temperature=1.5), Divergence("jsd", beta=0.2)]
LOSSES: list[Loss] = [DistilledPolicy(PolicyLoss(kl_coef=0.1), COEF), Distillation(0.6)]
each = pytest.mark.parametrize("measure", MEASURES, ids=str)


@cache
def taught() -> tuple[TrainBatch, Tensor]:
    """Return the step with a teacher's hidden states, and the teacher's output matrix."""
    generator = torch.Generator().manual_seed(4)
    batch = step()
    states = torch.randn(int(batch.sequences.response_mask.sum()), WIDTH, generator=generator)
    return replace(batch, teacher_states=states.numpy()), torch.randn(TOKENS, WIDTH, generator=generator)


class Students(AddingRanks):
    """Ranks that also compute the policy's divergence from the teacher."""

    def __init__(self, count: int, measure: Divergence) -> None:
        super().__init__(count)
        self.measure = measure

    def backward(self, micro_batch: MicroBatch, loss: Loss) -> None:
        batch = micro_batch.batch
        packed = packed_inputs(batch.sequences, "cpu", teacher_states=batch.teacher_states)
        before = packed.scored - 1
        policy = self.policy
        hidden = (policy.tokens[packed.token_ids[before]] + policy.positions[packed.position_ids[before]]).tanh()
        assert packed.teacher_states is not None
        apart = chunked_divergence(hidden, policy.head.t(), packed.teacher_states, taught()[1], self.measure)
        said = loss(*policy(batch), apart, loss_inputs(batch, "cpu"))
        (said.losses * scored_only(micro_batch.loss_weights, batch.sequences, "cpu")).sum().backward()


def gradient(measure: Divergence, loss: Loss, ranks: int, token_budget: int) -> Tensor:
    group = Students(ranks, measure)
    shape = TrainShape(updates=1, epochs=1, token_budget=token_budget, loss_agg_mode="token-mean", temperature=1.0)
    trainer = ActorTrain(cast(WorkerGroup, group), shape, Path(), limits.CALL, limits.CALL, limits.CALL)
    asyncio.run(trainer.train_step(taught()[0], loss, 0))
    return group.gradient


def by_hand(measure: Divergence) -> Tensor:
    """Return the gradient of the loss: PPO, with a clip that never applies, plus `COEF` times the divergence, averaged
    over tokens.

    It is computed in float64 from probabilities.
    """
    batch, weight = taught()
    policy = Students(1, measure).policy.double()
    packed = packed_inputs(batch.sequences, "cpu")
    before, targets = packed.scored - 1, packed.token_ids[packed.scored]
    hidden = (policy.tokens[packed.token_ids[before]] + policy.positions[packed.position_ids[before]]).tanh()
    logits = hidden @ policy.head
    assert batch.teacher_states is not None and batch.proximal_log_probs is not None
    teacher = torch.from_numpy(batch.teacher_states).double() @ weight.double().t()
    p, q = (torch.softmax(values / measure.temperature, -1) for values in (teacher, logits))
    m = measure.beta * p + (1 - measure.beta) * q
    apart = {
        "forward_kl": (p * (p / q).log()).sum(-1),
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "jsd": measure.beta * (p * (p / m).log()).sum(-1) + (1 - measure.beta) * (q * (q / m).log()).sum(-1),
    }[measure.kind]
    now = torch.softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    mask = batch.sequences.response_mask
    old, advantages = (
        torch.from_numpy(values[mask]).double() for values in (batch.proximal_log_probs, batch.advantages)
    )
    (-advantages * now / old.exp() + COEF * apart).mean().backward()
    return torch.cat([value.grad.flatten() for value in policy.parameters() if value.grad is not None])


@each
def test_distilled_policy_gradient_matches_hand_computation(measure: Divergence) -> None:
    ours = gradient(measure, DistilledPolicy(PolicyLoss(Ppo(1e9, 1e9)), COEF), 1, 10**6)
    expected = by_hand(measure).float()
    assert (ours - expected).norm() < 2e-6 * expected.norm()


@each
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_no_split_changes_the_gradient(loss: Loss, measure: Divergence, ranks: int) -> None:
    whole = gradient(measure, loss, 1, 10**6)
    for micro_batches in (2, 5):
        difference = (gradient(measure, loss, ranks, budgets(ranks)[micro_batches]) - whole).norm() / whole.norm()
        assert difference < 1e-6, f"{ranks} ranks, {micro_batches} micro-batches: {difference:.1e}"


def test_it_is_the_policys_loss_and_the_divergence() -> None:
    """The loss has the metrics of both, and selects the same tokens of the step as the policy's loss."""
    inputs = loss_inputs(step(), "cpu")
    log_probs = torch.full((len(inputs.advantages),), -1.0)
    apart, plain = torch.linspace(0, 2, len(log_probs)), PolicyLoss(kl_coef=0.1)
    said, alone = DistilledPolicy(plain, 0.5)(log_probs, log_probs, apart, inputs), plain(log_probs, log_probs, inputs)
    assert torch.equal(said.losses, alone.losses + 0.5 * apart)
    assert {**alone.metrics, "distill/divergence": apart}.keys() == said.metrics.keys()
    assert torch.equal(said.metrics["distill/divergence"], apart)
    choosing = PolicyLoss(ClipCov(ratio=0.1, low=0.01, high=5.0))
    ours, theirs = DistilledPolicy(choosing).token_selection(step()), choosing.token_selection(step())
    assert ours is not None and theirs is not None and np.array_equal(ours, theirs)


@each
@pytest.mark.parametrize("far", [100.0, 3e4])
def test_distributions_beyond_all_measure_stay_finite(measure: Divergence, far: float) -> None:
    """With fp32 logits this far apart, the student is certain of one token and the teacher of another."""
    student = torch.tensor([[far, 0.0, -far], [0.0, 0.0, 0.0], [far, 0.0, -far]], requires_grad=True)
    apart = measure(student, torch.tensor([[-far, 0.0, far], [-far, 0.0, far], [far, 0.0, -far]]))
    apart.sum().backward()
    assert student.grad is not None and torch.isfinite(apart).all() and torch.isfinite(student.grad).all()
    assert apart[2].item() == pytest.approx(0, abs=1e-6)
