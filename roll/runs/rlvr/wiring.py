"""Wires RLVR: prepares the data and the models, and builds the parts of the loop from the configuration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from roll.agents.episode_groups import HELD_OUT, TRAINING, SampledByDomain
from roll.agents.episodes import SessionGenerator
from roll.agents.sight import EpisodeSight
from roll.algorithms.advantages import Normalisation
from roll.algorithms.corrections import Correction, MismatchCorrection
from roll.algorithms.divergence import DistilledPolicy
from roll.algorithms.losses import Loss, ValueLoss
from roll.algorithms.objectives import OBJECTIVES, Objective, PolicyLoss
from roll.algorithms.shaping import Overlong
from roll.config.derived.domains import own_tasks
from roll.config.derived.fixed_roles import PREFIX, teacher_roles
from roll.config.derived.methods import (
    correction_of,
    has_kl,
    keeps_engine_log_probs,
    ratio_source,
    replays,
    weighs_kl,
)
from roll.config.derived.placement import (
    interrupting,
    judged_in_turn,
    model_roles,
    neighbours,
    sends_adapter,
)
from roll.config.plan.plan import Plan, are_apart
from roll.config.schema.model import DataConfig
from roll.config.schema.rlvr import DynamicSamplingConfig, RlvrConfig
from roll.config.schema.roles import QueryFilterConfig, RewardModelRole
from roll.data.chat import EndOfTurn, ends_of
from roll.data.native import ASKED
from roll.data.pictures import Sight
from roll.data.prompts import (
    FIRST_HELD_OUT,
    Joined,
    Prompts,
    Tasks,
    prepare_prompts,
    warn_of_routes,
    warn_of_rows,
)
from roll.data.renderers.base import SeeingRenderer
from roll.data.renderers.families import chat_renderer
from roll.data.tables import EMBEDDING_REMEDY
from roll.engines.actor_infer import ActorInfer
from roll.errors import DataError, Fault
from roll.models.load import load_policy, load_seeing_policy, load_tokenizer
from roll.models.thinking import ResponseTexts
from roll.models.weight_files import check_readable
from roll.ray.device_sharing import DeviceSharing
from roll.registry import imported
from roll.rewards.answers import reference_text
from roll.rewards.passing import Bars
from roll.rewards.reward_workers import ModelReward
from roll.rollout.batch import Credit, CreditAssignment, Shaping
from roll.rollout.filters import ByDomain, Keep, MeanBetween, StdAbove, everything, rewards_differ
from roll.rollout.group import Generator, GroupSampler, JudgedInTurn, Scorer, SingleTurns
from roll.rollout.kept import Origin, RolloutFiles, continue_after
from roll.rollout.record import Locate, TurnEnds
from roll.rollout.reference import ReferenceAhead, ReferenceAtOnce, StepReference
from roll.rollout.replay import GroupReplay, SavedTogether
from roll.rollout.scheduler import GroupObserver, PromptSource, RolloutScheduler
from roll.runs.checkpointer import OnloadedTrainer
from roll.runs.device_phases import DevicePhases
from roll.runs.interrupt import Interrupt
from roll.runs.meter import Meter, meter_of
from roll.runs.model_paths import model_path
from roll.runs.notices import held_out_watches, training_watches
from roll.runs.rlvr import loop as rlvr
from roll.runs.rlvr.engine_sync import Engines, EngineSync
from roll.runs.rlvr.loop import CriticLearning, Learning
from roll.runs.rlvr.partners import FixedPartners, prepare_partners
from roll.runs.rlvr.playing import Chat, EpisodeParts, episode_parts, episode_samplers, listening
from roll.runs.rlvr.prompt_source import check_curriculum, source_of
from roll.runs.rlvr.rare_successes import replay_of
from roll.runs.rlvr.reward_failures import reported, totalled
from roll.runs.rlvr.reward_models import prepare_reward_models
from roll.runs.rlvr.reward_trial import check_environments, check_rewards, warn_of_unreached
from roll.runs.rlvr.self_teacher import StepHints, self_teacher_of, step_hints_of
from roll.runs.rlvr.tool_failures import told_tool_failures
from roll.runs.rlvr.validation import NO_BARS, ByItself, Evaluator, Validation
from roll.runs.role_models import (
    behaviour,
    check_same_tokens,
    embedding_rows,
    sampling_of,
    vocabulary_digest,
)
from roll.runs.roles import Roles
from roll.runs.run_context import PreparedRun, RunContext
from roll.runs.seeing import policy_sight, seeing_end
from roll.runs.teacher import Teacher, policy_teaching, step_teachers
from roll.tracking.base import Watch
from roll.tracking.fanout import Tracking
from roll.training.actor_train import ActorTrain, Critic, Reference
from roll.types import RolloutGroup, Sampling
from roll.weight_sync.routes import find_routes
from roll.weight_sync.sync import WeightSync


@dataclass(frozen=True)
class Inputs:
    """Data and models, checked before anything starts."""

    training: Prompts
    held_out: Mapping[str, Prompts]
    vocabulary: str
    """Digest of the tokenizer's vocabulary."""
    end: EndOfTurn
    """What ends a response to a training prompt."""
    held_out_ends: Mapping[str, EndOfTurn]
    """What ends a response, by held-out set."""
    chat: Chat | None
    """How conversations are rendered; None without environments."""
    locate: TurnEnds | None
    """Finds the ends of turns. None if the advantage estimator does not credit single turns of a response."""
    models_of: Callable[[Roles], dict[str, ModelReward]]
    """Requests the models that score responses, and returns their rewards by domain."""
    watches: Sequence[Watch]
    """Conditions of a step that a notice names."""
    bars: Mapping[str, Bars]
    """When a response passes, by domain."""
    hints: StepHints | None
    """Writes what a self-teacher sees. None without one."""
    partners_of: Callable[[Roles], FixedPartners]
    """Requests the partners of environments."""


