"""Every offline loss with DeepSpeed on two ranks matches a plain float64 computation in each update."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from roll.algorithms.divergence import Distillation, Divergence
from roll.algorithms.losses import Loss, NegativeLogLikelihood
from roll.algorithms.preference import ChosenLikelihood, Dpo, DpoNorm, Ipo, Kto, Mixture, OrPo, PreferenceLoss, SimPo
from roll.backend import Rank
from roll.backend_settings import ModelLoader
from roll.config.schema.model import TrainingConfig
from roll.data.examples import Example, ExampleSequence, ExampleSet
from roll.engines.hf.settings import HfScoreSettings
from roll.engines.hf.strategy import HfScore
from roll.models.load import load_policy
from roll.models.packed import PackedPolicy
from roll.models.student import PackedTeacher, student_loader
from roll.models.value import load_scores
from roll.ray.group import WorkerGroup
from roll.runs.offline import wiring as wire_distill
from roll.runs.offline import wiring as wire_dpo
from roll.runs.offline import wiring as wire_reward_model
from roll.runs.offline import wiring as wire_sft
from roll.runs.offline.batches import Batches, MakeBatch, Models
from roll.training.actor_train import ActorTrain, TrainShape, merge
from roll.training.deepspeed.settings import TrainSettings
from roll.types import Floats, Metrics, Sequences
from tests import limits
from tests.engines import plain_offline
from tests.engines.plain_offline import (
    BETA,
    GAMMA,
    HEAT,
    LEARNING_RATE,
    MIX,
    SHARE,
    SMOOTHING,
    LossOf,
    plain_losses,
    plain_policies,
    plain_scorer,
)
from tests.engines.serving import ServedRanks, served_ranks
from tests.engines.training import ADAM_EPSILON, SEED, Case, model_args, settings

FP32 = model_args(Case(0, lora=False))

STEPS, BATCH = 4, 6
LENGTHS = [(4, 7), (2, 5), (6, 3), (3, 9), (5, 5), (2, 8)]
"""Lengths of prompt and response, in tokens."""
CASES: dict[str, tuple[Loss, int, LossOf]] = {
    "sft": (NegativeLogLikelihood(), 0, plain_offline.sft),
    "dpo": (PreferenceLoss(Dpo(BETA, SMOOTHING)), 3, plain_offline.dpo),
    "dpo_norm and sft": (
        PreferenceLoss(Mixture(DpoNorm(BETA, SMOOTHING), ((SHARE, ChosenLikelihood()),))),
        2,
        plain_offline.dpo_norm_and_sft,
    ),
    "ipo": (PreferenceLoss(Ipo(BETA)), 2, plain_offline.ipo),
    "simpo": (PreferenceLoss(SimPo(BETA, GAMMA)), 3, plain_offline.simpo),
    "orpo": (PreferenceLoss(OrPo(BETA)), 1, plain_offline.orpo),
    "kto": (Kto(BETA, 1.5, 0.7), 3, plain_offline.kto),
}
"""By name: the loss, the ZeRO stage, and the plain computation of the loss."""
REFERENCED = ("dpo", "dpo_norm and sft", "ipo", "kto")


@dataclasses.dataclass(frozen=True)
class Rows:
    """A replacement for `ExampleSet`."""

    examples: Sequence[Example]

    def __len__(self) -> int:
        return len(self.examples)

    def example(self, index: int) -> Example:
        return self.examples[index]


def rows(pairs: bool) -> Rows:
    """Return twelve rows of random tokens."""
    generator = np.random.default_rng(5)

    def sequence(prompt: np.ndarray, response: int) -> ExampleSequence:
        token_ids = np.concatenate([prompt, generator.integers(0, 250, response)]).astype(np.int32)
        return ExampleSequence(token_ids, np.arange(len(token_ids)) >= len(prompt))

    out = []
    for number in range(2 * BATCH):
        prompt_length, response = LENGTHS[number % BATCH]
        prompt = generator.integers(0, 250, prompt_length)
        responses = (response, 1 + number % 6) if pairs else (response,)
        out.append(Example(tuple(sequence(prompt, length) for length in responses), float(number % 3 > 0)))
    return Rows(out)


def numbers(step: int) -> list[int]:
    """Return the row numbers of a step. An epoch has two steps."""
    return [(step % 2) * BATCH + number for number in range(BATCH)]


def learnt_examples(given: Rows) -> list[list[Example]]:
    """Return the examples of each step."""
    return [[given.example(number) for number in numbers(step)] for step in range(STEPS)]


def trainer_settings(model: Path, stage: int, load: ModelLoader = load_policy) -> TrainSettings:
    training = {"learning_rate": LEARNING_RATE, "adam_epsilon": ADAM_EPSILON, "lr_scheduler_type": "constant"}
    base = settings(Case(stage=stage, lora=False), model, SEED, load)
    return dataclasses.replace(base, training=TrainingConfig.model_validate(training), max_grad_norm=1e6)


@pytest.fixture(scope="module")
def ranks() -> Iterator[ServedRanks]:
    with served_ranks("actor_train", 2) as group:
        yield group


@pytest.fixture(scope="module")
def reference(small_model: Path) -> Any:
    """Return a function that scores sequences with the initial model, in this process."""
    scorer = HfScore(
        HfScoreSettings(str(small_model), FP32, PackedPolicy), Rank("reference", 0, 1, "", 0, "cpu", limits.START)
    )

    async def ask(sequences: Sequences) -> Floats:
        return scorer.log_probs([sequences], 1.0)[0]

    return ask


def trainer(group: ServedRanks, token_budget: int, mode: str) -> ActorTrain:
    return ActorTrain(
        cast(WorkerGroup, group),
        TrainShape(1, 1, token_budget, mode, 1.0),
        Path(),
        limits.CALL,
        limits.CALL,
        limits.CALL,
    )


def batches(given: Rows, make_batch: MakeBatch, actor_train: ActorTrain, other: Any = None) -> Batches:
    return Batches(cast(ExampleSet, given), make_batch, Models(actor_train.log_probs, other))


async def learn(actor_train: ActorTrain, rows: Batches) -> list[Metrics]:
    """Make all updates. Return each update's metrics, and under `before/` the evaluation of its rows just before it."""
    out = []
    for step in range(STEPS):
        batch, loss = await rows.of(numbers(step))
        before = merge(await actor_train.evaluate(batch, loss))
        during = await actor_train.train_step(batch, loss, step)
        out.append(during | {f"before/{name}": value for name, value in before.items()})
    return out


