"""Code that the test of averaged weights runs on each rank: it trains, scores with the average, saves and resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

from roll.backend import MicroBatch, Rank
from roll.training.deepspeed.settings import DeepSpeedConfig, TrainSettings
from roll.types import Floats, Sequences
from tests.engines.training import LOSS, SEED, TEMPERATURE, VERSION, Case, settings, trainer_of

RATE = 0.25


@dataclass(frozen=True)
class Plan:
    """A training configuration whose weights are averaged."""

    stage: int
    lora: bool = False
    dtype: str = "fp32"
    persist: bool = False
    """Whether ZeRO-3 keeps small parameters whole on every rank."""

    def settings(self, model: Path, seed: int) -> TrainSettings:
        """Return the trainer's settings."""
        chosen = settings(Case(self.stage, self.lora, self.dtype), model, seed)
        if self.persist:
            zero = {"zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 200}}
            chosen = replace(chosen, deepspeed=DeepSpeedConfig.model_validate(zero))
        return replace(chosen, average_rate=RATE)


@dataclass(frozen=True)
class Averaged:
    """The results of one rank."""

    weights: list[dict[str, Tensor]]
    """Trained parameters by name: at the start, and after each step."""
    at_start: tuple[list[Floats], list[Floats]]
    """Log-probs of the policy and of the average before the first step."""
    policy: tuple[list[Floats], list[Floats]]
    """Log-probs of the policy before and after the average was in place."""
    average: list[Floats]
    resumed: list[Floats]
    """Log-probs of the average after a resume."""
    last: tuple[dict[str, Tensor], dict[str, Tensor]]
    """Trained parameters after a further step, without and with a resume before it."""
    refusal: str
    """The error of loading a checkpoint without an average."""


def trained(strategy: Any) -> dict[str, Tensor]:
    """Return whole copies of the trained parameters by name."""
    found = {name: one for name, one in strategy._model.named_parameters() if one.requires_grad}
    with deepspeed.zero.GatheredParameters(list(found.values())), torch.no_grad():
        return {name: one.detach().float().clone() for name, one in found.items()}


def average_plan(
    rank: Rank,
    plan: Plan,
    model: Path,
    work: Sequence[Sequence[Sequence[MicroBatch]]],
    scored: Sequence[Sequence[Sequences]],
    folder: Path,
) -> Averaged:
    """Run everything that the tests check for one plan. `work` has the updates of each rank, one in a step."""
    *steps, last = [[update] for update in work[rank.rank]]
    own, seen = scored[rank.rank], dict[str, Any]()
    with trainer_of(plan.settings(model, SEED), rank) as strategy:
        weights = [trained(strategy)]
        first = strategy.log_probs(own, TEMPERATURE, True)
        seen["at_start"] = first, strategy.averaged_log_probs(own, TEMPERATURE)
        for number, updates in enumerate(steps):
            strategy.train_step(updates, LOSS, TEMPERATURE, VERSION + number)
            weights.append(trained(strategy))
        before = strategy.log_probs(own, TEMPERATURE, True)
        seen["average"] = strategy.averaged_log_probs(own, TEMPERATURE)
        seen["policy"] = before, strategy.log_probs(own, TEMPERATURE, True)
        strategy.save(folder)
        strategy.train_step(last, LOSS, TEMPERATURE, VERSION)
        alone = trained(strategy)
    with trainer_of(plan.settings(model, SEED + 1), rank) as strategy:
        strategy.load(folder)
        seen["resumed"] = strategy.averaged_log_probs(own, TEMPERATURE)
        strategy.train_step(last, LOSS, TEMPERATURE, VERSION)
        seen["last"] = alone, trained(strategy)
        torch.distributed.barrier()
        (folder / f"averaged_rank{rank.rank}.pt").unlink()
        torch.distributed.barrier()
        try:
            strategy.load(folder)
            seen["refusal"] = ""
        except Exception as error:
            seen["refusal"] = f"{type(error).__name__}: {error}"
    return Averaged(weights, **seen)


def average_plans(
    rank: Rank, plans: Sequence[Plan], model: Path, work: Any, scored: Any, folder: Path
) -> list[Averaged]:
    """Run the plans one after another, each in a folder of its own."""
    return [average_plan(rank, plan, model, work, scored, folder / str(number)) for number, plan in enumerate(plans)]
