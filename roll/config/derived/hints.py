"""What a self-teacher sees, and whose weights it has. Pure functions of the configuration."""

from __future__ import annotations

from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.self_distillation import Hint, SelfDistillationConfig

BLOCK = "self_distillation"
"""The key of the block, and the prefix of its metrics."""


def hint_templates(keys: SelfDistillationConfig) -> dict[Hint, str]:
    """Return the template of every hint, used or not."""
    return {
        "solution": keys.solution_template,
        "feedback": keys.feedback_template,
        "success": keys.success_template,
    }


def has_frozen_teacher(config: RlvrConfig) -> bool:
    """Whether the reference is the self-teacher."""
    return config.self_distillation is not None and config.self_distillation.teacher == "frozen"


def longest_teacher_prompt(config: RlvrConfig) -> int:
    """Return the largest number of tokens of a self-teacher's prompt."""
    own = config.self_distillation
    return (own and own.prompt_length) or config.prompt_length + config.response_length


def average_rate(config: Config) -> float | None:
    """Return the share of the newest weights in those of an averaged self-teacher; None without one."""
    own = config.self_distillation if isinstance(config, RlvrConfig) else None
    return own.update_rate if own is not None and own.teacher == "averaged" else None