def prepare_rlvr(config: RlvrConfig) -> PreparedRun:
    """Check the models' files, prepare all prompts, and try rewards and environments on them. Return the loop, ready to
    run.

    Raises:
        BadInput: a model, the data, a reward or an environment cannot be used.
    """
    for role in model_roles(config).values():
        check_readable(model_path(config, role.model_args), role.model_args.lora_target)
    tokenizer = checked_tokenizer(config)
    sight = policy_sight(config, tokenizer)
    training = prompts_of(config, tokenizer, config.actor_train.data_args, own_tasks(config), 0, sight)
    held_out = held_out_prompts(config, tokenizer, sight)
    bars = check_rewards(config, training, *held_out.values())
    warn_of_unreached(config, training, *held_out.values())
    check_curriculum(config, training, bars)
    hints = step_hints_of(config, tokenizer, training, bars)
    chat = chat_of(config, tokenizer, sight)
    check_environments(config, chat, training, *held_out.values())
    locate = None
    if config.adv_estimator.traits.needs_turns:
        locate = TurnEnds(ResponseTexts(tokenizer))
    end = seeing_end(end_of_turn(config, tokenizer, chat), sight)
    ends = held_out_ends(config, tokenizer, sight)
    watches = [*training_watches(config, tokenizer, end), *held_out_watches(config, tokenizer, ends)]
    models, partners = prepare_reward_models(config), prepare_partners(config)
    vocabulary = vocabulary_digest(tokenizer)
    inputs = Inputs(training, held_out, vocabulary, end, ends, chat, locate, models, watches, bars, hints, partners)
    return PreparedRun(partial(_loop, config, inputs), training.identity)


