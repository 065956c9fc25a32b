"""Wires the offline pipelines: the loop that they share, and the rows, batch, loss and metrics of SFT, preference
optimisation, reward models and distillation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from roll.algorithms.divergence import Distillation
from roll.algorithms.losses import Loss, NegativeLogLikelihood
from roll.algorithms.preference import LABELLED_LOSSES, PAIR_OBJECTIVES, BradleyTerry, Kto, Mixture, PreferenceLoss
from roll.backend import TrainStepResult
from roll.backend_settings import ModelLoader
from roll.config.derived.batch import row_learner
from roll.config.derived.methods import added_losses
from roll.config.derived.placement import model_roles
from roll.config.plan.plan import Plan
from roll.config.schema.model import DataConfig
from roll.config.schema.offline import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from roll.data.chat import NO_END, EndOfTurn, ends_of
from roll.data.examples import (
    SHORTENED,
    WORDLESS,
    Example,
    ExampleSampler,
    ExampleSequence,
    ExampleSet,
    Kind,
    LengthLimits,
    RowRange,
    prepare_examples,
)
from roll.data.prompts import warn_of_rows
from roll.models.load import load_policy, load_seeing_policy, load_tokenizer
from roll.models.value import load_scores, pad_token, scored_token
from roll.models.weight_files import check_readable
from roll.runs.checkpointer import OnloadedTrainer
from roll.runs.device_phases import DevicePhases, untimed
from roll.runs.interrupt import Interrupt
from roll.runs.meter import meter_of
from roll.runs.model_paths import model_path
from roll.runs.offline import loop as offline
from roll.runs.offline.batches import Ask, Batches, MakeBatch, Models, given_batch, mismatched
from roll.runs.position import Epochs, Position
from roll.runs.role_models import check_same_tokens, embedding_rows
from roll.runs.roles import Roles
from roll.runs.run_context import PreparedRun, RunContext
from roll.runs.seeing import sight_of
from roll.runs.teacher import teaching
from roll.training.actor_train import ActorTrain, merge
from roll.types import Floats, Metrics, Sequences, TrainBatch

Report = Callable[[str, Metrics], Metrics]
"""Turns the name of a held-out set and the loss's metrics on it into validation metrics."""


@dataclass(frozen=True)
class GivenRows:
    """The rows of a run."""

    training: ExampleSet
    held_out: ExampleSet | None
    end: EndOfTurn = NO_END
    """What ends a response."""
    sees: bool = False
    """Whether the model sees pictures."""


def prepare_rows(config: OfflineConfig, kind: Kind, learn_all: bool = False) -> GivenRows:
    """Check the model files of every role, and prepare all rows. In distillation they may not show pictures.

    Args:
        learn_all: whether to learn from the prompts as well.

    Raises:
        BadInput: a model or the data cannot be used.
    """
    for role in model_roles(config).values():
        check_readable(model_path(config, role.model_args), role.model_args.lora_target)
    name, learning = row_learner(config)
    path = model_path(config, learning.model_args)
    tokenizer = load_tokenizer(path, learning.model_args.trust_remote_code)
    limits = length_limits(config)
    embedded = embedding_rows(config, tokenizer, model_roles(config).values())
    others = {role: keys for role, keys in model_roles(config).items() if role != name}
    is_blind = isinstance(config, DistillConfig)
    sight = None if is_blind else sight_of(config, tokenizer, learning.model_args, others)

    def prepare(data_args: DataConfig, number: int) -> ExampleSet:
        part = RowRange(config.data_split, number, config.seed) if config.data_split else None
        rows = prepare_examples(data_args, tokenizer, limits, kind, learn_all, part, embedded=embedded, sight=sight)
        warn_of_rows(rows.too_long, f"were left out: {_longer(limits)}")
        warn_of_rows(rows.shortened, f"{SHORTENED.get(limits.truncation)}: they are longer than {limits}")
        warn_of_rows(rows.wordless, f"were left out: {WORDLESS}")
        warn_of_rows(rows.alike, "teach no preference: the chosen and the rejected response are the same")
        for what, counts in rows.remarks.items():
            warn_of_rows(counts, what)
        return rows

    training, end = prepare(learning.data_args, 0), ends_of(learning.data_args, tokenizer)
    if not config.eval_steps:
        return GivenRows(training, None, end, sight is not None)
    given = config.validation.data_args if config.validation else None
    held_out = prepare(given.rendered_as(learning.data_args) if given else learning.data_args, 1)
    return GivenRows(training, held_out, end, sight is not None)


