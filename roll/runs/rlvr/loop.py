"""Reinforcement learning from verifiable rewards: the loop, the optimizer updates of a step, and its measurements.

      scheduler ──groups──▶ experience ──▶ reference, critic ──▶ advantages ──▶ actor_train, critic
          ▲                                                                       │
          └────────────── actor_infer ◀────── weight_sync ◀────── version n + 1 ──┘

Each step awaits, in this order:

- the step's groups
- the reference's log-probs, if the loss or the reward uses them
- the trainer's own log-probs, if the loss uses ratios to them
- the critic's values, the self-teacher's log-probs and the teachers' states, if there are any
- the optimizer updates
- the weight sync, after which the engines generate with the new version

With `async_generation_ratio` above 0, generation continues while the trainer works. Every part measures its own time
and has its own deadlines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import mean
from typing import Protocol

from roll.agents.episodes import episode_metrics
from roll.algorithms.losses import Loss
from roll.backend import EngineActivity
from roll.engines.actor_infer import ActorInfer
from roll.ray.device_sharing import run_together
from roll.rewards.reward_workers import ModelReward
from roll.rollout.batch import CreditAssignment, Shaping, experience, rollout_metrics, token_count
from roll.rollout.filters import usable
from roll.rollout.kept import RolloutFiles
from roll.rollout.reference import StepReference
from roll.rollout.replay import GroupReplay
from roll.rollout.scheduler import RolloutScheduler
from roll.runs.checkpointer import Checkpointer
from roll.runs.device_phases import DevicePhases
from roll.runs.interrupt import Interrupt
from roll.runs.meter import Meter
from roll.runs.position import Position
from roll.runs.rlvr.engine_sync import Engines
from roll.runs.rlvr.playing import EpisodeParts
from roll.runs.rlvr.reward_models import judge_metrics
from roll.runs.rlvr.self_teacher import SelfTeacher
from roll.runs.rlvr.validation import Validation
from roll.runs.teacher import StepTeachers
from roll.tracking.base import Tracker
from roll.training.actor_train import ActorTrain, Critic
from roll.types import Metrics, RolloutGroup, TrainBatch


@dataclass(frozen=True)
class Rlvr:
    """The parts of a run."""

    phases: DevicePhases
    meter: StepMeter
    scheduler: RolloutScheduler
    engines: Engines
    trainer: ActorTrain
    needs_log_probs: bool
    """Whether the step needs the log-probs of the trainer's policy before the first update."""
    reference: StepReference | None
    """The reference, if the loss or the reward uses its log-probs."""
    reference_role: str
    """Role that computes the reference's log-probs: `reference`, or `actor_train` with its adapter off."""
    critic: Critic | None
    teachers: StepTeachers | None
    self_teacher: SelfTeacher | None
    """The policy with hints in its prompts, if it is taught by itself."""
    learning: Learning
    validation: Validation
    checkpointer: Checkpointer
    interrupt: Interrupt
    tracker: Tracker
    shaping: Shaping
    credit: CreditAssignment
    max_steps: int
    rollouts: RolloutFiles | None = None
    """Keeps every rollout. None without `keep_rollouts`."""
    replay: GroupReplay | None = None
    """Replays rare successes in the place of groups that teach nothing. None: all sampled groups are trained on."""


async def train_rlvr(run: Rlvr, position: Position) -> Position:
    """Run the loop from `position` to the last step, or to the end of the step in which the run is interrupted or
    `early_stopping` ends it.
    """
    await run.phases.sync()
    with run.meter.part("weight_sync"):
        await run.engines.push(position.policy_version)
    if position.step == 0:
        metrics = await run.validation.after(0) | await run.meter.step([])
        run.tracker.log(0, metrics)
        run.checkpointer.observe(0, metrics)
    else:
        await run.meter.step([])  # keeps the time of loading a checkpoint out of the next step
    while position.step < run.max_steps and not (run.checkpointer.stopped_early or run.interrupt.happened()):
        await run.phases.generation()
        with run.meter.part("rollout"):
            async with run.engines.generating():
                groups = await run.scheduler.take()
        if not any(map(usable, groups)):
            await _record_unscored(run, groups, position)
        trained = run.replay.trained(groups, position.policy_version) if run.replay else groups
        step = await asyncio.to_thread(experience, trained, run.shaping)  # reads the pictures
        ref_log_probs = log_probs = values = taught = None
        if run.reference:
            await run.phases.scoring(run.reference_role)
            with run.meter.part("reference"):
                ref_log_probs = await run.reference.of(trained, step.sequences)
        if run.needs_log_probs:
            await run.phases.scoring("actor_train")
            with run.meter.part("log_probs"):
                log_probs = await run.trainer.log_probs(step.sequences)
        if run.critic:
            await run.phases.scoring("critic")
            with run.meter.part("values"):
                values = await run.critic.values(step.sequences)
        if run.self_teacher:
            taught = await run.self_teacher.gains(trained, step, log_probs)
        batch, metrics = run.credit(step, ref_log_probs, log_probs, values, taught)
        if run.teachers:
            batch = replace(batch, teacher_states=await run.teachers.states(trained, step))
        metrics |= rollout_metrics(groups, position.policy_version) | episode_metrics(groups)
        metrics |= run.replay.metrics() if run.replay else {}
        await _keep(run, trained, batch, position)
        with run.meter.part("train"):
            learnt, position = await run.learning.update(batch, position)
        await run.phases.sync()
        with run.meter.part("weight_sync"):
            await run.engines.push(position.policy_version)
        metrics |= learnt | await run.validation.after(position.step) | await run.meter.step(groups)
        run.tracker.log(position.step, metrics)
        run.tracker.samples(position.step, groups)
        run.checkpointer.observe(position.step, metrics)
        with run.meter.part("checkpoint"):
            await run.checkpointer.save_if_due(position)
    return position


