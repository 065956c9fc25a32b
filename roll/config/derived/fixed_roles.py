"""The roles with fixed models that blocks of the configuration describe: the teachers of on-policy distillation, the
models that compute rewards, and the partners of environments. Pure functions of the configuration.
"""

from __future__ import annotations

from collections.abc import Collection

from roll.config.derived.domains import ENVIRONMENTS
from roll.config.schema.model_rewards import JUDGE, MODEL_REWARDS, SCORER, JudgeSamplingConfig
from roll.config.schema.partners import PartnerConfig, PartnerSamplingConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import (
    JudgeConfig,
    PartnerRole,
    ReferenceConfig,
    RewardConfig,
    RewardModelRole,
    ScorerConfig,
)

TEACHERS = "teachers."
"""Prefix of the names of the roles in the block `teachers`."""


def domain_teachers(config: RlvrConfig) -> dict[str, ReferenceConfig]:
    """Return the roles of the block `teachers`, by name: `teachers.<name>`."""
    return {f"{TEACHERS}{name}": teacher for name, teacher in config.teachers.items()}


def teacher_roles(config: RlvrConfig) -> dict[str, ReferenceConfig]:
    """Return the roles of all teachers, by name: `teacher`, or `teachers.<name>`. It is empty without distillation."""
    return {"teacher": config.teacher} if config.teacher else domain_teachers(config)


def taught_domains(config: RlvrConfig) -> dict[str, Collection[str]]:
    """Return the domains of each teacher, by the name of its role. The role `teacher` has all domains."""
    if config.teacher:
        return {"teacher": tuple(config.domains)}
    return {f"{TEACHERS}{name}": teacher.domains for name, teacher in config.teachers.items()}


PREFIX = "rewards."
"""Prefix of the names of roles that serve the model of a domain."""
TEMPLATE_TOKENS = 1024
"""Tokens reserved in a judge's context for the template and the reference answer, in addition to question and response.
"""


def model_reward(domain: str, reward: RewardConfig) -> str | None:
    """Return `llm_judge` or `reward_model`, or None if the reward is a function."""
    name = reward.reward or domain
    return name if name in MODEL_REWARDS and not reward.parts else None


def reward_role(domain: str, reward: RewardConfig) -> RewardModelRole | None:
    """Return the role that serves a domain's model, or None for functions and for judges behind a URL."""
    kind = model_reward(domain, reward)
    if kind is None or reward.strategy_args is None or reward.judge_model_type == "api":
        return None
    keys = {
        key: getattr(reward, key)
        for key in ("device_mapping", "max_tokens_per_microbatch", "infer_batch_size", "system_envs")
    }
    keys |= {"model_args": reward.model_args} if reward.model_args else {}
    # A resolved configuration contains world_size even if the devices determine the number of workers.
    keys |= {"world_size": reward.world_size} if reward.device_mapping is None or reward.world_size > 1 else {}
    return {JUDGE: JudgeConfig, SCORER: ScorerConfig}[kind](strategy_args=reward.strategy_args, **keys)


def reward_roles(config: RlvrConfig) -> dict[str, RewardModelRole]:
    """Return the roles that serve reward models, by name: `rewards.<domain>`."""
    roles = {f"{PREFIX}{domain}": reward_role(domain, reward) for domain, reward in config.rewards.items()}
    return {name: role for name, role in roles.items() if role is not None}


def names_file(judge_prompt: str) -> bool:
    """Whether the value of `judge_prompt` is the path of a file, rather than the name of a template."""
    return "/" in judge_prompt or "." in judge_prompt


def judge_sampling(reward: RewardConfig) -> JudgeSamplingConfig:
    """Return the sampling parameters of a judge."""
    return reward.generating_args or JudgeSamplingConfig.model_validate({})


def judge_context(config: RlvrConfig, reward: RewardConfig, positions: int | None) -> int:
    """Return the context length of a judge in tokens, for prompt and answer: at most `positions`, its model's limit."""
    return _context(config, judge_sampling(reward).max_new_tokens, positions)


def _context(config: RlvrConfig, answer: int, positions: int | None) -> int:
    """Return the context for a text as long as the policy's longest sequence, a template, and an answer, in tokens."""
    longest = config.sequence_length or config.prompt_length + config.response_length
    room = longest + TEMPLATE_TOKENS + answer
    return min(room, positions) if positions else room


PARTNERS = ".partners."
"""What stands between the domain and the name in the name of a partner's role."""


def all_partners(config: RlvrConfig) -> dict[str, tuple[str, str, PartnerConfig]]:
    """Return the domain, the name and the keys of each partner, by its place: `environments.<domain>.partners.<name>`.

    The place is also the name of the role or process that serves it.
    """
    return {
        f"{ENVIRONMENTS}{domain}{PARTNERS}{name}": (domain, name, partner)
        for domain, section in config.environments.items()
        for name, partner in section.partners.items()
    }


def partner_role(partner: PartnerConfig) -> PartnerRole | None:
    """Return the role that serves a partner's model; None for models behind a URL and for the policy itself."""
    if partner.type != "inference" or partner.strategy_args is None:
        return None
    keys = {key: getattr(partner, key) for key in ("device_mapping", "world_size", "system_envs")}
    keys |= {"model_args": partner.model_args} if partner.model_args else {}
    return PartnerRole(strategy_args=partner.strategy_args, **keys)


def partner_roles(config: RlvrConfig) -> dict[str, PartnerRole]:
    """Return the roles that serve partners, by their places."""
    roles = {place: partner_role(partner) for place, (_, _, partner) in all_partners(config).items()}
    return {place: role for place, role in roles.items() if role is not None}


def partner_sampling(partner: PartnerConfig) -> PartnerSamplingConfig:
    """Return the sampling parameters of a partner."""
    return partner.generating_args or PartnerSamplingConfig.model_validate({})


def partner_context(config: RlvrConfig, partner: PartnerConfig, positions: int | None) -> int:
    """Return the context length of a partner in tokens, for messages and turn: at most `positions`, its limit."""
    return _context(config, partner_sampling(partner).max_new_tokens, positions)


def api_key_variables(config: RlvrConfig) -> dict[str, str]:
    """Return the environment variables with the API keys of judges and partners, by the key that names each."""
    judges = {f"{PREFIX}{domain}.judge_api_key_env": one.judge_api_key_env for domain, one in config.rewards.items()}
    partners = {
        f"{place}.api_key_variable": one.api_key_variable for place, (_, _, one) in all_partners(config).items()
    }
    return {place: name for place, name in {**judges, **partners}.items() if name}
