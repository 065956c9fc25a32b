"""Wires a replay: the loop learns from the kept rollouts of another run, without engines, rewards and environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from roll.config.derived.batch import longest_sequence
from roll.config.derived.methods import keeps_engine_log_probs
from roll.config.derived.placement import is_trainer_side, model_roles
from roll.config.schema.rlvr import RlvrConfig
from roll.data.chat import NO_END, EndOfTurn
from roll.errors import ConfigError, Fault, RollError
from roll.models.thinking import ResponseTexts
from roll.models.weight_files import check_readable
from roll.rollout.filters import everything
from roll.rollout.kept import FOLDER, KeptRollouts, StepFacts, step_file, steps_in
from roll.rollout.record import TurnEnds
from roll.rollout.scheduler import RolloutScheduler
from roll.runs.device_phases import DevicePhases
from roll.runs.interrupt import Interrupt
from roll.runs.meter import meter_of
from roll.runs.model_paths import model_path
from roll.runs.notices import training_watches
from roll.runs.position import Position
from roll.runs.rlvr.loop import StepMeter
from roll.runs.rlvr.validation import Validation
from roll.runs.rlvr.wiring import (
    LoopParts,
    chat_of,
    checked_tokenizer,
    end_of_turn,
    learners_of,
    reference_of,
    run_loop,
    shaping,
    training_sampling,
)
from roll.runs.role_models import behaviour, embedding_rows, vocabulary_digest
from roll.runs.roles import Roles
from roll.runs.run_context import PreparedRun, RunContext
from roll.system.ranges import ranges
from roll.tracking.base import Watch

PLACE = "replay_from"


@dataclass(frozen=True)
class NoEngines:
    """Implements `Engines`: no engine takes the weights."""

    async def begin(self) -> None:
        """Do nothing."""

    async def push(self, policy_version: int) -> None:
        """Do nothing."""

    def generating(self) -> AbstractAsyncContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()


@dataclass(frozen=True)
class ReplayInputs:
    """What a replay needs, checked before anything starts."""

    facts: StepFacts
    """Those of the first step."""
    end: EndOfTurn
    locate: TurnEnds | None
    """Finds the ends of turns in responses that were kept as one. None if no single turns are credited."""
    watches: Sequence[Watch]


def prepare_replay(config: RlvrConfig) -> PreparedRun:
    """Check the models' files and the kept rollouts. Return the loop, ready to run.

    Raises:
        BadInput: a model cannot be used, or the rollouts cannot be learnt from with this configuration.
    """
    for name, role in model_roles(config).items():
        if is_trainer_side(name):
            check_readable(model_path(config, role.model_args), role.model_args.lora_target)
    tokenizer = checked_tokenizer(config)
    steps = kept_steps(config)
    end = end_of_turn(config, tokenizer, chat_of(config, tokenizer, None))
    if faults := [*token_faults(config, steps, tokenizer)]:
        raise ConfigError(*faults)
    locate = TurnEnds(ResponseTexts(tokenizer)) if config.adv_estimator.traits.needs_turns else None
    inputs = ReplayInputs(steps[0], end, locate, training_watches(config, tokenizer, end))
    return PreparedRun(partial(_loop, config, inputs), steps[0].origin.identity)


async def _loop(
    config: RlvrConfig, inputs: ReplayInputs, roles: Roles, context: RunContext, interrupt: Interrupt
) -> Position:
    sampling, origin = training_sampling(config, inputs.end), inputs.facts.origin
    learners = learners_of(config, context.plan, roles, sampling.temperature, inputs.end)
    sharing = await roles.start()
    meter, engines = meter_of(roles, context, sharing), NoEngines()
    phases, shaped = DevicePhases(sharing, meter.part), shaping(config, sampling.max_new_tokens)
    kept = KeptRollouts(run_folder(config), config.rollout_batch_size, inputs.locate)
    async with (
        aclosing(reference_of(config, context.plan, learners.reference, shaped)) as asked,
        aclosing(
            RolloutScheduler(kept, kept, config.rollout_batch_size, 0.0, None, keep=everything, finished=asked.finished)
        ) as scheduler,
    ):
        parts = LoopParts(
            phases=phases,
            meter=StepMeter(meter, scheduler, None, {}, None, origin.rows),
            scheduler=scheduler,
            asked=asked,
            shaping=shaped,
            engines=engines,
            begin=engines.begin,
            validation=Validation(0, config.max_steps, (), phases, engines, meter.part, context.tracker),
            watches=inputs.watches,
            origin=origin,
        )
        return await run_loop(config, context, interrupt, learners, parts)


def run_folder(config: RlvrConfig) -> Path:
    """Return the folder of the run that is replayed."""
    assert config.replay_from is not None, "not a replay"
    return Path(config.replay_from)


def kept_steps(config: RlvrConfig) -> list[StepFacts]:
    """Return the facts of the steps that are replayed, in order. Reads no rollout, and needs no tokenizer.

    Raises:
        ConfigError: steps are missing or cannot be read, or do not fit the configuration.
    """
    folder = run_folder(config)
    there = steps_in(folder / FOLDER)
    if not there:
        problem = f"'{folder}' has no kept rollouts ({FOLDER}/{step_file(folder, 1).name})"
        remedy = "give the folder of a run with keep_rollouts: true"
        raise ConfigError(Fault(PLACE, problem, remedy, "not_found"))
    if lacking := [step for step in range(1, config.max_steps + 1) if step not in there]:
        problem = f"'{folder}' lacks the rollouts of steps {ranges(lacking)} of {config.max_steps}"
        before = lacking[0] - 1
        remedy = f"set max_steps={before}" if before else "replay another run, which kept its first step"
        raise ConfigError(Fault(PLACE, problem, remedy, "missing"))
    kept = KeptRollouts(folder, config.rollout_batch_size)
    try:
        steps = [kept.facts(step) for step in range(1, config.max_steps + 1)]
    except RollError as error:
        raise ConfigError(Fault(PLACE, str(error), "replay fewer steps, or another run", "unreadable")) from error
    if faults := list(
        {fault.place: fault for step in reversed(steps) for fault in _step_faults(config, step)}.values()
    ):
        raise ConfigError(*faults)
    return steps


def _step_faults(config: RlvrConfig, step: StepFacts) -> Iterator[Fault]:
    """Yield the faults of a step that this configuration cannot learn from."""
    where = str(step_file(run_folder(config) / FOLDER, step.step))
    counts: Mapping[str, tuple[int, int]] = {
        "rollout_batch_size": (config.rollout_batch_size, step.groups),
        "num_return_sequences_in_group": (config.num_return_sequences_in_group, step.samples),
    }
    for place, (value, kept) in counts.items():
        if value != kept:
            yield Fault(place, f"{value}, but {where} has {kept}", f"set {place}={kept}", "contradiction")
    now = behaviour(training_sampling(config, NO_END))
    for key, kept in step.origin.sampling.items():
        if now[key] != kept:
            place = f"actor_infer.generating_args.{key}"
            yield Fault(place, f"{now[key]:g}, but {where} was sampled with {kept:g}", f"set it to {kept:g}", "unfit")
    if step.longest > (most := longest_sequence(config)):
        problem = f"sequences have at most {most} tokens, but {where} has one of {step.longest}"
        yield Fault("response_length", problem, "use the lengths of the run that is replayed", "too_large")
    if strange := sorted(set(step.domains) - config.domains.keys()):
        problem = f"{where} has rollouts of the domain '{strange[0]}', which has neither reward nor environment here"
        yield Fault(PLACE, problem, f"add rewards.{strange[0]}, as in the run that is replayed", "unknown_name")
    yield from _absent(config, step, where)


def _absent(config: RlvrConfig, step: StepFacts, where: str) -> Iterator[Fault]:
    """Yield faults of what the configuration reads and the step lacks."""
    if keeps_engine_log_probs(config) and not step.has_log_probs:
        remedy = "set behaviour_log_probs to trainer or on_policy, and mismatch_correction to none"
        yield Fault("behaviour_log_probs", f"the loss reads the engine's, but {where} has none", remedy, "unfit")
    if config.adv_estimator.traits.needs_greedy and not step.has_baselines:
        problem = f"{config.adv_estimator} compares with greedy responses, but {where} has none"
        yield Fault("adv_estimator", problem, "use another estimator, or replay a run with this one", "unfit")
    if config.router_replay and not step.has_routes:
        yield Fault("router_replay", f"true, but {where} has no routes", "remove the key", "unfit")


def token_faults(config: RlvrConfig, steps: Sequence[StepFacts], tokenizer: PreTrainedTokenizerBase) -> Iterator[Fault]:
    """Yield the faults of rollouts whose tokens mean something else to the model in training, or nothing."""
    folder = run_folder(config)
    if steps[0].origin.vocabulary != vocabulary_digest(tokenizer):
        problem = f"the tokens of '{folder}' are those of another vocabulary than that of '{tokenizer.name_or_path}'"
        yield Fault(PLACE, problem, "use a model of the same family, with the same tokenizer", "unfit")
    roles = [role for name, role in model_roles(config).items() if is_trainer_side(name)]
    rows, largest = embedding_rows(config, tokenizer, roles), max(step.largest_token for step in steps)
    if rows is not None and largest >= rows:
        problem = f"'{folder}' has the token {largest}, but a model has embeddings only for 0 to {rows - 1}"
        yield Fault(PLACE, problem, "use the model of the run that is replayed", "out_of_range")
