"""Splitting an update into ranks and micro-batches changes no gradient, for every loss and aggregation, with roll's own
splitting code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from roll.algorithms.corrections import Correction
from roll.algorithms.losses import Loss, NegativeLogLikelihood, ValueLoss
from roll.algorithms.methods import CORRECTIONS as METHODS
from roll.algorithms.objectives import (
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    PolicyGradient,
    PolicyLoss,
    Ppo,
    Sapo,
    Topr,
)
from roll.algorithms.preference import BradleyTerry
from roll.backend import MicroBatch, TrainStepResult, TrainStrategy
from roll.config.schema.rlvr import RlvrConfig
from roll.data import packing
from roll.models.packed import packed_inputs, scored_only
from roll.ray.batching import Ranks
from roll.ray.group import WorkerGroup
from roll.training.actor_train import ActorTrain, TrainShape
from roll.training.deepspeed.strategy import loss_inputs
from roll.types import Floats, TrainBatch
from tests import limits

PRESETS = {name: method.traits for name, method in METHODS.items() if name != "none"}
TOKENS = 23
LENGTHS = [9, 4, 14, 6, 11, 3, 8, 5, 7, 10, 12, 6]
WHOLE, MICRO_BATCHES = 1, (1, 2, 5)
MODES = get_args(RlvrConfig.model_fields["loss_agg_mode"].annotation)
LOSSES: Mapping[str, Loss] = {
    "sft": NegativeLogLikelihood(),
    "values": ValueLoss(),
    "values, clipped": ValueLoss(clip=0.2),
    "ppo": PolicyLoss(Ppo(dual_clip=3.0)),
    "ppo, kl and entropy": PolicyLoss(Ppo(0.2, 0.28), kl_coef=0.1, entropy_coef=0.01),
    "ppo, kl weighted": PolicyLoss(kl_coef=0.5, kl_estimator="k2", kl_importance=True),
    "on policy, tis": PolicyLoss(correction=Correction(weight="token", cap=2.0), on_policy=True),
    "ppo, far and bad masked": PolicyLoss(mask_threshold=0.01),
    "pg": PolicyLoss(PolicyGradient()),
    "gspo": PolicyLoss(Gspo(0.02, 0.03)),
    "gmpo": PolicyLoss(Gmpo()),
    "cispo": PolicyLoss(Cispo()),
    "sapo": PolicyLoss(Sapo(3.0, 5.0)),
    "dppo": PolicyLoss(Dppo(threshold=0.01)),
    "dppo, kl": PolicyLoss(Dppo("kl", 0.002)),
    "topr": PolicyLoss(Topr()),
    "clip_cov": PolicyLoss(ClipCov(ratio=0.1, low=0.01, high=5.0)),
    "kl_cov": PolicyLoss(KlCov(ratio=0.2)),
    # Some tokens and sequences of the step are within these bounds, and others are not.
} | {
    f"ppo, {name}": PolicyLoss(correction=Correction(one.weight, one.cap, one.reject, 0.9, 1.1))
    for name, one in PRESETS.items()
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the tensors are so small that a second thread costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TinyPolicy(nn.Module):
    """A policy that predicts the next token from the current token and its position."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.tokens = nn.Parameter(torch.randn(TOKENS, 8, generator=generator))
        self.positions = nn.Parameter(torch.randn(max(LENGTHS), 8, generator=generator))
        self.head = nn.Parameter(torch.randn(8, TOKENS, generator=generator))

    def forward(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [S] of the response tokens."""
        packed = packed_inputs(batch.sequences, "cpu")
        before = packed.scored - 1
        hidden = (self.tokens[packed.token_ids[before]] + self.positions[packed.position_ids[before]]).tanh()
        log_p = (hidden @ self.head).log_softmax(-1)
        return log_p.gather(1, packed.token_ids[packed.scored][:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


class AddingRanks(Ranks[TrainStrategy]):
    """Ranks within this process that sum their gradients, as data-parallel training does."""

    def __init__(self, count: int) -> None:
        self.policy, self.count = TinyPolicy(), count
        self.forwards: list[int] = []

    def __len__(self) -> int:
        return self.count

    async def run(self, method: str, arguments: Mapping[int, tuple[Any, ...]], seconds: float) -> list[TrainStepResult]:
        assert method == TrainStrategy.train_step.__name__
        for updates, loss, *_ in arguments.values():
            [micro_batches] = updates
            self.forwards.append(len(micro_batches))
            for micro_batch in micro_batches:
                self.backward(micro_batch, loss)
        return [TrainStepResult({}, 0, {})] * self.count

    def backward(self, micro_batch: MicroBatch, loss: Loss) -> None:
        batch = micro_batch.batch
        log_probs, entropy = self.policy(batch)
        inputs = loss_inputs(batch, "cpu")
        # The log-probs stand in for a critic's values and for a reward model's scores.
        said = (
            loss(log_probs, inputs) if isinstance(loss, ValueLoss | BradleyTerry) else loss(log_probs, entropy, inputs)
        )
        (said.losses * scored_only(micro_batch.loss_weights, batch.sequences, "cpu")).sum().backward()

    @property
    def gradient(self) -> Tensor:
        return torch.cat(
            [gradient.flatten() for gradient in (p.grad for p in self.policy.parameters()) if gradient is not None]
        )


@cache
def step() -> TrainBatch:
    """Return twelve sequences, one of them masked out. Engine, proximal policy and reference are near the current
    policy, but not equal.
    """
    generator = np.random.default_rng(0)
    sequences = packing.concatenate(
        [generator.integers(0, TOKENS, length).astype(np.int32) for length in LENGTHS],
        [np.arange(length) >= (length if number == 3 else 2) for number, length in enumerate(LENGTHS)],
    )
    mask = sequences.response_mask
    bare = TrainBatch(sequences, np.zeros(len(mask), np.float32), None, np.zeros(len(mask), np.int32))
    own = np.zeros(len(mask), np.float32)
    own[mask] = TinyPolicy()(bare)[0].detach().numpy()

    def near(scale: float) -> Floats:
        return np.where(mask, own + generator.normal(scale=scale, size=len(mask)), 0).astype(np.float32)

    advantages = np.where(mask, np.repeat(generator.normal(size=len(LENGTHS)), LENGTHS), 0).astype(np.float32)
    behaviour, ref, proximal, values, returns = near(0.25), near(0.3), near(0.2), near(0.25), near(0.5)
    return TrainBatch(
        sequences, advantages, behaviour, bare.policy_versions, ref, proximal, values=values, returns=returns
    )


@cache
def budgets(ranks: int) -> dict[int, int]:
    """Return a token budget for each possible number of micro-batches per rank."""
    return {packing.split_to_budget(LENGTHS, ranks, budget).forwards: budget for budget in range(1, 200)}


def learn(group: AddingRanks, loss: Loss, mode: str, token_budget: int) -> Tensor:
    """Return the gradient of one update."""
    shape = TrainShape(updates=1, epochs=1, token_budget=token_budget, loss_agg_mode=mode, temperature=1.0)
    trainer = ActorTrain(cast(WorkerGroup, group), shape, Path(), limits.CALL, limits.CALL, limits.CALL)
    asyncio.run(trainer.train_step(step(), loss, 0))
    return group.gradient


def gradient(loss: Loss, mode: str, ranks: int, micro_batches: int) -> Tensor:
    group = AddingRanks(ranks)
    out = learn(group, loss, mode, budgets(ranks)[micro_batches])
    assert group.forwards == [micro_batches] * ranks
    return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_no_split_changes_the_gradient(name: str, mode: str) -> None:
    whole = gradient(LOSSES[name], mode, 1, WHOLE)
    assert whole.norm() > 1e-3
    for ranks in (1, 2):
        for micro_batches in MICRO_BATCHES:
            difference = (gradient(LOSSES[name], mode, ranks, micro_batches) - whole).norm() / whole.norm()
            assert difference < 1e-6, f"{ranks} ranks, {micro_batches} micro-batches: {difference:.1e}"


def test_the_losses_differ_from_one_another() -> None:
    """The test above would prove little for a loss that equals another one, or for a correction that does nothing."""
    gradients = {name: gradient(loss, "token-mean", 1, WHOLE) for name, loss in LOSSES.items()}
    same = [
        (a, b)
        for a in gradients
        for b in gradients
        if a < b and (gradients[a] - gradients[b]).norm() < 1e-4 * gradients[a].norm()
    ]
    assert not same


def test_a_masked_sequence_changes_nothing() -> None:
    kept = gradient(LOSSES["gspo"], "token-mean", 1, WHOLE)
    token_ids, (begin, end) = step().sequences.token_ids, step().sequences.offsets[3:5]
    before = token_ids.copy()
    token_ids[begin:end] = 0
    try:
        assert torch.equal(gradient(LOSSES["gspo"], "token-mean", 1, WHOLE), kept)
    finally:
        token_ids[:] = before
