"""Reinforcement learning from verifiable rewards: the loop.

      scheduler ──groups──▶ experience ──▶ reference, critic ──▶ advantages ──▶ actor_train, critic
          ▲                                                                       │
          └────────────── actor_infer ◀────── weight_sync ◀────── version n + 1 ──┘

Each step awaits, in this order:

- the step's groups
- the reference's log-probs, if the loss or the reward uses them
- the trainer's own log-probs, if the loss uses ratios to them
- the critic's values and the teachers' states, if there are such roles
- the optimizer updates
- the weight sync, after which the engines generate with the new version

With `async_generation_ratio` above 0, generation continues while the trainer works. Every part measures its own time and has its
own deadlines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from roll.agents.episode_metrics import episode_metrics
from roll.rollout.batch import Experience, Shaping, experience, rollout_metrics, usable
from roll.runs.device_phases import DevicePhases
from roll.runs.position import Position
from roll.tracking.base import Tracker
from roll.types import Floats, Metrics, RolloutGroup, Sequences, TrainBatch


@dataclass(frozen=True)
class Rlvr:
    """The wired parts of a run. `wire_rlvr` builds them and decides when validation and checkpoints are due."""

    phases: DevicePhases
    take: Callable[[], Awaitable[list[RolloutGroup]]]
    log_probs: Callable[[Sequences], Awaitable[Floats]] | None
    """Log-probs of the trainer's policy before the step's first update."""
    ref_log_probs: Callable[[Sequence[RolloutGroup], Sequences], Awaitable[Floats]] | None
    """Log-probs of the reference, for the step's groups and their sequences."""
    reference_role: str
    """Role that computes the reference's log-probs: `reference`, or `actor_train` with its adapter off."""
    values: Callable[[Sequences], Awaitable[Floats]] | None
    """Values of the critic before the step's first update."""
    teacher_states: Callable[[Sequence[RolloutGroup], Experience], Awaitable[Floats]] | None
    """Outputs [S, W] of the teachers for the S response tokens of the step. Onloads each teacher."""
    learn: Callable[[TrainBatch, Position], Awaitable[tuple[Metrics, Position]]]
    """Runs the step's updates, and returns their metrics and the position after them. Onloads each learner."""
    sync: Callable[[int], Awaitable[None]]
    """Sends the weights of this policy version to the engines."""
    evaluate: Callable[[int], Awaitable[Metrics]]
    """Validation metrics after a step, empty if validation is not due. Onloads the engine."""
    measure: Callable[[Sequence[RolloutGroup]], Awaitable[Metrics]]
    """Durations of the step's parts, throughput and memory."""
    save: Callable[[Position], Awaitable[None]]
    """Writes a checkpoint if one is due."""
    interrupted: Callable[[], bool]
    tracker: Tracker
    shaping: Shaping
    credit: Callable[[Experience, Floats | None, Floats | None, Floats | None], tuple[TrainBatch, Metrics]]
    """Returns the step's training batch with advantages, and metrics; see `CreditAssignment`."""
    max_steps: int


async def _record_unscored(run: Rlvr, groups: Sequence[RolloutGroup], position: Position) -> None:
    """Record a step in which no response has a verdict, so that the console, the metrics and the samples show what ends the run."""
    metrics = rollout_metrics(groups, position.policy_version) | episode_metrics(groups)
    run.tracker.log(position.step + 1, metrics | await run.measure(groups))
    run.tracker.samples(position.step + 1, groups)


async def train(run: Rlvr, position: Position) -> Position:
    """Run the loop from `position` to the last step, or to the end of the step in which the run is interrupted."""
    await run.phases.sync()
    await run.sync(position.policy_version)
    if position.step == 0:
        run.tracker.log(0, await run.evaluate(0) | await run.measure([]))
    else:
        await run.measure([])  # keeps the time of loading a checkpoint out of the next step
    while position.step < run.max_steps and not run.interrupted():
        await run.phases.generation()
        groups = await run.take()
        if not any(map(usable, groups)):
            await _record_unscored(run, groups, position)
        step = experience(groups, run.shaping)
        ref_log_probs = log_probs = values = None
        if run.ref_log_probs:
            await run.phases.scoring(run.reference_role)
            ref_log_probs = await run.ref_log_probs(groups, step.sequences)
        if run.log_probs:
            await run.phases.scoring("actor_train")
            log_probs = await run.log_probs(step.sequences)
        if run.values:
            await run.phases.scoring("critic")
            values = await run.values(step.sequences)
        batch, metrics = run.credit(step, ref_log_probs, log_probs, values)
        if run.teacher_states:
            batch = replace(batch, teacher_states=await run.teacher_states(groups, step))
        metrics |= rollout_metrics(groups, position.policy_version) | episode_metrics(groups)
        learnt, position = await run.learn(batch, position)
        await run.phases.sync()
        await run.sync(position.policy_version)
        metrics |= learnt | await run.evaluate(position.step)
        metrics |= await run.measure(groups)
        run.tracker.log(position.step, metrics)
        run.tracker.samples(position.step, groups)
        await run.save(position)
    return position