def checked_tokenizer(config: RlvrConfig) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer. Raises DataError if a reference or teacher has another vocabulary."""
    learner = config.actor_train.model_args
    others = teacher_roles(config) | ({"reference": config.reference} if config.reference else {})
    for name, role in others.items():
        check_same_tokens(config, learner, role.model_args, name)
    return load_tokenizer(model_path(config, learner), learner.trust_remote_code)


def end_of_turn(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase, chat: Chat | None) -> EndOfTurn:
    """Return what ends a response to a training prompt, or a turn in an environment."""
    end = ends_of(config.actor_train.data_args, tokenizer)
    return replace(end, token_ids=tuple(sorted({*end.token_ids, *chat.renderer.stop_token_ids}))) if chat else end


def prompts_of(
    config: RlvrConfig,
    tokenizer: PreTrainedTokenizerBase,
    rows: DataConfig | None,
    tasks: Mapping[str, int],
    first: int,
    sight: Sight | None,
) -> Prompts:
    """Return prompts from data files, and tasks generated from the seeds `first`, `first` + 1, ... Raises DataError."""
    sets: list[Prompts] = []
    if rows is not None:
        embedded = _embedding_rows(config, tokenizer)
        most, domains = config.prompt_length, config.domains
        prompts = prepare_prompts(rows, tokenizer, most, domains, embedded=embedded, sight=sight)
        warn_of_rows(prompts.too_long, f"were left out: the prompt is longer than prompt_length {most}")
        for what, counts in prompts.remarks.items():
            warn_of_rows(counts, what)
        warn_of_routes(prompts)
        sets.append(prompts)
    if tasks:
        sets.append(Tasks(tuple(config.domains), tasks, first))
    return sets[0] if len(sets) == 1 else Joined(sets)


def chat_of(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase, sight: Sight | None) -> Chat | None:
    """Return how conversations are rendered, or None without environments. `sight`: how the policy sees pictures.

    Raises:
        BadInput: the model's chat format does not support conversations of several turns, or has a token that a model
            has no embedding for.
    """
    if not config.environments:
        return None
    rows, learner = config.actor_train.data_args, config.actor_train.model_args
    further = (rows.chat_template_kwargs if rows else None) or {}
    template, marks = rows.template if rows else "native", sight.marks if sight else ()
    found = chat_renderer(tokenizer, model_path(config, learner), template, further, marks)
    embedded, largest = _embedding_rows(config, tokenizer), int(found.render([ASKED], ()).max())
    if embedded is not None and largest >= embedded:
        problem = (
            f"its chat template writes the token {largest}, but a model has embeddings only for the tokens 0 to "
            f"{embedded - 1}"
        )
        raise DataError(
            Fault(f"the tokenizer of '{tokenizer.name_or_path}'", problem, EMBEDDING_REMEDY, "out_of_range")
        )
    return Chat(found, episode_sight(sight, found, tokenizer))


def episode_sight(
    sight: Sight | None, renderer: SeeingRenderer, tokenizer: PreTrainedTokenizerBase
) -> EpisodeSight | None:
    """Return how the policy sees the pictures of episodes; None if it sees none."""
    if sight is None:
        return None
    mark: Any = tokenizer.convert_tokens_to_ids(sight.token)
    return EpisodeSight(sight, renderer, mark)


def _embedding_rows(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the rows of the smallest embedding of models that read the policy's tokens; see `embedding_rows`."""
    ours = [role for role in model_roles(config).values() if not isinstance(role, RewardModelRole)]
    return embedding_rows(config, tokenizer, ours)


def held_out_prompts(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase, sight: Sight | None) -> dict[str, Prompts]:
    """Return the prompts of every held-out set by name. Raises DataError if rows cannot be used."""
    sets = config.validation.named_sets() if config.validation else {}
    rows = held_out_rows(config)
    return {
        name: prompts_of(config, tokenizer, rows[name], one.rows, FIRST_HELD_OUT, sight) for name, one in sets.items()
    }


def held_out_rows(config: RlvrConfig) -> dict[str, DataConfig | None]:
    """Return the `data_args` of held-out sets by name, with the training prompts' template unless set."""
    sets = config.validation.named_sets() if config.validation else {}
    return {
        name: one.data_args and one.data_args.rendered_as(config.actor_train.data_args) for name, one in sets.items()
    }


def held_out_ends(config: RlvrConfig, tokenizer: PreTrainedTokenizerBase, sight: Sight | None) -> dict[str, EndOfTurn]:
    """Return what ends a response, by held-out set."""
    return {name: seeing_end(ends_of(rows, tokenizer), sight) for name, rows in held_out_rows(config).items()}


