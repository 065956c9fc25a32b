"""Translates ROLL's on-policy distillation, in which the teacher's log-probs are the only reward.

student_train ──▶ actor_train
student_infer ──▶ actor_infer
teacher       ──▶ reference, whose KL is the reward of each token
"""

from __future__ import annotations

from typing import Any

from roll.config.schema.faults import printable

PURE = "is_pure_opd"
"""ROLL's key for rewards that come from the teacher alone. The start script sets it."""
ROLES = {"student_train": "actor_train", "student_infer": "actor_infer", "teacher": "reference"}
"""ROLL's roles, and roll's."""
OBJECTIVE = {
    "adv_estimator": "reinforce",
    "gamma": 0,
    "add_token_level_kl": True,
    "init_kl_coef": 1,
    "kl_penalty": "k1",
}
"""Keys with which the advantage of a token is its log-prob under the teacher minus that under the policy."""
PARTS, WEIGHT = "parts", "weight"


def translate_on_policy(values: dict[str, Any]) -> list[str]:
    """Translate ROLL's roles of pure on-policy distillation in place. Return warnings; none for any other file."""
    students = [name for name in ROLES if name != "teacher" and isinstance(values.get(name), dict)]
    is_pure = values.get(PURE, "reference" not in values)
    is_agentic = "train_env_manager" in values  # its rewards cannot have the weight 0
    if is_pure is not True or is_agentic or len(students) < 2 or not isinstance(values.get("teacher"), dict):
        return []
    warnings = []
    for old, new in ROLES.items():
        if new not in values:
            values[new] = values.pop(old)
            warnings.append(f"{old}: read as {new}; use that instead")
    values.pop(PURE, None)
    changed = {key: value for key, value in OBJECTIVE.items() if values.get(key) not in (value, "kl")}
    given = [f"{key} {printable(values[key])} by {value}" for key, value in changed.items() if key in values]
    values |= OBJECTIVE
    listed = ", ".join(f"{key}={value}" for key, value in OBJECTIVE.items())
    replaced = f", which replaces {', '.join(given)}" if given else ""
    said = f"on-policy distillation is read as {listed}{replaced}"
    warnings.append(f"teacher: {said}; the advantage of a token is the difference of the log-probs, as in ROLL")
    return warnings


def without_rewards(rewards: Any) -> list[str]:
    """Give the rewards of on-policy distillation the weight 0 in place: in ROLL they are only metrics."""
    warnings = []
    for domain, block in rewards.items() if isinstance(rewards, dict) else ():
        if not isinstance(block, dict):
            continue
        if PARTS not in block:
            moved = {key: block.pop(key) for key in ("reward", "reward_args") if key in block}
            block[PARTS] = {moved.get("reward", domain): moved}
        for name, part in block[PARTS].items():
            block[PARTS][name] = {**part, WEIGHT: 0}
        said = "its reward has the weight 0, because on-policy distillation takes it for metrics only"
        warnings.append(f"rewards.{domain}: {said}")
    return warnings
