"""ROLL's keys that are read as other keys, ignored with a warning, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from roll.config.roll_v2.translate import translate
from roll.config.schema.fields import ANY_NAME, walk
from roll.config.schema.foreign_names import IGNORED, MEANINGS, READ_AS, REFUSED, ROLE, ROLES, VALUES
from roll.config.schema.pipelines import PIPELINES
from roll.errors import FaultCode
from tests.faults import coded


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({"actor_train": {"backend_timeout": 30}}, 1800),
        ({"actor_train": {"backend_timeout": 30}, "reference": {"backend_timeout": 45.5}}, 2730.0),
        ({"actor_train": {"backend_timeout": 30}, "deadlines": {"collective": 60}}, 60),
    ],
)
def test_backend_timeout_minutes_become_deadline_seconds(values: dict[str, Any], seconds: float) -> None:
    done = translate(values, "")
    assert done.values["deadlines"] == {"collective": seconds}
    roles = [role for role in values if role != "deadlines"]
    assert not done.faults and all(done.values[role] == {} for role in roles)
    assert [warning.split(":")[0] for warning in done.warnings] == [f"{role}.backend_timeout" for role in roles]
    assert all(f" deadlines.collective={seconds} (in seconds" in warning for warning in done.warnings)


@pytest.mark.parametrize("value", ["long", -3, True])
def test_backend_timeout_that_is_no_number_is_fault(value: object) -> None:
    done = translate({"actor_train": {"backend_timeout": value}}, "")
    assert [fault.place for fault in done.faults] == ["actor_train.backend_timeout"]
    assert not done.warnings and "deadlines" not in done.values


KNOWN = {".".join(key.path).replace(ANY_NAME, "*") for root in PIPELINES.values() for key in walk(root)}


def of_every_role(place: str) -> list[str]:
    return [place.replace(ROLE, role) for role in ROLES]


@pytest.mark.parametrize("place", [*IGNORED, *REFUSED, *READ_AS])
def test_a_key_of_roll_is_none_of_ours(place: str) -> None:
    assert not KNOWN & set(of_every_role(place))


@pytest.mark.parametrize("place", [*READ_AS.values(), *VALUES])
def test_replacements_in_messages_are_known_keys(place: str) -> None:
    assert KNOWN & set(of_every_role(place))


def test_meanings_are_of_keys_that_are_read() -> None:
    assert MEANINGS.keys() <= READ_AS.keys()


@pytest.mark.parametrize(
    ("values", "key", "meaning"),
    [
        ({"actor_train": {"pg_variant": "topr"}}, "policy_loss", "topr"),
        ({"actor_train": {"pg_variant": "vanilla"}}, "policy_loss", "pg"),
        ({"actor_train": {"pg_variant": "ppo"}, "importance_sampling": "token"}, "policy_loss", None),
        ({"importance_sampling": "seq"}, "policy_loss", "gspo"),
        ({"ipo": True, "pipeline": "dpo"}, "preference_loss", "ipo"),
        ({"ipo": False, "pipeline": "dpo"}, "preference_loss", None),
        ({"student_pretrain": "small"}, "pretrain", "small"),
        ({"chosen_key": "good"}, "actor_train", {"data_args": {"chosen": "good", "prompt": "instruction"}}),
        ({"divergence": "js_divergence"}, "divergence", "jsd"),
        ({"norm_mean_type": "None"}, "norm_mean_type", None),
        ({"kd_objective": "js_divergence"}, "divergence", "jsd"),
    ],
)
def test_what_decides_the_loss_keeps_its_meaning(values: dict[str, Any], key: str, meaning: object) -> None:
    done = translate(values, "")
    assert not done.faults
    assert done.values.get(key) == meaning
    assert len(done.warnings) >= 1


@pytest.mark.parametrize(
    ("values", "place", "code", "remedy"),
    [
        ({"actor_train": {"pg_variant": "kimi15"}}, "actor_train.pg_variant", "not_supported", "set policy_loss"),
        (
            {"actor_train": {"pg_variant": "topr"}, "policy_loss": "gspo"},
            "actor_train.pg_variant",
            "contradiction",
            "remove it; policy_loss",
        ),
        (
            {"train_infer_correction": {"is_weight": {"enabled": True}}},
            "train_infer_correction",
            "not_supported",
            "mismatch_correction",
        ),
        ({"whiten_rewards": True}, "whiten_rewards", "not_supported", "norm_mean_type"),
        ({"rl_loss_coef": 0.0}, "rl_loss_coef", "not_supported", "the weight 1"),
        (
            {"actor_train": {"model_args": {"additional_target": "lm_head"}}},
            "actor_train.model_args.additional_target",
            "not_supported",
            "lora_target",
        ),
    ],
)
def test_loss_key_without_counterpart_is_a_fault(
    values: dict[str, Any], place: str, code: FaultCode, remedy: str
) -> None:
    done = translate(values, "")
    (fault,) = done.faults
    assert coded([fault]) == [(code, place)] and remedy in fault.remedy


@pytest.mark.parametrize(
    "values", [{"rl_loss_coef": 1.0}, {"whiten_rewards": False}, {"reward_model": None}, {"distill_on_prompt": False}]
)
def test_what_says_nothing_new_is_no_fault(values: dict[str, Any]) -> None:
    done = translate(values, "")
    assert not done.faults and not done.values and len(done.warnings) == 1


def test_validation_data_inherits_training_columns() -> None:
    learnt = {"template": "raw", "file_name": "a.jsonl", "prompt": "question", "tag": "kind"}
    done = translate({"actor_train": {"data_args": learnt}, "validation": {"data_args": {"file_name": "b.jsonl"}}}, "")
    assert done.values["validation"]["data_args"] == {"file_name": "b.jsonl", "prompt": "question", "template": "raw"}
    (warning,) = done.warnings
    assert warning.startswith("validation.data_args: ") and "prompt: question, template: raw" in warning
    own = {"file_name": "b.jsonl", "messages": "talk"}
    done = translate({"actor_train": {"data_args": learnt}, "validation": {"data_args": own}}, "")
    assert done.values["validation"]["data_args"] == own and not done.warnings
    nested = {"prompt": "question", "ground_truth": "reward_model.ground_truth"}
    taken = translate({"actor_train": {"data_args": nested}, "validation": {"data_args": {"file_name": "b"}}}, "")
    assert taken.values["validation"]["data_args"] == {"file_name": "b", **nested}
    kept = translate({"sft_train": {"data_args": learnt}, "validation": {"data_args": {"template": "chatml"}}}, "")
    assert kept.values["validation"]["data_args"] == {"template": "chatml", "prompt": "question"}


def test_a_secret_stands_in_no_message() -> None:
    values = {
        "track_with": "wandb",
        "tracker_kwargs": {"project": "p", "api_key": "hush"},
        "rewards": {"a": {"judge_api_key": "hush"}},
    }
    done = translate(values, "")
    (fault,) = done.faults
    assert fault.place == "tracker_kwargs.wandb.api_key" and "wandb login" in fault.remedy
    assert any(warning.startswith("rewards.a.judge_api_key: ") for warning in done.warnings)
    assert "hush" not in str([*done.faults, *done.warnings])
    assert done.values["tracker_kwargs"] == {"wandb": {"project": "p"}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"global_template": "chatml"},
            'global_template: "chatml" is ignored; no data_args names a file; remove the key',
        ),
        (
            {"track_with": "none", "tracker_kwargs": {"log_dir": "runs"}},
            "tracker_kwargs: ignored, because track_with is none; remove the key",
        ),
    ],
)
def test_unread_roll_value_is_ignored_with_warning(values: dict[str, Any], said: str) -> None:
    assert said in translate(values, "").warnings


@pytest.mark.parametrize(
    ("block", "is_fault"),
    [({"enable": True, "mode": "dump"}, False), ({"enable": True, "mode": "mock"}, True), ({"mode": "mock"}, False)],
)
def test_only_replayed_rollouts_are_refused(block: dict[str, Any], is_fault: bool) -> None:
    done = translate({"rollout_mock": block}, "")
    assert [fault.place for fault in done.faults] == ["rollout_mock"] * is_fault
    assert [text.split(":")[0] for text in done.warnings] == ["rollout_mock"] * (not is_fault)


def test_query_key_follows_the_prompt() -> None:
    done = translate({"prompt_key": "instruction", "query_key": "input"}, "")
    assert done.values == {"sft_train": {"data_args": {"prompt": "instruction", "input": "input"}}}


def test_gpus_of_a_sglang_worker_are_its_size() -> None:
    strategy = {"strategy_name": "sglang", "strategy_config": {"mem_fraction_static": 0.8}}
    done = translate({"actor_infer": {"num_gpus_per_worker": 2, "strategy_args": strategy}}, "")
    assert done.values["actor_infer"]["strategy_args"]["strategy_config"]["tensor_parallel_size"] == 2
    assert [text.split(":")[0] for text in done.warnings] == ["actor_infer.num_gpus_per_worker"]


@pytest.mark.parametrize(
    ("keys", "columns", "differs"),
    [
        ({"question_key": "q"}, {"prompt": "q"}, True),
        ({"question_key": "q", "prompt_key": "p"}, {"prompt": "p", "input": "q"}, False),
    ],
)
def test_columns_of_students_rows_are_rolls(keys: dict[str, str], columns: dict[str, str], differs: bool) -> None:
    done = translate({"student": {}} | keys, "")
    assert done.values == {"student": {"data_args": columns}}
    assert {text.split(":")[0] for text in done.warnings} == set(keys)
    assert any("line break" in text for text in done.warnings) is differs