async def _loop(
    config: RlvrConfig, inputs: Inputs, roles: Roles, context: RunContext, interrupt: Interrupt
) -> rlvr.Position:
    sampling = training_sampling(config, inputs.end)
    learners = learners_of(config, context.plan, roles, sampling.temperature, inputs.end)
    actor_infer, models = roles.actor_infer(config), inputs.models_of(roles)
    actor_infer.span = context.trace.span
    rewards = reported(config, roles.rewards(config, models), context.plan, context.tracker, context.trace.span)
    tools = told_tool_failures(config, context.plan, context.tracker)
    playing = episode_parts(config, roles, inputs.chat, inputs.partners_of, tools.observe, context.trace.span)
    sharing = await roles.start()
    meter = meter_of(roles, context, sharing)
    phases = phases_of(config, roles, meter, sharing, actor_infer)
    sampler, sets = samplers(config, phases, actor_infer, rewards, playing, sampling, inputs)
    source, curriculum = source_of(config, inputs.training, inputs.bars)
    shaped = shaping(config, sampling.max_new_tokens)
    async with (
        totalled(rewards.failures, context.tracker),
        listening(config, playing),
        aclosing(reference_of(config, context.plan, learners.reference, shaped)) as asked,
        aclosing(scheduler_of(config, source, sampler, asked.finished, curriculum)) as scheduler,
    ):
        weights = sync_of(config, context.plan, learners.actor_train, actor_infer)
        engines = EngineSync(weights, actor_infer, phases, partial(roles.unsettled, "actor_infer"))
        parts = LoopParts(
            phases=phases,
            meter=rlvr.StepMeter(meter, scheduler, actor_infer, models, playing, len(inputs.training)),
            scheduler=scheduler,
            asked=asked,
            shaping=shaped,
            engines=engines,
            # After a restart the routes are open, and the engines' counters from before it are discarded.
            begin=actor_infer.activity if context.restarts else engines.open_routes,
            validation=validation_of(config, sets, phases, engines, meter, context.tracker),
            watches=inputs.watches,
            origin=Origin(inputs.vocabulary, behaviour(sampling), len(inputs.training), inputs.training.identity),
            hints=inputs.hints,
            replay=replay_of(config, inputs.bars, shaped),
        )
        return await run_loop(config, context, interrupt, learners, parts)


def training_sampling(config: RlvrConfig, end: EndOfTurn) -> Sampling:
    """Return the sampling parameters of training rollouts. `end` is what ends a response."""
    samples, from_engine = config.num_return_sequences_in_group, keeps_engine_log_probs(config)
    return sampling_of(config.actor_infer.generating_args, config.response_length, samples, from_engine, end)


@dataclass(frozen=True)
class Learners:
    """The roles that learn, and those that serve learning."""

    actor_train: ActorTrain
    reference: Reference | ActorTrain
    """What computes the reference's log-probs, if anything needs them."""
    critic: Critic | None
    teachers: Mapping[str, Teacher]
    """Teachers by the names of their roles."""


def learners_of(config: RlvrConfig, plan: Plan, roles: Roles, temperature: float, end: EndOfTurn) -> Learners:
    """Request the roles that learn or serve learning. `end` is what ends a response to a training prompt."""
    steps = config.max_steps - config.critic_warmup
    teachers = teacher_roles(config)
    taught = policy_teaching(config, teachers)
    load = taught.load if taught else load_policy if end.placeholder is None else load_seeing_policy
    actor_train = roles.actor_train("actor_train", config.actor_train, steps, temperature, load, end.token_ids)
    reference = roles.reference(config, temperature) if plan.reference == "role" else actor_train
    critic = roles.critic(config.critic, config.max_steps) if config.critic else None
    taught_by = {name: roles.teacher(name, role, taught.wrap) for name, role in teachers.items()} if taught else {}
    return Learners(actor_train, reference, critic, taught_by)


@dataclass(frozen=True)
class LoopParts:
    """The parts of a loop that depend on where its rollouts come from."""

    phases: DevicePhases
    meter: rlvr.StepMeter
    scheduler: RolloutScheduler
    asked: StepReference
    shaping: Shaping
    engines: Engines
    begin: Callable[[], Awaitable[object]]
    """Makes the engines ready for the first sync, once the trainer's state is restored."""
    validation: Validation
    watches: Sequence[Watch]
    origin: Origin
    hints: StepHints | None = None
    """See `Inputs`. None in a replay."""
    replay: GroupReplay | None = None
    """Replays rare successes. None without `curriculum.replay`."""