def length_limits(config: OfflineConfig) -> LengthLimits:
    """Return the limits of a row's length."""
    if config.max_length:
        return LengthLimits.of_whole(config.max_length, config.truncation)
    return LengthLimits(config.prompt_length, config.response_length)


def _longer(limits: LengthLimits) -> str:
    """Return why rows are left out."""
    if limits.together is None:
        return f"its prompt exceeds prompt_length {limits.prompt} or a response response_length {limits.response}"
    if limits.truncation == "drop":
        return f"they are longer than {limits}"
    return f"the {'prompt' if limits.truncation == 'end' else 'response'} alone leaves no room within {limits}"


def steps_of(config: OfflineConfig, rows: int, batch_size: int) -> int:
    """Return the number of steps of the run: those of its epochs, or `max_steps` if that is less."""
    _, learning = row_learner(config)
    return Epochs(rows, batch_size).steps(learning.training_args.num_train_epochs, config.max_steps)


@dataclass(frozen=True)
class OtherModel:
    """The reference or the teacher."""

    role: str
    """The role that computes the outputs: the learner's if the reference is that with its adapter off."""
    part: str
    """Name in the metric `time/<part>`."""
    ask: Ask
    beforehand: bool = False
    """Whether the model processes all rows before the first step. A separate role ends afterwards."""


def no_other_model(plan: Plan, roles: Roles, learner: ActorTrain) -> OtherModel | None:
    """Return None. For pipelines in which the learner is the only model."""


@dataclass(frozen=True)
class OfflinePipeline:
    """The parts that a pipeline adds to the shared loop."""

    rows: GivenRows
    make_batch: MakeBatch
    report: Report
    load: ModelLoader = load_policy
    other_model: Callable[[Plan, Roles, ActorTrain], OtherModel | None] = no_other_model
    """Requests and returns the reference or the teacher, if the pipeline has one."""

    def prepared(self, config: OfflineConfig) -> PreparedRun:
        """Return the loop, ready to run."""
        return PreparedRun(partial(_loop, config, self), self.rows.training.identity, len(self.rows.training))


@dataclass(frozen=True)
class StartedRoles:
    """The started roles of a run, and their phases on the devices."""

    phases: DevicePhases
    role: str
    trainer: ActorTrain
    other: OtherModel | None
    part: Callable[[str], AbstractContextManager[None]] = untimed
    """Times the calls of the models; see `Meter.part`."""

    @property
    def models(self) -> Models:
        """Return the models that a batch may need."""
        return Models(self.log_probs, self.ask if self.other else None)

    async def log_probs(self, sequences: Sequences) -> Floats:
        """Return the log-probs of the learner with its current weights."""
        with self.part("log_probs"):
            await self.phases.scoring(self.role)
            return await self.trainer.log_probs(sequences)

    async def ask(self, sequences: Sequences) -> Floats:
        """Return the output of the other model."""
        assert self.other is not None
        with self.part(self.other.part):
            await self.phases.scoring(self.other.role)
            return await self.other.ask(sequences)