@pytest.mark.parametrize("name", CASES)
def test_offline_losses_match_hand_computation(
    name: str, ranks: ServedRanks, reference: Any, small_model: Path
) -> None:
    loss, stage, by_hand = CASES[name]
    given = rows(pairs=name not in ("sft", "kto"))
    expected = plain_losses(plain_policies(small_model, small_model), learnt_examples(given), by_hand)
    ranks.build(trainer_settings(small_model, stage))
    actor_train = trainer(ranks, 30, "token-mean" if name == "sft" else "seq-mean-token-mean")

    async def run() -> list[Metrics]:
        if name == "sft":
            return await learn(actor_train, batches(given, wire_sft.sft_batch, actor_train))
        other = reference if name in REFERENCED else None
        preferences = batches(given, partial(wire_dpo.dpo_batch, loss), actor_train, other)
        if name == "dpo":
            preferences = await preferences.record(range(len(given)), 5, reference)
        return await learn(actor_train, preferences)

    said = asyncio.run(run())
    key = "sft/loss" if name == "sft" else "dpo/loss"
    assert [line[key] for line in said] == pytest.approx(expected, abs=1e-5)
    assert [line[f"before/{key}"] for line in said] == pytest.approx(expected, abs=1e-5), (
        "evaluation and update compute the same loss"
    )
    assert max(expected) - min(expected) > 1e-3, "the updates changed nothing"


def test_reward_model_losses_match_hand_computation(ranks: ServedRanks, small_model: Path) -> None:
    given = rows(pairs=True)
    expected = plain_losses(plain_scorer(small_model), learnt_examples(given), plain_offline.bradley_terry)
    ranks.build(trainer_settings(small_model, 3, load_scores))
    actor_train = trainer(ranks, 30, "seq-mean-token-mean")
    said = asyncio.run(
        learn(actor_train, batches(given, partial(wire_reward_model.reward_model_batch, None), actor_train))
    )
    assert [line["reward_model/loss"] for line in said] == pytest.approx(expected, abs=1e-5)
    assert [line["before/reward_model/loss"] for line in said] == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 1e-3, "the updates changed nothing"


@pytest.mark.parametrize(("kind", "stage"), [("forward_kl", 0), ("reverse_kl", 2), ("jsd", 3)])
def test_distillation_losses_match_hand_computation(
    kind: Any, stage: int, ranks: ServedRanks, small_model: Path, small_tied_model: Path
) -> None:
    given = rows(pairs=False)
    by_hand = plain_offline.distill(getattr(plain_offline, kind))
    expected = plain_losses(plain_policies(small_model, small_tied_model), learnt_examples(given), by_hand)
    load = student_loader(str(small_tied_model), FP32, Divergence(kind, SHARE, HEAT))
    ranks.build(trainer_settings(small_model, stage, load))
    scorer = HfScore(
        HfScoreSettings(str(small_tied_model), FP32, PackedTeacher), Rank("teacher", 0, 1, "", 0, "cpu", limits.START)
    )

    async def ask(sequences: Sequences) -> Floats:
        return scorer.states([sequences])[0]

    student = trainer(ranks, 30, "token-mean")
    said = asyncio.run(
        learn(student, batches(given, partial(wire_distill.distill_batch, Distillation(MIX)), student, ask))
    )
    assert [line["distill/loss"] for line in said] == pytest.approx(expected, abs=1e-5)
    assert [line["before/distill/loss"] for line in said] == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 1e-3, "the updates changed nothing"