async def run_loop(
    config: RlvrConfig, context: RunContext, interrupt: Interrupt, learners: Learners, parts: LoopParts
) -> rlvr.Position:
    """Restore the checkpoint and run the loop. All roles must have started."""
    assignment, phases = CreditAssignment(credit(config)), parts.phases
    onloaded = OnloadedTrainer(phases, "actor_train", learners.actor_train, learners.critic)
    unconsumed = SavedTogether(parts.scheduler, parts.replay) if parts.replay else parts.scheduler
    position = await context.checkpointer.restore(onloaded, parts.scheduler, assignment, unconsumed)
    context.tracker.watch(parts.watches)
    await parts.begin()
    run = rlvr.Rlvr(
        phases=phases,
        meter=parts.meter,
        scheduler=parts.scheduler,
        engines=parts.engines,
        trainer=learners.actor_train,
        needs_log_probs=ratio_source(config) == "trainer",
        reference=parts.asked if has_kl(config) else None,
        reference_role="reference" if context.plan.reference == "role" else "actor_train",
        critic=learners.critic,
        teachers=step_teachers(config, phases, parts.meter.part, learners.teachers),
        self_teacher=self_teacher_of(parts.hints, learners.actor_train, learners.reference, phases, parts.meter.part),
        learning=learning(config, context.plan, learners.actor_train, learners.critic, phases),
        validation=parts.validation,
        checkpointer=context.checkpointer,
        interrupt=interrupt,
        tracker=context.tracker,
        shaping=parts.shaping,
        credit=assignment,
        max_steps=config.max_steps,
        rollouts=rollouts_of(config, context, parts.origin),
        replay=parts.replay,
    )
    return await rlvr.train_rlvr(run, position)


def rollouts_of(config: RlvrConfig, context: RunContext, origin: Origin) -> RolloutFiles | None:
    """Return the files that keep the rollouts, if the configuration asks for them.

    Those of an earlier start are continued, or moved away by a new run, whether or not this one keeps its own.
    """
    folder, resumed = Path(config.output_dir), context.checkpointer.resumed_step
    continue_after(folder, (resumed or 0) if context.restarts else resumed)
    return RolloutFiles(folder, origin, reference_text) if config.keep_rollouts else None


def validation_of(
    config: RlvrConfig,
    sets: Sequence[Evaluator],
    phases: DevicePhases,
    engines: Engines,
    meter: Meter,
    tracker: Tracking,
) -> Validation:
    """Return the validation of the held-out sets, which is due as the configuration says."""
    return Validation(config.eval_steps, config.max_steps, sets, phases, engines, meter.part, tracker)


def phases_of(
    config: RlvrConfig, roles: Roles, meter: Meter, sharing: DeviceSharing, actor_infer: ActorInfer
) -> DevicePhases:
    """Return a step's timed device phases. The configuration says for which roles generation pauses."""
    pausing_for = frozenset() if config.time_sharing else interrupting(config)
    return DevicePhases(sharing, meter.part, partial(roles.unsettled, "actor_infer"), actor_infer, pausing_for)


def sync_of(config: RlvrConfig, plan: Plan, actor_train: ActorTrain, actor_infer: ActorInfer) -> WeightSync:
    """Return the configured weight sync, with the routes that the plan allows."""
    roles = (plan.roles["actor_train"], plan.roles["actor_infer"])
    is_near = partial(actor_infer.is_on, actor_train.host)
    paths = partial(find_routes, *roles, config.num_gpus_per_node, is_near)
    bucket_bytes, seconds = config.weight_sync.bucket_mib << 20, config.deadlines.weight_sync
    return WeightSync(actor_train, actor_infer.engines, paths, sends_adapter(config), bucket_bytes, seconds)


def reference_of(config: RlvrConfig, plan: Plan, reference: Reference | ActorTrain, shaped: Shaping) -> StepReference:
    """Return the computation of a step's reference log-probs.

    It runs group by group if the reference shares no devices and every finished group is used, and otherwise in one
    call per step.
    """
    alone = plan.reference == "role" and "reference" not in neighbours(plan.roles)
    is_ahead = has_kl(config) and alone and most_batches(config) is None and not replays(config)
    ask = reference.ref_log_probs
    return ReferenceAhead(ask, shaped) if is_ahead else ReferenceAtOnce(ask)