@dataclass(frozen=True)
class OfflineValidation:
    """Evaluates the learner on held-out rows every `every` steps and after the last step. Implements `Validation`."""

    rows: Batches
    chunk: int
    """Largest number of rows of one evaluation call."""
    every: int
    last_step: int
    name: str
    report: Report
    started: StartedRoles
    part: Callable[[str], AbstractContextManager[None]]
    """Times the whole as `evaluate`; see `Meter.part`."""

    async def after(self, step: int) -> Metrics:
        if step % self.every and step != self.last_step:
            return {}
        with self.part("evaluate"):
            return self.report(self.name, await self._metrics())

    async def _metrics(self) -> Metrics:
        """Return the loss's metrics on all held-out rows."""
        results: list[TrainStepResult] = []
        count = len(self.rows.rows)
        for numbers in np.array_split(np.arange(count), -(-count // self.chunk)):
            batch, loss = await self.rows.of(numbers.tolist())
            await self.started.phases.training(self.started.role)
            results += await self.started.trainer.evaluate(batch, loss)
        return merge(results)


async def _loop(
    config: OfflineConfig, pipeline: OfflinePipeline, roles: Roles, context: RunContext, interrupt: Interrupt
) -> Position:
    rows, batch_size = pipeline.rows, context.plan.batch.sequences_per_step
    steps = steps_of(config, len(rows.training), batch_size)
    role, keys = row_learner(config)
    trainer = roles.actor_train(role, keys, steps, temperature=1.0, load=pipeline.load, ends=rows.end.token_ids)
    other = pipeline.other_model(context.plan, roles, trainer)
    sharing = await roles.start()
    meter = meter_of(roles, context, sharing)
    phases = DevicePhases(sharing, meter.part)
    timed = StartedRoles(phases, role, trainer, other, meter.part)
    within = StartedRoles(phases, role, trainer, other)  # evaluation is timed as a whole

    sampler = ExampleSampler(len(rows.training), config.seed)
    epochs = Epochs(len(rows.training), batch_size)
    position = await context.checkpointer.restore(
        OnloadedTrainer(phases, role, trainer), sampler, last_step=steps, epochs=epochs
    )
    training = Batches(rows.training, pipeline.make_batch, timed.models)
    held_out = Batches(rows.held_out, pipeline.make_batch, within.models) if rows.held_out else None
    if other and other.beforehand:
        training = await training.record(sampler.ahead((steps - position.step) * batch_size), batch_size, timed.ask)
        held_out = held_out and await held_out.record(range(len(held_out.rows)), batch_size, timed.ask)
        if other.role != role:
            await roles.end(other.role)
    name = config.validation.name if config.validation else "validation"
    run = offline.Offline(
        phases=phases,
        meter=meter,
        role=role,
        trainer=trainer,
        training=training,
        sampler=sampler,
        batch_size=batch_size,
        validation=OfflineValidation(
            held_out, batch_size, config.eval_steps, steps, name, pipeline.report, within, meter.part
        )
        if held_out
        else None,
        checkpointer=context.checkpointer,
        interrupt=interrupt,
        tracker=context.tracker,
        epochs=epochs,
        max_steps=steps,
    )
    return await offline.train_offline(run, position)


def prepare_sft(config: SftConfig) -> PreparedRun:
    """Check the model's files and prepare all examples; return the loop. Raises BadInput if one cannot be used."""
    kind = "turns" if config.loss_on == "assistant" else "responses"
    rows = prepare_rows(config, kind, learn_all=config.loss_on == "all")
    return OfflinePipeline(rows, sft_batch, sft_metrics, policy_loader(rows)).prepared(config)


def policy_loader(rows: GivenRows) -> ModelLoader:
    """Return what loads the policy that learns from the rows."""
    return load_seeing_policy if rows.sees else load_policy


async def sft_batch(examples: Sequence[Example], models: Models) -> tuple[TrainBatch, Loss]:
    """Return the batch of the rows and its loss, without using other models."""
    return given_batch(examples), NegativeLogLikelihood()


def sft_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the validation metrics: the cross-entropy in nats per token, and the perplexity."""
    loss = metrics["sft/loss"]
    return {f"val/{name}/loss": loss, f"val/{name}/perplexity": float(np.exp(loss))}


def prepare_dpo(config: DpoConfig) -> PreparedRun:
    """Check the models' files and prepare all rows; return the loop. Raises BadInput if one cannot be used."""
    if config.reference:
        check_same_tokens(config, config.actor_train.model_args, config.reference.model_args, "reference")
    rows = prepare_rows(config, config.preference_loss.traits.rows)
    make = partial(dpo_batch, preference_loss(config))
    reference = partial(reference_model, config)
    return OfflinePipeline(rows, make, dpo_metrics, policy_loader(rows), reference).prepared(config)


def reference_model(config: DpoConfig, plan: Plan, roles: Roles, actor_train: ActorTrain) -> OtherModel | None:
    """Return the reference: a separate role, or the policy with its adapter off. None if the loss needs none."""
    beforehand = config.reference_log_probs == "precomputed"
    match plan.reference:
        case "role":
            assert config.reference is not None
            scorer = roles.score("reference", config.reference, temperature=1.0)
            return OtherModel("reference", part="reference", ask=scorer.ref_log_probs, beforehand=beforehand)
        case "unused":
            return None
        case _:
            return OtherModel("actor_train", part="reference", ask=actor_train.ref_log_probs, beforehand=beforehand)


async def dpo_batch(loss: Loss, examples: Sequence[Example], models: Models) -> tuple[TrainBatch, Loss]:
    """Return the batch and its loss, with the reference's log-probs if used, and KTO's estimate of the KL."""
    batch = given_batch(examples)
    if isinstance(loss, Kto):
        loss = replace(loss, kl=await kto_kl(mismatched(examples), models))
    if models.other is None:
        return batch, loss
    return replace(batch, ref_log_probs=await models.other(batch.sequences)), loss


async def kto_kl(sequences: Sequences, models: Models) -> float:
    """Return KTO's estimate of the KL, at least 0: the mean log-ratio on mismatched responses, in nats."""
    assert models.other is not None, "KTO needs a reference"
    log_ratio = await models.log_probs(sequences) - await models.other(sequences)
    return max(0.0, float(log_ratio.sum(dtype=np.float64)) / len(sequences))


def preference_loss(config: DpoConfig) -> Loss:
    """Return the loss that the configuration names, with its arguments."""
    method = config.preference_loss
    if method.traits.rows == "labelled":
        return LABELLED_LOSSES[method.name](**method.arguments(config))
    first = PAIR_OBJECTIVES.find(method.name)(**method.arguments(config), **config.preference_loss_args)
    added = added_losses(config).items()
    others = tuple((weight, PAIR_OBJECTIVES[other.name](**other.arguments(config))) for other, weight in added)
    return PreferenceLoss(Mixture(first, others) if others else first)


def dpo_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the validation metrics: the loss; for pairs, also the accuracy and the chosen response's margin."""
    found = {f"val/{name}/loss": metrics["dpo/loss"]}
    if "dpo/accuracy" in metrics:
        found |= {
            f"val/{name}/accuracy": metrics["dpo/accuracy"],
            f"val/{name}/reward_margin": metrics["dpo/reward_margin"],
        }
    return found


def prepare_reward_model(config: RewardModelConfig) -> PreparedRun:
    """Check the model's files and prepare all pairs; return the loop. Raises BadInput if one cannot be used."""
    rows = prepare_rows(config, "scored_pairs")
    model_args = config.reward_train.model_args
    pad = pad_token(model_path(config, model_args), model_args)
    return OfflinePipeline(rows, partial(reward_model_batch, pad), reward_model_metrics, load_scores).prepared(config)


async def reward_model_batch(pad: int | None, examples: Sequence[Example], models: Models) -> tuple[TrainBatch, Loss]:
    """Return the batch of the pairs and its loss. It marks the token at which each sequence's score is read."""
    scored = [
        replace(example, sequences=tuple(_scored(sequence, pad) for sequence in example.sequences))
        for example in examples
    ]
    return given_batch(scored), BradleyTerry()


def _scored(sequence: ExampleSequence, pad: int | None) -> ExampleSequence:
    return replace(sequence, response_mask=scored_token(sequence.token_ids, pad))


def reward_model_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the validation metrics: the loss, and the accuracy and the reward margin of the chosen response."""
    return {
        f"val/{name}/loss": metrics["reward_model/loss"],
        f"val/{name}/accuracy": metrics["reward_model/accuracy"],
        f"val/{name}/reward_margin": metrics["reward_model/margin"],
    }


def prepare_distill(config: DistillConfig) -> PreparedRun:
    """Check files and vocabularies of the models, and prepare all examples; return the loop. Raises BadInput."""
    check_same_tokens(config, config.student.model_args, config.teacher.model_args, "teacher")
    ends = teaching(config, config.student.model_args, [config.teacher.model_args])
    rows = prepare_rows(config, "responses")

    def teacher(plan: Plan, roles: Roles, student: ActorTrain) -> OtherModel:
        return OtherModel("teacher", part="teacher", ask=roles.teacher("teacher", config.teacher, ends.wrap).states)

    make = partial(distill_batch, Distillation(config.distill_loss_weight))
    return OfflinePipeline(rows, make, distill_metrics, ends.load, teacher).prepared(config)


async def distill_batch(loss: Distillation, examples: Sequence[Example], models: Models) -> tuple[TrainBatch, Loss]:
    """Return the batch of the rows, including the teacher's states for the responses, and its loss."""
    assert models.other is not None, "distillation needs a teacher"
    batch = given_batch(examples)
    return replace(batch, teacher_states=await models.other(batch.sequences)), loss


def distill_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the validation metrics: the whole loss, and the divergence alone."""
    return {f"val/{name}/loss": metrics["distill/loss"], f"val/{name}/divergence": metrics["distill/divergence"]}
