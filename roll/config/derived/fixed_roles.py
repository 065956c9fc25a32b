"""The roles with fixed models that blocks of the configuration describe: the teachers of on-policy distillation, and
the models that compute rewards. Pure functions of the configuration.
"""

from __future__ import annotations

from collections.abc import Collection

from roll.config.schema.model_rewards import JUDGE, MODEL_REWARDS, SCORER, JudgeSamplingConfig
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import JudgeConfig, ReferenceConfig, RewardConfig, RewardModelRole, ScorerConfig

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
    judged = config.sequence_length or config.prompt_length + config.response_length
    room = judged + TEMPLATE_TOKENS + judge_sampling(reward).max_new_tokens
    return min(room, positions) if positions else room