def in_turn(
    config: RlvrConfig, phases: DevicePhases, actor_infer: ActorInfer, rewards: Scorer
) -> tuple[Generator, Scorer]:
    """Return the generator and the scorer. They take turns if reward models share devices with the engines."""
    judging = {role.removeprefix(PREFIX): partial(phases.judging, role) for role in judged_in_turn(config)}
    if not judging:
        return actor_infer, rewards
    both = JudgedInTurn(actor_infer, rewards, judging, phases.generation)
    return both, both


def samplers(
    config: RlvrConfig,
    phases: DevicePhases,
    actor_infer: ActorInfer,
    rewards: Scorer,
    playing: EpisodeParts | None,
    sampling: Sampling,
    inputs: Inputs,
) -> tuple[GroupSampler, list[Evaluator]]:
    """Return the sampler of training prompts, and each held-out set's evaluator with its sampling parameters."""
    generator, scorer = in_turn(config, phases, actor_infer, rewards)
    greedy = config.adv_estimator.traits.needs_greedy
    sampler = group_sampler(config, generator, scorer, sampling, actor_infer, playing, TRAINING, inputs.locate, greedy)
    return sampler, evaluators(
        config, generator, scorer, actor_infer, playing, inputs.held_out, inputs.held_out_ends, bars=inputs.bars
    )


def evaluators(
    config: RlvrConfig,
    generator: Generator,
    scorer: Scorer,
    actor_infer: ActorInfer,
    playing: EpisodeParts | None,
    held_out: Mapping[str, Prompts],
    ends: Mapping[str, EndOfTurn],
    most: int | None = None,
    bars: Mapping[str, Bars] = NO_BARS,
) -> list[Evaluator]:
    """Return each held-out set's evaluator with its sampling parameters, for its first `most` prompts or all."""
    found = []
    for name, one in (config.validation.named_sets() if config.validation else {}).items():
        own = sampling_of(one.generating_args, config.response_length, samples=1, log_probs=False, end=ends[name])
        by_itself = group_sampler(config, generator, ByItself(scorer), own, actor_infer, playing, HELD_OUT)
        count = len(held_out[name]) if most is None else min(most, len(held_out[name]))
        prompts = [held_out[name].prompt(index, index) for index in range(count)]
        found.append(Evaluator(name, prompts, by_itself, own.samples, config.seed, bars))
    return found


def group_sampler(
    config: RlvrConfig,
    generator: Generator,
    scorer: Scorer,
    sampling: Sampling,
    engines: SessionGenerator,
    playing: EpisodeParts | None,
    stream: int,
    locate: Locate | None = None,
    greedy_baseline: bool = False,
) -> GroupSampler:
    """Return the sampler for all domains: episodes for domains with an environment, single turns for the others.

    Args:
        engines: engines that generate the turns of episodes.
        playing: None without environments.
        stream: seed stream for environments whose rows do not specify a seed.
    """
    single = SingleTurns(generator, scorer, sampling, greedy_baseline, locate)
    if playing is None:
        return single
    groups = episode_samplers(config, scorer, sampling, engines, playing, stream)
    return SampledByDomain(groups, single)


def scheduler_of(
    config: RlvrConfig,
    source: PromptSource,
    sampler: GroupSampler,
    finished: Callable[[RolloutGroup], None],
    observer: GroupObserver | None = None,
) -> RolloutScheduler:
    """Return the configured rollout scheduler."""
    return RolloutScheduler(
        source,
        sampler,
        config.rollout_batch_size,
        config.async_generation_ratio,
        config.seed if config.actor_infer.generating_args.seeded else None,
        window=config.rollout_window,
        most_batches=most_batches(config),
        keep=kept_groups(config),
        finished=finished,
        observer=observer,
    )


def most_batches(config: RlvrConfig) -> int | None:
    """Return the largest number of batches that may be generated for a step; None if no filter replaces groups."""
    bound = config.dynamic_sampling
    if bound is None and any(_replaces(reward.query_filter_config) for reward in config.rewards.values()):
        bound = DynamicSamplingConfig.model_validate({})
    return bound and bound.max_num_gen_batches


def kept_groups(config: RlvrConfig) -> Keep:
    """Return the group filter: that of the group's domain, or else of dynamic sampling if that is on."""
    filters = {
        domain: _filter(reward.query_filter_config)
        for domain, reward in config.rewards.items()
        if reward.query_filter_config
    }
    return ByDomain(filters, rewards_differ if config.dynamic_sampling else everything)


