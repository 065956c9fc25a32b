"""Rewards from models (judges and reward models): their keys, their placement, and ROLL's keys for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roll.config.checks.backends import backend_faults
from roll.config.checks.domains import model_reward_faults
from roll.config.checks.experiment import experiment_faults
from roll.config.derived.fixed_roles import judge_context, reward_roles
from roll.config.derived.placement import judged_in_turn, model_roles
from roll.config.plan.phases import phases
from roll.config.plan.plan import Plan, make_plan
from roll.config.plan.show import arithmetic_lines, device_lines
from roll.config.roll_v2.translate import translate
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import JudgeConfig, ScorerConfig
from roll.errors import ConfigError, Fault, FaultCode
from tests.faults import coded
from tests.unit.config.small_shape import write_shape

ZERO = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}}
SERVED = {"strategy_args": {"strategy_name": "vllm"}, "model_args": {"model_name_or_path": "some/judge"}}
INFERENCE = {"judge_model_type": "inference", **SERVED}
API = {"judge_model_type": "api", "judge_api_url": "http://localhost:8000/v1", "judge_model_name": "judge"}


def experiment(reward: dict[str, Any], domain: str = "llm_judge", **keys: Any) -> RlvrConfig:
    """Return a configuration with this reward and a reward function, and the policy on devices 0 to 3."""
    values: dict[str, Any] = {
        "exp_name": "e",
        "output_dir": "o",
        "pretrain": "nobody/none",
        "max_steps": 1,
        "dry_run": True,
        "num_return_sequences_in_group": 8,
        "actor_train": {
            "strategy_args": ZERO,
            "device_mapping": range(4),
            "data_args": {"file_name": "x", "prompt": "p"},
        },
        "actor_infer": {"strategy_args": {"strategy_name": "vllm"}, "device_mapping": range(4)},
        "rewards": {"math_rule": {"world_size": 2}, domain: reward},
    }
    values = json.loads(json.dumps(values | keys, default=list))
    return RlvrConfig.model_validate_json(json.dumps(values), strict=True)


def plan_of(reward: dict[str, Any], domain: str = "llm_judge", **keys: Any) -> Plan:
    return make_plan(experiment(reward, domain, **keys))


def faults_of(reward: dict[str, Any], domain: str = "llm_judge", **keys: Any) -> dict[str, Fault]:
    """Return the faults of this reward, by place."""
    config = experiment(reward, domain, **keys)
    return {fault.place: fault for fault in (*experiment_faults(config), *backend_faults(config, {}))}


def test_a_served_judge_is_a_role_with_devices() -> None:
    config = experiment({**INFERENCE, "device_mapping": [4, 5, 6, 7]} | tensor_parallel(2))
    (role,) = reward_roles(config).values()
    assert isinstance(role, JudgeConfig)
    plan = make_plan(config)
    assert plan.roles["rewards.llm_judge"].devices == ((4, 5), (6, 7))
    assert plan.roles["rewards.llm_judge"].strategy == "vllm"
    assert plan.roles["rewards.math_rule"].strategy == "reward" and plan.roles["rewards.math_rule"].ranks == 2
    assert not plan.turns.get("rewards.llm_judge") and plan.devices == tuple(range(8))


def tensor_parallel(size: int) -> dict[str, Any]:
    return {"strategy_args": {"strategy_name": "vllm", "strategy_config": {"tensor_parallel_size": size}}}


def test_cpu_judge_has_configured_number_of_workers() -> None:
    assert plan_of({**INFERENCE, "world_size": 3}).roles["rewards.llm_judge"].devices == ((), (), ())


def test_a_judge_behind_a_url_is_one_process() -> None:
    config = experiment(API)
    assert "rewards.llm_judge" not in model_roles(config)
    role = make_plan(config).roles["rewards.llm_judge"]
    assert (role.strategy, role.ranks, role.on_cpu) == ("reward", 1, True)


def test_a_reward_model_is_a_role() -> None:
    config = experiment(
        {**SERVED, "strategy_args": {"strategy_name": "hf_infer"}, "infer_batch_size": 4}, "reward_model"
    )
    (role,) = reward_roles(config).values()
    assert isinstance(role, ScorerConfig)
    assert make_plan(config).roles["rewards.reward_model"].tokens_per_microbatch == 4 * 2048


def test_devices_are_checked_as_a_roles_are() -> None:
    with pytest.raises(ConfigError) as error:
        plan_of({**INFERENCE, "device_mapping": [4, 5, 6]} | tensor_parallel(2))
    assert [fault.place for fault in error.value.faults] == ["rewards.llm_judge.device_mapping"]


@pytest.mark.parametrize(
    ("reward", "place", "code"),
    [
        ({}, "judge_model_type", "missing"),
        ({"judge_model_type": "inference", "model_args": {"model_name_or_path": "m"}}, "strategy_args", "missing"),
        (
            {"judge_model_type": "inference", "strategy_args": {"strategy_name": "vllm"}},
            "model_args.model_name_or_path",
            "missing",
        ),
        ({**INFERENCE, "judge_api_url": "http://h/v1"}, "judge_api_url", "unread"),
        ({**INFERENCE, "reward_args": {"a": 1}}, "reward_args", "unread"),
        ({**INFERENCE, "timeout": 3.0}, "timeout", "unread"),
        ({**INFERENCE, "judge_pattern": "("}, "judge_pattern", "malformed"),
        ({**INFERENCE, "judge_prompt": "same_answr"}, "judge_prompt", "unknown_name"),
        (
            INFERENCE | {"strategy_args": {"strategy_name": "vllm", "strategy_config": {"load_format": "dummy"}}},
            "strategy_args.strategy_config.load_format",
            "not_supported",
        ),
        (
            {**INFERENCE, "model_args": {"model_name_or_path": "m", "lora_target": "all-linear"}},
            "model_args.lora_target",
            "not_supported",
        ),
        ({**API, "strategy_args": {"strategy_name": "vllm"}}, "strategy_args", "unread"),
        ({**API, "world_size": 2}, "world_size", "unread"),
        ({key: value for key, value in API.items() if key != "judge_api_url"}, "judge_api_url", "missing"),
        ({key: value for key, value in API.items() if key != "judge_model_name"}, "judge_model_name", "missing"),
        ({**API, "judge_api_url": "localhost:8000"}, "judge_api_url", "malformed"),
        ({**API, "judge_api_url": "http://me:hush@host/v1"}, "judge_api_url", "not_allowed"),
        ({**API, "judge_api_key_env": "sk-hush"}, "judge_api_key_env", "malformed"),
    ],
)
def test_missing_or_unread_judge_key_is_one_fault(reward: dict[str, Any], place: str, code: FaultCode) -> None:
    faults = faults_of(reward)
    assert faults[f"rewards.llm_judge.{place}"].code == code
    assert "hush" not in str(list(faults.values()))
    if reward:
        assert len(faults) == 1


def test_a_function_reads_no_key_of_a_model() -> None:
    (fault,) = faults_of({"judge_prompt": "score"}, "exact_match").values()
    assert coded([fault]) == [("unread", "rewards.exact_match.judge_prompt")] and "'exact_match'" in fault.problem


def test_reward_model_refuses_keys_of_a_judge() -> None:
    assert set(faults_of({**SERVED, "judge_prompt": "score"}, "reward_model")) == {"rewards.reward_model.judge_prompt"}


def test_own_judge_prompt_must_contain_the_response(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    reward = {**INFERENCE, "judge_prompt": str(file)}
    assert [text for text in plan_of(reward).warnings if f"no file '{file}'" in text]
    file.write_text("{question}?")
    with pytest.raises(ConfigError) as error:
        plan_of(reward)
    assert coded(error.value.faults) == [("malformed", "rewards.llm_judge.judge_prompt")]
    file.write_text("{response}?")
    assert not [text for text in plan_of(reward).warnings if "judge_prompt" in text]


def test_a_model_is_no_part_of_a_sum() -> None:
    (fault,) = faults_of({"parts": {"math_rule": {}, "other": {"reward": "llm_judge"}}}, "sums").values()
    assert fault.place == "rewards.sums.parts.other"


def test_the_variable_of_the_key_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_JUDGE", raising=False)
    warned = [text for text in plan_of({**API, "judge_api_key_env": "MY_JUDGE"}).warnings if "MY_JUDGE" in text]
    assert len(warned) == 1 and warned[0].startswith("rewards.llm_judge.judge_api_key_env: ")
    monkeypatch.setenv("MY_JUDGE", "hush")
    plan = plan_of({**API, "judge_api_key_env": "MY_JUDGE"})
    assert not [text for text in plan.warnings if "MY_JUDGE" in text] and "hush" not in repr(plan)


def test_shared_devices_make_it_judge_after_the_rollout() -> None:
    config = experiment({**INFERENCE, "device_mapping": [2, 3]})
    assert judged_in_turn(config) == {"rewards.llm_judge"}
    plan = make_plan(config)
    assert plan.turns["rewards.llm_judge"] == {"actor_train", "actor_infer"}
    assert "rewards.llm_judge" in plan.turns["actor_infer"]
    assert any(line.startswith("Judging: rewards.llm_judge, once all ") for line in arithmetic_lines(config, plan))
    alone = experiment({**INFERENCE, "device_mapping": [4, 5]})
    assert any(line.startswith("Judging: rewards.llm_judge, as ") for line in arithmetic_lines(alone, make_plan(alone)))
    assert not judged_in_turn(experiment({**INFERENCE, "device_mapping": [2, 3]}, time_sharing=False))
    assert not judged_in_turn(experiment({**INFERENCE, "device_mapping": [4, 5]}))
    assert not judged_in_turn(experiment(INFERENCE))


@pytest.mark.parametrize("keys", [{"async_generation_ratio": 1.0}, {"dynamic_sampling": {}}])
def test_taking_turns_needs_a_rollout_that_ends(keys: dict[str, Any]) -> None:
    faults = faults_of({**INFERENCE, "device_mapping": [2, 3]}, **keys)
    assert coded(faults.values()) == [("contradiction", "rewards.llm_judge.device_mapping")]
    assert next(iter(keys)) in faults["rewards.llm_judge.device_mapping"].problem
    assert not faults_of({**INFERENCE, "device_mapping": [4]}, **keys)
    assert not faults_of({**INFERENCE, "device_mapping": [2, 3]}, time_sharing=False, **keys)


def test_its_memory_is_planned(tmp_path: Path) -> None:
    write_shape(tmp_path, max_position_embeddings=100)
    model = {"model_args": {"model_name_or_path": str(tmp_path)}}
    plan = plan_of(
        {**INFERENCE, **model, "device_mapping": [2]}, pretrain=str(tmp_path), prompt_length=60, response_length=40
    )
    assert [phase.name for phase in phases(plan, 2)] == ["generation", "judging", "training", "weight sync"]
    assert "judging" in "".join(device_lines(plan))
    plan_of({**INFERENCE, **model})  # the judge's 100 positions do not limit the policy's 2048 tokens
    scorer = plan_of({**SERVED, **model, "strategy_args": {"strategy_name": "hf_infer"}}, "reward_model")
    assert "head" not in scorer.memory["rewards.reward_model"].device


def test_judge_context_has_room_for_message_and_verdict() -> None:
    config = experiment({**INFERENCE, "generating_args": {"max_new_tokens": 10}})
    assert judge_context(config, config.rewards["llm_judge"], None) == 1024 + 1024 + 1024 + 10
    assert judge_context(config, config.rewards["llm_judge"], 64) == 64


ROLL_JUDGE = {
    "worker_cls": "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
    "judge_prompt": "Qwen2.5-7B-Instruct-RLVR-prompt",
    "judge_model_type": "inference",
    "tag_included": ["RLVR"],
    "model_args": {
        "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
        "attn_implementation": "fa2",
        "disable_gradient_checkpointing": True,
        "dtype": "bf16",
        "model_type": "trl",
    },
    "generating_args": {
        "max_new_tokens": 100,
        "top_p": 0.8,
        "top_k": 50,
        "num_beams": 1,
        "temperature": 0.8,
        "num_return_sequences": 1,
    },
    "data_args": {"template": "qwen2_5"},
    "strategy_args": {
        "strategy_name": "vllm",
        "strategy_config": {
            "gpu_memory_utilization": 0.8,
            "block_size": 16,
            "max_model_len": 8000,
            "load_format": "auto",
        },
    },
    "device_mapping": "list(range(12,16))",
    "infer_batch_size": 4,
}


def test_roll_judge_block_becomes_a_role() -> None:
    done = translate({"rewards": {"llm_judge": ROLL_JUDGE}}, "")
    assert not done.faults
    config = experiment(done.values["rewards"]["llm_judge"])
    reward = config.rewards["llm_judge"]
    assert (
        reward.device_mapping == (12, 13, 14, 15)
        and reward.template == "qwen2_5"
        and reward.judge_prompt == "same_answer"
    )
    assert reward.generating_args is not None and reward.generating_args.max_new_tokens == 100
    assert not list(model_reward_faults(config))
    assert make_plan(config).roles["rewards.llm_judge"].ranks == 4
    assert {text.split(":")[0] for text in done.warnings} == {
        "rewards.llm_judge.worker_cls",
        "rewards.llm_judge.judge_prompt",
        "rewards.llm_judge.data_args.template",
        "rewards.llm_judge.generating_args.num_beams",
        "rewards.llm_judge.model_args.disable_gradient_checkpointing",
        "rewards.llm_judge.model_args.model_type",
    }


def test_judge_api_key_in_file_is_refused_unshown() -> None:
    done = translate({"rewards": {"llm_judge": {**API, "judge_api_key": "hush"}}}, "")
    (fault,) = done.faults
    assert coded([fault]) == [("not_allowed", "rewards.llm_judge.judge_api_key")]
    assert "judge_api_key_env" in fault.remedy
    assert "hush" not in str([fault, *done.warnings, done.values])


def test_a_resolved_configuration_says_the_same() -> None:
    for reward in (API, {**INFERENCE, "device_mapping": [4, 5], "generating_args": {"max_new_tokens": 9}}):
        config = experiment(reward)
        plain = config.model_dump(mode="json")
        done = translate(plain, "")
        assert not done.warnings and not done.faults
        again = RlvrConfig.model_validate_json(json.dumps(done.values), strict=True)
        assert again == config and not list(model_reward_faults(again))