async def _record_unscored(run: Rlvr, groups: Sequence[RolloutGroup], position: Position) -> None:
    """Record a step without any verdict, so that the console, metrics and samples show what ends the run."""
    await _keep(run, groups, None, position)
    metrics = rollout_metrics(groups, position.policy_version) | episode_metrics(groups)
    run.tracker.log(position.step + 1, metrics | await run.meter.step(groups))
    run.tracker.samples(position.step + 1, groups)


async def _keep(run: Rlvr, groups: Sequence[RolloutGroup], batch: TrainBatch | None, position: Position) -> None:
    """Keep a step's rollouts, before anything is learnt from them: a step that fails in training can be replayed."""
    if run.rollouts:
        with run.meter.part("keep_rollouts"):
            await run.rollouts.keep(position.step + 1, groups, batch)


class Learner(Protocol):
    """A role that learns: the policy or the critic."""

    async def train_step(self, batch: TrainBatch, loss: Loss, policy_version: int) -> Metrics:
        """Run all optimizer updates of a step. `policy_version` is the version before the updates."""
        ...


@dataclass(frozen=True)
class CriticLearning:
    """Settings of the critic's updates."""

    learner: Learner
    loss: Loss
    warmup: int
    """Number of initial steps in which only the critic learns. The policy does not change, but is synced again."""
    at_once: bool
    """Whether policy and critic learn concurrently, on separate devices. Otherwise the critic learns first."""


@dataclass(frozen=True)
class Learning:
    """Runs the updates of a step."""

    phases: DevicePhases
    policy: Learner
    loss: Loss
    updates: int
    critic: CriticLearning | None = None

    async def update(self, batch: TrainBatch, position: Position) -> tuple[Metrics, Position]:
        """Run the updates. Return their metrics and the position after the step."""
        version, critic = position.policy_version, self.critic
        policy_learns = critic is None or position.step >= critic.warmup
        parts: list[Metrics] = []
        if critic and critic.at_once:
            await self.phases.training("actor_train", "critic")
            policy = [self.policy.train_step(batch, self.loss, version)] if policy_learns else []
            parts += await run_together([critic.learner.train_step(batch, critic.loss, version), *policy])
        else:
            if critic:
                await self.phases.training("critic")
                parts.append(await critic.learner.train_step(batch, critic.loss, version))
            if policy_learns:
                await self.phases.training("actor_train")
                parts.append(await self.policy.train_step(batch, self.loss, version))
        metrics = {name: value for part in parts for name, value in part.items()}
        return metrics, Position(position.step + 1, version + (self.updates if policy_learns else 0))


@dataclass(frozen=True)
class StepMeter:
    """Measures the steps of a run."""

    meter: Meter
    scheduler: RolloutScheduler
    engines: ActorInfer | None
    """None in a replay."""
    models: Mapping[str, ModelReward]
    """Rewards by models, by domain."""
    playing: EpisodeParts | None
    """What plays episodes. None without environments."""
    rows: int
    """Number of prompts in the data, for the metric `epoch`."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """See `Meter.part`."""
        return self.meter.part(name)

    async def step(self, groups: Sequence[RolloutGroup]) -> Metrics:
        """Return the metrics of the step that ends now: times, throughput, dropped groups, activity of engines."""
        samples = sum(len(group.episodes) for group in groups)
        measured = self.meter.step(token_count(groups), samples)
        asked = self.scheduler.metrics() | judge_metrics(self.models)
        if self.engines:
            step, engines = await asyncio.gather(measured, self.engines.activity())
            asked |= self.engines.metrics() | engine_metrics(engines, step["time/step"])
        else:
            step = await measured
        if self.playing:
            asked |= self.playing.environments.metrics() | self.playing.partners.metrics()
        epoch = {"epoch": (1 + max(group.prompt.prompt_id for group in groups)) / self.rows} if groups else {}
        return step | asked | epoch


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
        ("engine/proposed_tokens", [engine.proposed_tokens for engine in engines], sum),
        ("engine/accepted_tokens", [engine.accepted_tokens for engine in engines], sum),
        ("engine/tokens_in_flight", [engine.tokens_in_flight for engine in engines], sum),
    )
    for name, values, joined in counted:
        if known := [value for value in values if value is not None]:
            metrics[name] = float(joined(known))
    return metrics
