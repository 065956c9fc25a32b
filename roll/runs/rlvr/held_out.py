"""Wires the evaluation of a fixed policy on held-out sets, without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from roll.config.derived.batch import longest_sequence
from roll.config.derived.placement import is_trainer_side, model_roles, turns
from roll.config.plan.plan import Plan
from roll.config.schema.rlvr import RlvrConfig
from roll.data.chat import EndOfTurn
from roll.data.prompts import Prompts
from roll.models.load import load_tokenizer
from roll.models.weight_files import check_readable
from roll.rewards.passing import Bars
from roll.rewards.reward_workers import ModelReward
from roll.rollout.group import GroupSampler
from roll.runs.device_phases import DevicePhases
from roll.runs.model_paths import model_path
from roll.runs.notices import held_out_watches
from roll.runs.rlvr.partners import FixedPartners, prepare_partners
from roll.runs.rlvr.playing import Chat, episode_parts, listening
from roll.runs.rlvr.reward_failures import Reported, RewardFailures
from roll.runs.rlvr.reward_models import prepare_reward_models
from roll.runs.rlvr.reward_trial import check_environments, check_rewards
from roll.runs.rlvr.tool_failures import ToolFailures
from roll.runs.rlvr.validation import Evaluator
from roll.runs.rlvr.wiring import chat_of, evaluators, held_out_ends, held_out_prompts, in_turn
from roll.runs.roles import Roles
from roll.runs.seeing import sight_of
from roll.tracking.base import Watch
from roll.types import Episode, Prompt, RolloutGroup


@dataclass(frozen=True)
class HeldOutInputs:
    """Data and models, checked before anything starts."""

    held_out: Mapping[str, Prompts]
    ends: Mapping[str, EndOfTurn]
    """What ends a response, by held-out set."""
    chat: Chat | None
    """How conversations are rendered; None without environments."""
    models_of: Callable[[Roles], dict[str, ModelReward]]
    """Requests the models that score responses, and returns their rewards by domain."""
    watches: Sequence[Watch]
    """Conditions of a set's metrics that a notice names."""
    bars: Mapping[str, Bars]
    """When a response passes, by domain."""
    partners_of: Callable[[Roles], FixedPartners]
    """Requests the partners of environments."""


class Listener(Protocol):
    """Receives the progress of an evaluation."""

    def begun(self) -> None:
        """All roles are ready, and the first prompts are answered."""
        ...

    def answered(self, responses: int) -> None:
        """A number of responses is complete. They are scored next."""
        ...

    def finished(self, name: str, group: RolloutGroup) -> None:
        """A group of the set `name` has been scored."""
        ...

    def failed(self, topic: str, text: str) -> None:
        """A reward or a tool failed in a way that was not said before; see `RewardFailures` and `ToolFailures`."""
        ...


@dataclass(frozen=True)
class Observed:
    """Implements `GroupSampler`: wraps a sampler, and passes every finished group to a callback."""

    sampler: GroupSampler
    name: str
    finished: Callable[[str, RolloutGroup], None]

    async def sample(self, prompt: Prompt, seed: int | None) -> RolloutGroup:
        group = await self.sampler.sample(prompt, seed)
        self.finished(self.name, group)
        return group

    def yields(self, prompt: Prompt, episodes: Sequence[Episode], baseline: Episode | None) -> bool:
        return self.sampler.yields(prompt, episodes, baseline)


def inference_plan(config: RlvrConfig, plan: Plan) -> Plan:
    """Return the part of the plan for engines, rewards and environments, without the trainer's side."""
    roles = {name: role for name, role in plan.roles.items() if not is_trainer_side(name)}
    memory = {name: one for name, one in plan.memory.items() if name in roles}
    return replace(plan, roles=roles, memory=memory, turns=turns(config, roles), reference="unused")


def prepare_held_out(config: RlvrConfig) -> HeldOutInputs:
    """Check the models' files, prepare the held-out prompts, and try rewards and environments on them.

    Raises:
        BadInput: a model, the data, a reward or an environment cannot be used.
    """
    for name, role in model_roles(config).items():
        if not is_trainer_side(name):
            check_readable(model_path(config, role.model_args), role.model_args.lora_target)
    model_args = config.actor_infer.model_args
    tokenizer = load_tokenizer(model_path(config, model_args), model_args.trust_remote_code)
    sight = sight_of(config, tokenizer, model_args, {})
    held_out = held_out_prompts(config, tokenizer, sight)
    bars = check_rewards(config, *held_out.values())
    chat = chat_of(config, tokenizer, sight)
    check_environments(config, chat, *held_out.values())
    ends = held_out_ends(config, tokenizer, sight)
    watches = held_out_watches(config, tokenizer, ends, "--max-new-tokens")
    models, partners = prepare_reward_models(config), prepare_partners(config)
    return HeldOutInputs(held_out, ends, chat, models, watches, bars, partners)


async def held_out_groups(
    config: RlvrConfig, inputs: HeldOutInputs, roles: Roles, most: int | None, listener: Listener
) -> dict[str, list[RolloutGroup]]:
    """Start the roles, and sample and score responses for every set. Return the groups of each set in the order of its
    prompts.

    Args:
        most: number of prompts to use from the start of each set; None for all.
        listener: is told about every stage, and about failures of rewards, at last their totals.
    """
    actor_infer, _ = roles.fixed_engines("actor_infer", config.actor_infer, longest_sequence(config))
    failures = RewardFailures(config.rewards, listener.failed)
    rewards = Reported(roles.rewards(config, inputs.models_of(roles)), failures, listener.answered)
    playing = episode_parts(config, roles, inputs.chat, inputs.partners_of, ToolFailures(listener.failed).observe)
    sharing = await roles.start()
    phases = DevicePhases(sharing)
    generator, scorer = in_turn(config, phases, actor_infer, rewards)
    await phases.generation()
    sets = evaluators(config, generator, scorer, actor_infer, playing, inputs.held_out, inputs.ends, most, inputs.bars)
    listener.begun()
    async with listening(config, playing):
        groups = {one.name: await _observed(one, listener.finished).answers() for one in sets}
    for topic, text in failures.totals():
        listener.failed(topic, text)
    return groups


def _observed(one: Evaluator, finished: Callable[[str, RolloutGroup], None]) -> Evaluator:
    return replace(one, sampler=Observed(one.sampler, one.name, finished))
