"""ROLL's on-policy distillation: the teacher becomes the reference, whose KL is the only reward."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.roll_v2.on_policy import translate_on_policy
from roll.config.roll_v2.translate import translate

CLASS = "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"


def file() -> dict[str, Any]:
    """Return the part of a file that matters."""
    return {
        "student_train": {"device_mapping": [0]},
        "student_infer": {"device_mapping": [1]},
        "teacher": {"device_mapping": [2]},
        "adv_estimator": "grpo",
        "kl_penalty": "kl",
        "rewards": {"math_rule": {"worker_cls": CLASS, "tag_included": ["dapo"]}},
    }


def test_students_and_teacher_become_rolls_roles() -> None:
    done = translate(file(), "")
    roles = {name: done.values[name]["device_mapping"] for name in ("actor_train", "actor_infer", "reference")}
    assert roles == {"actor_train": [0], "actor_infer": [1], "reference": [2]} and not done.faults
    objective = ("adv_estimator", "gamma", "add_token_level_kl", "init_kl_coef", "kl_penalty")
    assert [done.values[key] for key in objective] == ["reinforce", 0, True, 1, "k1"]
    assert any(text.startswith("teacher: ") and "by reinforce" in text and "grpo" in text for text in done.warnings)
    assert {text.split(":")[0] for text in done.warnings} >= {"student_train", "student_infer"}


def test_rewards_of_distillation_are_metrics_only() -> None:
    done = translate(file(), "")
    assert done.values["rewards"] == {"math_rule": {"tag_included": ["dapo"], "parts": {"math_rule": {"weight": 0}}}}
    assert any(text.startswith("rewards.math_rule: ") for text in done.warnings)


@pytest.mark.parametrize(
    "changes",
    [{"is_pure_opd": False}, {"reference": {}}, {"train_env_manager": {}}, {"teacher": None}, {"student_infer": None}],
)
def test_other_files_keep_their_roles(changes: dict[str, Any]) -> None:
    values = file() | changes
    before = dict(values)
    assert translate_on_policy(values) == [] and values == before
