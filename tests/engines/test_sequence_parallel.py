"""Sequence parallelism: two ranks that split the tokens of each micro-batch score and train like one rank with all
tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.losses import Loss, ValueLoss
from roll.algorithms.objectives import Gspo, PolicyLoss, Ppo
from roll.algorithms.preference import BradleyTerry
from roll.backend import TrainStrategy
from roll.backend_settings import ModelLoader
from roll.data import packing
from roll.models.load import load_policy
from roll.models.value import load_scores, load_values
from roll.ray.group import WorkerGroup
from roll.training.actor_train import ActorTrain, Critic, TrainShape
from roll.types import Floats, Metrics, TrainBatch
from roll.weight_sync.bucket import plan_buckets, read_bucket
from roll.weight_sync.transfer import BucketSender
from tests import limits
from tests.engines.serving import ServedRanks, served_ranks
from tests.engines.training import SEED, TEMPERATURE, VERSION, Case, settings

LENGTHS = [9, 4, 14, 6, 11, 3, 8, 5, 12, 8]
BUDGET = 33


@dataclass(frozen=True)
class Kind:
    """A kind of model, its loss, and the ZeRO stage."""

    load: ModelLoader
    stage: int
    loss: Loss
    mode: str
    lora: bool = False
    compiled: bool = False
    """Whether the layers of the two-rank replica are compiled; those of the single rank never are."""


KINDS = {
    "ppo": Kind(load_policy, 1, PolicyLoss(Ppo(0.2, 0.28, 3.0), kl_coef=0.1, entropy_coef=0.01), "token-mean"),
    "gspo": Kind(load_policy, 3, PolicyLoss(Gspo(0.02, 0.03)), "seq-mean-token-mean", lora=True, compiled=True),
    "critic": Kind(load_values, 3, ValueLoss(0.2), "token-mean"),
    "reward_model": Kind(load_scores, 1, BradleyTerry(), "seq-mean-token-mean"),
}


@dataclass(frozen=True)
class Seen:
    """The results of a step."""

    scores: Floats
    metrics: Metrics
    held_out_tokens: int
    before: dict[str, Tensor]
    after: dict[str, Tensor]


@pytest.fixture(scope="module")
def alone() -> Iterator[ServedRanks]:
    with served_ranks("actor_train", 1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def together() -> Iterator[ServedRanks]:
    with served_ranks("actor_train", 2, replica_size=2) as ranks:
        yield ranks


def batch_for(name: str) -> TrainBatch:
    """Return ten sequences of random tokens. For a reward model they form pairs, and the last token of each sequence is
    scored.
    """
    generator = np.random.default_rng(1)
    masks = [np.arange(length) >= (length - 1 if name == "reward_model" else 2) for length in LENGTHS]
    sequences = packing.concatenate([generator.integers(0, 250, length).astype(np.int32) for length in LENGTHS], masks)
    mask = sequences.response_mask

    def noise(mean: float, scale: float) -> Floats:
        return np.where(mask, generator.normal(mean, scale, size=len(mask)), 0).astype(np.float32)

    about = -float(np.log(256))
    return TrainBatch(
        sequences,
        noise(0.0, 1.0),
        noise(about, 0.3),
        np.where(mask, VERSION, 0).astype(np.int32),
        noise(about, 0.3),
        labels=np.zeros(len(LENGTHS), np.float32),
        sequences_per_example=2 if name == "reward_model" else 1,
        values=noise(0.0, 0.1),
        returns=noise(0.5, 1.0),
    )


async def step(name: str, group: ServedRanks, folder: Path) -> Seen:
    """Score, evaluate and train, through the facades."""
    kind, batch = KINDS[name], batch_for(name)
    shape = TrainShape(
        updates=2 if batch.sequences_per_example == 1 else 1,
        epochs=1,
        token_budget=BUDGET,
        loss_agg_mode=kind.mode,
        temperature=TEMPERATURE,
    )
    workers = cast(WorkerGroup, group)
    seconds = (limits.CALL, limits.CALL, limits.CALL)
    policy, critic = ActorTrain(workers, shape, folder, *seconds), Critic(workers, shape, *seconds)
    scores = await (policy.log_probs(batch.sequences) if kind.load is load_policy else critic.values(batch.sequences))
    held_out = await policy.evaluate(batch, kind.loss)
    tokens = sum(result.tokens + int(result.counts.get("reward_model/loss", 0)) for result in held_out)
    before = await weights(group, folder)
    metrics = await policy.train_step(batch, kind.loss, VERSION)
    return Seen(scores, metrics, tokens, before, await weights(group, folder))


async def weights(group: ServedRanks, folder: Path) -> dict[str, Tensor]:
    """Return all weights as a weight sync sends them."""
    out: dict[str, Tensor] = {}
    for names in plan_buckets((await group.within(limits.CALL).all(TrainStrategy.tensors, adapter=False))[0], 1 << 19):
        bucket = (await group.within(limits.CALL).all(BucketSender.write_bucket, names, folder / "bucket.safetensors"))[
            0
        ]
        assert bucket is not None
        out |= {name: tensor.clone() for name, tensor in read_bucket(bucket).items()}
    return out


def far(got: Tensor | Floats, expected: Tensor | Floats) -> float:
    """Return the norm of the difference, divided by the norm of `expected`."""
    one, other = torch.as_tensor(got).double(), torch.as_tensor(expected).double()
    return float((one - other).norm() / other.norm())


@pytest.mark.full
@pytest.mark.parametrize("name", list(KINDS))
def test_two_sequence_parallel_ranks_match_one(
    name: str, alone: ServedRanks, together: ServedRanks, with_head: Path, tmp_path: Path
) -> None:
    kind, seen = KINDS[name], []
    for group in (alone, together):
        case = Case(kind.stage, kind.lora, compiled=kind.compiled and len(group) > 1, sequence_parallel=len(group))
        chosen = replace(settings(case, with_head, SEED, kind.load), token_budget=BUDGET)
        group.build(chosen)
        seen.append(asyncio.run(step(name, group, tmp_path)))
    one, two = seen
    assert far(two.scores, one.scores) < 1e-6
    assert np.abs(one.scores).max() > 0.1
    # No token is counted twice, and all means agree.
    assert two.held_out_tokens == one.held_out_tokens > 0
    assert two.metrics.keys() == one.metrics.keys()
    for metric, expected in one.metrics.items():
        assert two.metrics[metric] == pytest.approx(expected, rel=1e-5, abs=1e-6), metric
    assert two.after.keys() == one.after.keys()
    moved = torch.cat([(one.after[key] - one.before[key]).flatten() for key in one.after])
    assert moved.norm() > 1e-2
    assert (
        far(
            torch.cat([two.after[key].flatten() for key in one.after]),
            torch.cat([one.after[key].flatten() for key in one.after]),
        )
        < 1e-6
    )
    assert far(torch.cat([(two.after[key] - two.before[key]).flatten() for key in one.after]), moved) < 1e-4


@pytest.mark.full
def test_a_checkpoint_goes_on_without_sharing(together: ServedRanks, small_model: Path, tmp_path: Path) -> None:
    seen = []
    for size, asked in ((2, TrainStrategy.save), (1, TrainStrategy.load)):
        chosen = replace(settings(Case(3, True, sequence_parallel=size), small_model, SEED + size), token_budget=BUDGET)
        together.build(chosen)
        if asked is TrainStrategy.save:
            asyncio.run(step("ppo", together, tmp_path))
        asyncio.run(together.within(limits.CALL).all(asked, tmp_path / "checkpoint"))
        seen.append(asyncio.run(weights(together, tmp_path)))
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(seen[1][name], tensor) for name, tensor in seen[0].items())
