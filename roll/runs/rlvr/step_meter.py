"""Measures an RLVR step: the parts of any step, and the activity of engines, judges and environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import mean

from roll.agents.environment_workers import EnvironmentWorkers
from roll.backend import EngineActivity
from roll.engines.actor_infer import ActorInfer
from roll.rewards.reward_workers import ModelReward
from roll.rollout.batch import token_count
from roll.rollout.scheduler import RolloutScheduler
from roll.runs.meter import Meter
from roll.runs.rlvr.reward_models import judge_metrics
from roll.types import Metrics, RolloutGroup


@dataclass(frozen=True)
class StepMeter:
    """Measures the steps of a run."""

    meter: Meter
    scheduler: RolloutScheduler
    engines: ActorInfer
    models: Mapping[str, ModelReward]
    """Rewards by models, by domain."""
    environments: EnvironmentWorkers | None
    rows: int
    """Number of prompts in the data, for the metric `epoch`."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """See `Meter.part`."""
        return self.meter.part(name)

    async def step(self, groups: Sequence[RolloutGroup]) -> Metrics:
        """Return the metrics of the step that ends now: times, throughput, dropped groups, activity of engines."""
        samples = sum(len(group.episodes) for group in groups)
        step, engines = await asyncio.gather(self.meter.step(token_count(groups), samples), self.engines.activity())
        asked = self.engines.metrics() | self.scheduler.metrics() | judge_metrics(self.models)
        if self.environments:
            asked |= self.environments.metrics()
        epoch = {"epoch": (1 + max(group.prompt.prompt_id for group in groups)) / self.rows} if groups else {}
        return step | engine_metrics(engines, step["time/step"]) | asked | epoch


def engine_metrics(engines: Sequence[EngineActivity], seconds: float) -> Metrics:
    """Return the metrics of the engines' activity in a step of this duration, without values not reported."""
    metrics = {
        # Engines report slightly after the step's time was measured, so busy_seconds may exceed it.
        "engine/idle_fraction": mean(max(0.0, 1 - engine.busy_seconds / seconds) for engine in engines),
        "engine/generated_tokens": float(sum(engine.generated_tokens for engine in engines)),
        "engine/prefilled_tokens": float(sum(engine.prefilled_tokens for engine in engines)),
    }
    counted: Sequence[tuple[str, list[float | None], Callable[[Sequence[float]], float]]] = (
        ("engine/preemptions", [engine.preemptions for engine in engines], sum),
        ("engine/running", [engine.running for engine in engines], mean),
        ("engine/waiting", [engine.waiting for engine in engines], mean),
        ("engine/kv_cache_use", [engine.kv_cache_use for engine in engines], max),
        ("engine/tokens_in_flight", [engine.tokens_in_flight for engine in engines], sum),
    )
    for name, values, joined in counted:
        if known := [value for value in values if value is not None]:
            metrics[name] = float(joined(known))
    return metrics