def _replaces(query_filter: QueryFilterConfig | None) -> bool:
    return query_filter is not None and query_filter.type != "no_filter"


def _filter(query_filter: QueryFilterConfig) -> Keep:
    bounds = query_filter.filter_args
    match query_filter.type:
        case "no_filter":
            return everything
        case "mean_filter":
            low, high = bounds.threshold_down, bounds.threshold_up
            return MeanBetween(-inf if low is None else low, inf if high is None else high)
        case "std_filter":
            assert bounds.std_threshold is not None, "the configuration was checked"
            return StdAbove(bounds.std_threshold)


def credit(config: RlvrConfig) -> Credit:
    """Return the settings of credit assignment."""
    normalisation = Normalisation(
        mean=config.norm_mean_type,
        std=config.norm_std_type,
        gamma=config.gamma,
        lambd=config.lambd,
        whiten=config.whiten_advantages,
        reward_clip=config.reward_clip,
        clips_normalised=config.reward_clip_on == "normalised",
        advantage_clip=config.advantage_clip,
    )
    return Credit(
        estimator=config.adv_estimator.name,
        estimator_args=config.adv_estimator_args or config.adv_estimator.arguments(config),
        normalisation=normalisation,
        kl_coef=config.init_kl_coef if config.add_token_level_kl else 0.0,
        kl_estimator=config.kl_penalty,
        target_kl=config.target_kl,
        kl_horizon=config.kl_horizon,
        weigh_difficulty=config.difficulty_loss_weight,
        weigh_length=config.length_loss_weight,
        teacher_weight=config.self_distillation.weight if config.self_distillation else 0.0,
    )


def shaping(config: RlvrConfig, longest_response: int) -> Shaping:
    """Return the settings of reward shaping."""
    buffer = config.overlong_buffer
    return Shaping(
        max_len_mask=config.max_len_mask,
        longest_wrong=config.error_max_len_threshold if config.error_max_len_clip else None,
        difficulty=(config.difficulty_low_threshold, config.difficulty_high_threshold)
        if config.difficulty_mask
        else None,
        overlong=Overlong(longest_response, buffer.len, buffer.penalty_factor) if buffer else None,
    )


def learning(
    config: RlvrConfig, plan: Plan, actor_train: ActorTrain, critic: Critic | None, phases: DevicePhases
) -> Learning:
    """Return the runner of a step's updates."""
    beside = None
    if critic:
        beside = CriticLearning(critic, ValueLoss(config.value_clip), config.critic_warmup, at_once=are_apart(plan))
    return Learning(phases, actor_train, learner_loss(config), plan.batch.updates, beside)


def learner_loss(config: RlvrConfig) -> Loss:
    """Return the policy loss, plus the divergence from the teachers if there are any."""
    loss = policy_loss(config)
    return DistilledPolicy(loss, config.distill_loss_coef) if teacher_roles(config) else loss


def policy_loss(config: RlvrConfig) -> PolicyLoss:
    """Return the policy loss with all configured terms."""
    return PolicyLoss(
        objective=objective(config),
        correction=correction(config),
        on_policy=ratio_source(config) == "on_policy",
        kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        kl_estimator=config.kl_loss_type,
        kl_importance=config.use_kl_loss and weighs_kl(config),
        entropy_coef=config.entropy_loss_coef,
        mask_threshold=config.off_policy_mask_threshold,
    )


def objective(config: RlvrConfig) -> Objective:
    """Return the policy term that `policy_loss` names."""
    method = config.policy_loss
    return OBJECTIVES.find(method.name)(**method.arguments(config), **config.policy_loss_args)


def correction(config: RlvrConfig) -> MismatchCorrection | None:
    """Return the correction that `mismatch_correction` names, with its bounds, or None without a correction."""
    if config.mismatch_correction.is_users:
        return imported(config.mismatch_correction.name)(**config.mismatch_correction_args)
    settings = correction_of(config)
    if settings is None:
        return None
    low, high = settings.low or 0.0, float("inf") if settings.high is None else settings.high
    return Correction(settings.weight, settings.cap, settings.reject, low, high)
