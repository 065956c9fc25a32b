"""Preferences: from the configuration to the parts of their loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from roll.algorithms.losses import Loss
from roll.algorithms.preference import Dpo, Ipo, Kto, OrPo, PreferenceLoss, SimPo
from roll.config.schema.offline import DpoConfig
from roll.data.example_batch import given_batch, mismatched
from roll.data.examples import ExampleSet
from roll.data.sampler import ExampleSampler
from roll.pipeline import offline
from roll.pipeline.device_phases import DevicePhases
from roll.pipeline.interrupt import Interrupt
from roll.pipeline.meter import meter_of
from roll.pipeline.position import Position
from roll.pipeline.roles import Roles, check_same_tokens
from roll.pipeline.run_context import Prepared, RunContext
from roll.pipeline.wire_offline import GivenRows, evaluation, parts, prepare_rows, steps_of
from roll.types import Floats, Metrics, Sequences, TrainBatch

Ask = Callable[[Sequences], Awaitable[Floats]]
"""Sequences to the log-probs of their response tokens, [T]."""


def prepare(config: DpoConfig) -> Prepared:
    """Check the models' files and prepare all rows; the loop, ready to be given its surroundings.

    Raises:
        BadInput: model or data cannot be used.
    """
    if config.reference:
        check_same_tokens(config, config.actor_train.model_args, config.reference.model_args, "reference")
    rows = prepare_rows(config, "labelled" if config.preference_loss == "kto" else "pairs")
    return Prepared(partial(_loop, config, rows), rows.training.identity, len(rows.training))


async def _loop(config: DpoConfig, rows: GivenRows, roles: Roles, context: RunContext, interrupt: Interrupt) -> Position:
    batch_size = context.plan.batch.sequences_per_step
    steps = steps_of(config, len(rows.training), batch_size)
    actor_train = roles.actor_train("actor_train", config.actor_train, steps, temperature=1.0)
    has_role = context.plan.reference == "role"
    reference = roles.score("reference", config.reference, temperature=1.0) if has_role and config.reference else actor_train
    sharing = await roles.start()
    meter = meter_of(roles, context.plan, sharing)
    phases = DevicePhases(meter.timed("onload", sharing.bring))
    ask = phases.reference("reference" if has_role else "actor_train", reference.ref_log_probs)
    ask = None if context.plan.reference == "unused" else ask
    timed = meter.timed("reference", ask) if ask else None

    sampler = ExampleSampler(len(rows.training), config.seed)
    position = await context.checkpointer.restore(phases.trainer(actor_train), sampler, last_step=steps)
    log_probs = phases.training(actor_train.log_probs)
    training = Preferences(rows.training, preference_loss(config), timed, meter.timed("log_probs", log_probs))
    # Evaluation is timed as a whole, with what it asks.
    held_out = Preferences(rows.held_out, preference_loss(config), ask, log_probs) if rows.held_out else None
    if config.reference_log_probs == "precomputed" and timed:
        training = await known(training, sampler.ahead((steps - position.step) * batch_size), batch_size, timed)
        held_out = await known(held_out, range(len(held_out.rows)), batch_size, timed) if held_out else None
        if has_role:
            await roles.end("reference")
            sharing.ended("reference")
    evaluate_batch, update = phases.training(actor_train.evaluate), phases.training(actor_train.train_step)
    evaluate = evaluation(config, rows, held_out or training, evaluate_batch, held_out_metrics, batch_size, steps)
    return await offline.train(parts(context, meter, interrupt, update, sampler, training, evaluate, steps), position)


@dataclass(frozen=True)
class Preferences:
    """Rows, and what is asked about them before they are learnt."""

    rows: ExampleSet
    loss: Loss
    ask: Ask | None
    """The reference; None if the loss uses none."""
    log_probs: Ask
    """The policy as it is; KTO alone asks it."""
    known: Mapping[int, Floats] = field(default_factory=dict)
    """By number of the row, the reference's log-probs of all of its tokens, where they were asked for beforehand."""

    async def __call__(self, numbers: Sequence[int]) -> tuple[TrainBatch, Loss]:
        """See `MakeBatch`."""
        examples = [self.rows.example(number) for number in numbers]
        batch, loss = given_batch(examples), self.loss
        if isinstance(loss, Kto):
            loss = replace(loss, kl=await self._kl(mismatched(examples)))
        if self.known:
            return replace(batch, ref_log_probs=np.concatenate([self.known[number] for number in numbers])), loss
        if self.ask:
            return replace(batch, ref_log_probs=await self.ask(batch.sequences)), loss
        return batch, loss

    async def _kl(self, sequences: Sequences) -> float:
        """KTO's estimate from responses to other prompts: mean log-ratio of policy to reference, nats a response, not below 0."""
        assert self.ask is not None, "KTO without a reference"
        log_ratio = await self.log_probs(sequences) - await self.ask(sequences)
        return max(0.0, float(log_ratio.sum(dtype=np.float64)) / len(sequences))


async def known(preferences: Preferences, numbers: Sequence[int], chunk: int, ask: Ask) -> Preferences:
    """The same with the reference asked about these rows, each once, `chunk` rows at a time."""
    once, found = sorted(set(numbers)), {}
    for start in range(0, len(once), chunk):
        asked = once[start : start + chunk]
        batch = given_batch([preferences.rows.example(number) for number in asked])
        log_probs = await ask(batch.sequences)
        ends = batch.sequences.offsets[batch.sequences_per_example :: batch.sequences_per_example][:-1]
        found |= dict(zip(asked, np.split(log_probs, ends), strict=True))
    return replace(preferences, known=found)


def preference_loss(config: DpoConfig) -> Loss:
    """The loss that the keys describe."""
    match config.preference_loss:
        case "dpo":
            return PreferenceLoss(Dpo(config.beta, config.label_smoothing))
        case "ipo":
            return PreferenceLoss(Ipo(config.beta))
        case "simpo":
            return PreferenceLoss(SimPo(config.beta, config.simpo_gamma))
        case "orpo":
            return PreferenceLoss(OrPo(config.beta))
        case "kto":
            return Kto(config.beta, config.desirable_weight, config.undesirable_weight)


def held_out_metrics(name: str, metrics: Metrics) -> Metrics:
    """Loss, and of pairs how often and by how much the chosen response is ahead."""
    found = {f"val/{name}/loss": metrics["dpo/loss"]}
    if "dpo/accuracy" in metrics:
        found |= {f"val/{name}/accuracy": metrics["dpo/accuracy"], f"val/{name}/reward_margin": metrics["dpo/reward_margin"]}
    return found
