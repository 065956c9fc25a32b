"""A table of files with ROLL's keys: whether they are read, the warnings about them, and the effect of ROLL's
defaults.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig

from roll.config.derived.batch import plan_batch
from roll.config.load.loader import LoadedConfig, checked_config, read_config
from roll.config.plan.plan import make_plan
from roll.config.schema.rlvr import RlvrConfig
from roll.errors import ConfigError
from tests.faults import coded

COMMON = """
exp_name: of_roll
logging_dir: ./output/logs
output_dir: ./output
checkpoint_config: {type: file_system, output_dir: /models}
save_steps: 20
logging_steps: 1
resume_from_checkpoint: false
max_steps: 10
"""
ZERO3 = "{zero_optimization: {stage: 3}}"
TRAIN = f"""
  model_args: {{attn_implementation: sdpa, disable_gradient_checkpointing: true, dtype: bf16, model_type: ~}}
  training_args: {{learning_rate: 1.0e-6, per_device_train_batch_size: 1, gradient_accumulation_steps: 64, num_train_epochs: 50}}
  strategy_args: {{strategy_name: deepspeed_train, strategy_config: {ZERO3}}}
  device_mapping: list(range(0,8))
"""
ROWS = "{template: qwen2_5, file_name: [a.jsonl], messages: messages, dataset_dir: data, interleave_probs: '1.0'}"
POLICY = f"""
rollout_batch_size: 64
prompt_length: 2048
response_length: 4096
num_return_sequences_in_group: 8
eval_steps: 10
pretrain: Qwen/Qwen2.5-7B
reward_pretrain: Qwen/Qwen2.5-7B
validation:
  data_args: {{template: qwen2_5, file_name: [math_benchmarks.jsonl]}}
  generating_args: {{top_p: 0.6, top_k: 50, num_beams: 1, temperature: 0.6}}
actor_train:{TRAIN}
  data_args: {ROWS}
  infer_batch_size: 4
actor_infer:
  model_args: {{disable_gradient_checkpointing: true, dtype: bf16}}
  generating_args: {{max_new_tokens: 4096, top_p: 0.99, top_k: 100, num_beams: 1, temperature: 0.99}}
  data_args: {{template: qwen2_5}}
  strategy_args: {{strategy_name: vllm, strategy_config: {{gpu_memory_utilization: 0.6, block_size: 16, max_model_len: 8000}}}}
  device_mapping: list(range(0,8))
reference:
  model_args: {{disable_gradient_checkpointing: true, dtype: bf16, model_type: ~}}
  strategy_args: {{strategy_name: hf_infer, strategy_config: ~}}
  device_mapping: list(range(0,8))
  infer_batch_size: 8
"""
CLASSES = "roll.pipeline.rlvr.rewards"
MATH = f"""
rewards:
  math_rule:
    worker_cls: {CLASSES}.math_rule_reward_worker.MathRuleRewardWorker
    model_args: {{model_name_or_path: Qwen/Qwen2.5-7B}}
    data_args: {{template: qwen2_5}}
    tag_included: [deepmath_103k, aime]
    world_size: 8
    infer_batch_size: 1
    query_filter_config: {{type: mean_filter, filter_args: {{threshold_up: 0.9, threshold_down: 0.1}}}}
"""
DOMAINS = f"""{MATH}
  crossthinkqa:
    worker_cls: {CLASSES}.crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker
    reward_type: soft
    response_length_penalty_coef: 0.0
    tag_included: [crossthinkqa]
    world_size: 8
  ifeval:
    worker_cls: {CLASSES}.ifeval_rule_reward_worker.GeneralRuleRewardWorker
    reward_type: soft
    tag_included: [ifeval]
  code_sandbox:
    worker_cls: {CLASSES}.code_sandbox_reward_worker.CodeSandboxRewardWorker
    use_local: true
    tag_included: [KodCode]
  llm_judge:
    worker_cls: {CLASSES}.llm_judge_reward_worker.LLMJudgeRewardWorker
    judge_prompt: Qwen2.5-7B-Instruct-RLVR-prompt
    judge_model_type: inference
    tag_included: [RLVR]
    model_args: {{model_name_or_path: judge, attn_implementation: fa2, disable_gradient_checkpointing: true, dtype: bf16, model_type: trl}}
    generating_args: {{max_new_tokens: 100, top_p: 0.8, top_k: 50, num_beams: 1, temperature: 0.8, num_return_sequences: 1}}
    data_args: {{template: qwen2_5}}
    strategy_args: {{strategy_name: hf_infer, strategy_config: ~}}
    device_mapping: list(range(12,16))
    infer_batch_size: 4
"""
RLVR = COMMON + POLICY
REINFORCE = (
    "adv_estimator: reinforce\nnorm_mean_type: ~\nnorm_std_type: ~\nreward_clip: 10\ndual_clip_loss: true\nvalue_clip: "
    "0.5\n"
)
PREFERENCES = f"""{COMMON}
pipeline: dpo
pretrain: Qwen/Qwen2.5-7B
ipo: true
chosen_key: chosen
rejected_key: rejected
actor_train:{TRAIN}
  data_args: {{template: qwen2_5, file_name: a.jsonl}}
reference:
  strategy_args: {{strategy_name: hf_infer, strategy_config: ~}}
  device_mapping: list(range(0,8))
"""
GIVEN = f"""{COMMON}
pipeline: sft
pretrain: Qwen/Qwen2.5-7B
global_template: chatml
prompt_key: question
response_key: answer
sft_train:{TRAIN}
  data_args: {{file_name: a.jsonl}}
"""
DISTILLED = f"""{COMMON}
pipeline: distill
student_pretrain: small
teacher_pretrain: large
kd_objective: forward_kl
logits_topk: 64
distill_on_prompt: false
question_key: question
answer_key: answer
student:{TRAIN}
  data_args: {{template: qwen2_5, file_name: a.jsonl}}
teacher:
  training_args: {{per_device_train_batch_size: 1}}
  strategy_args: {{strategy_name: deepspeed_infer, strategy_config: {ZERO3}}}
  device_mapping: list(range(0,8))
"""


def read(text: str, **changes: Any) -> tuple[LoadedConfig, list[str]]:
    """Return the loaded file and the warnings about it."""
    values = yaml.safe_load(text) | changes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = read_config(DictConfig(copy.deepcopy(values)))
    return loaded, [str(warning.message) for warning in caught]


READ = {
    "five domains": (
        RLVR + REINFORCE + DOMAINS,
        [
            "dual_clip_loss: true is read as 1 + 2 x pg_clip = 1.4",
            "rewards.code_sandbox.use_local: true is ignored",
            "rewards.code_sandbox.reward_args.pays: not set, so it is all, as in ROLL",
            "rewards.code_sandbox.reward_args.tolerance: not set, so it is 1e-05, as in ROLL",
            "rewards.code_sandbox.reward_args.block: not set, so it is first, as in ROLL",
            "rewards.code_sandbox.timeout: not set, so it is 90 s",
        ],
    ),
    "grpo": (
        RLVR + "adv_estimator: grpo\nuse_kl_loss: true\nkl_loss_coef: 0.01\nreward_clip: 5\n" + MATH,
        ["reward_clip: 5 clips"],
    ),
    "gspo": (RLVR + "adv_estimator: grpo\nimportance_sampling: seq\n" + MATH, ["importance_sampling: "]),
    "unused KL": (
        RLVR + REINFORCE + "init_kl_coef: 0.2\nadd_token_level_kl: false\n" + MATH,
        ["init_kl_coef: 0.2 is ignored"],
    ),
    "topr": (
        RLVR.replace("infer_batch_size: 4", "pg_variant: topr") + REINFORCE + "pg_clip: 0.2\n" + MATH,
        ["actor_train.pg_variant: ", "dual_clip_loss: true is ignored", "pg_clip: 0.2 is ignored"],
    ),
    "cispo": (
        RLVR.replace("infer_batch_size: 4", "pg_variant: cispo") + REINFORCE + MATH,
        ["policy_loss: cispo clips at 0.1"],
    ),
    "global template": (
        RLVR.replace("template: qwen2_5, ", "") + "adv_estimator: grpo\nglobal_template: chatml\n" + MATH,
        ["global_template: "],
    ),
    "preferences": (
        PREFERENCES,
        [
            "ipo: true is read as preference_loss=ipo",
            "actor_train.data_args.prompt: missing, so it is instruction",
        ],
    ),
    "given rows": (
        GIVEN,
        ["global_template: ", "sft_train.data_args: ROLL ", "sft_train.training_args.num_train_epochs: "],
    ),
    "distilled": (DISTILLED, ["logits_topk: 64 is read as distill_top_k=64"]),
}


@pytest.mark.parametrize("name", READ)
def test_roll_file_differences_are_reported_once(name: str) -> None:
    text, said = READ[name]
    loaded, found = read(text)
    assert loaded.faults == [] and loaded.config is not None
    for start in said:
        assert len([one for one in found if one.startswith(start)]) == 1, found
    assert len(found) == len(set(found))
    assert not [one for one in found if one.startswith("roll_defaults")], (
        "the file sets every key whose default differs"
    )


def test_roll_file_domains_keep_their_rewards() -> None:
    loaded, _ = read(RLVR + REINFORCE + DOMAINS)
    assert isinstance(loaded.config, RlvrConfig)
    rewards = loaded.config.rewards
    assert {domain: reward.reward or domain for domain, reward in rewards.items()} == {
        domain: domain for domain in ("math_rule", "crossthinkqa", "ifeval", "code_sandbox", "llm_judge")
    }
    assert rewards["crossthinkqa"].reward_args == {"reward_type": "soft", "choice": "first_capital"}
    assert rewards["ifeval"].reward_args == {}
    assert rewards["code_sandbox"].reward_args == {"pays": "all", "tolerance": 1e-5, "block": "first"}
    bounds = rewards["math_rule"].query_filter_config
    assert bounds and (bounds.type, bounds.filter_args.threshold_up, bounds.filter_args.threshold_down) == (
        "mean_filter",
        0.9,
        0.1,
    )
    assert rewards["math_rule"].tag_included == ("deepmath_103k", "aime") and rewards["math_rule"].world_size == 8
    judge = rewards["llm_judge"]
    assert judge.device_mapping == (12, 13, 14, 15) and judge.judge_model_type == "inference"
    assert judge.generating_args and judge.generating_args.max_new_tokens == 100


@pytest.mark.parametrize(
    ("domain", "keys", "arguments", "said"),
    [
        ("code_sandbox", {"use_local": True}, {}, "in a sandbox, unlike in ROLL"),
        (
            "code_sandbox",
            {"use_local": False, "code_url": "http://b"},
            {"sandbox": "http://b"},
            "read as reward_args.sandbox=http://b",
        ),
        ("code_sandbox", {"code_url": "http://b"}, {"sandbox": "http://b"}, "read as reward_args.sandbox=http://b"),
        ("code_sandbox", {"use_local": True, "code_url": "http://b"}, {}, "use_local: true takes precedence"),
        ("math_rule", {"use_local": True}, {}, "the reward runs no programs"),
        ("math_rule", {"reward_type": "soft"}, {}, "use failed_value"),
        ("ifeval", {"reward_type": "soft"}, {}, "either meets its constraint or fails"),
        ("crossthinkqa", {"reward_type": "loose"}, {"reward_type": "loose"}, "read as reward_args.reward_type=loose"),
        ("crossthinkqa", {"response_length_penalty_coef": 0.0}, {}, "roll already does this"),
        (
            "crossthinkqa",
            {"response_length_penalty_coef": 0.5},
            {"response_length_penalty_coef": 0.5},
            "read as reward_args.",
        ),
        ("math_rule", {"response_length_penalty_coef": 0.5}, {}, "use overlong_buffer"),
    ],
)
def test_roll_reward_key_becomes_argument_or_is_reported(domain: str, keys: dict, arguments: dict, said: str) -> None:
    loaded, found = read(RLVR + REINFORCE, rewards={domain: keys})
    assert isinstance(loaded.config, RlvrConfig) and not loaded.faults
    assert loaded.config.rewards[domain].reward_args == arguments
    assert len([text for text in found if text.startswith(f"rewards.{domain}.") and said in text]) == 1


BARE = f"""{COMMON.replace("save_steps: 20", "").replace("resume_from_checkpoint: false", "")}
pretrain: model
response_length: 8
num_return_sequences_in_group: 2
actor_train:
  model_args: {{disable_gradient_checkpointing: false}}
  data_args: {{file_name: a.jsonl, prompt: prompt}}
  strategy_args: {{strategy_name: deepspeed_train, strategy_config: {ZERO3}}}
actor_infer:
  strategy_args: {{strategy_name: vllm, strategy_config: {{max_num_seqs: 8}}}}
validation:
  data_args: {{file_name: b.jsonl}}
  generating_args: {{temperature: 0.6}}
rewards: {{math_rule: {{world_size: 1}}}}
"""
ROLLS = {
    "adv_estimator": "gae",
    "rollout_batch_size": 128,
    "save_steps": 50,
    "eval_steps": 10,
    "resume_from_checkpoint": "never",
    "actor_infer.generating_args.temperature": 0.95,
    "actor_infer.generating_args.top_p": 0.7,
    "actor_infer.generating_args.top_k": 50,
    "validation.generating_args.temperature": 0.6,
    "validation.generating_args.top_p": 0.7,
    "actor_train.training_args.learning_rate": 5e-5,
    "actor_train.training_args.per_device_train_batch_size": 8,
}


def of(config: object, place: str) -> Any:
    for step in place.split("."):
        config = getattr(config, step)
    return str(config) if place == "adv_estimator" else config


def test_differing_roll_defaults_are_reported_and_optional() -> None:
    loaded, found = read(BARE)
    (said,) = [text for text in found if text.startswith("roll_defaults")]
    differing = (
        "adv_estimator gae (here grpo)",
        "rollout_batch_size 128 (here 64)",
        "save_steps 50 (here 0)",
        "eval_steps 10 (here 0)",
    )
    for part in (*differing, "top_k 50 (here -1)"):
        assert part in said, said
    assert "validation.generating_args.temperature" not in said and "set roll_defaults: true" in said
    assert of(loaded.config, "rollout_batch_size") == 64
    taken, found = read(BARE, roll_defaults=True)
    assert not [text for text in found if text.startswith("roll_defaults")] and not taken.faults
    assert {place: of(taken.config, place) for place in ROLLS} == ROLLS


def test_roll_file_keeps_numbers_of_responses_and_updates() -> None:
    values = yaml.safe_load(BARE)
    del values["num_return_sequences_in_group"]
    for takes in (False, True):
        loaded, found = read(
            yaml.safe_dump(values), roll_defaults=takes, adv_estimator="reinforce", rollout_batch_size=16
        )
        config = loaded.config
        assert isinstance(config, RlvrConfig)
        assert config.num_return_sequences_in_group == 1
        assert plan_batch(config).updates == 2, "8 sequences on the CPU's one rank, as ROLL's default"
        (said,) = [
            text for text in found if text.startswith("num_return_sequences_in_group 1, actor_train.training_args.")
        ]
        assert "gradient_accumulation_steps 1" in said
    loaded, found = read(BARE, updates_per_step=4)
    assert isinstance(loaded.config, RlvrConfig)
    assert plan_batch(loaded.config).updates == 4 and not [text for text in found if "per_device" in text]


def test_roll_defaults_never_override_written_values() -> None:
    taken, _ = read(BARE, roll_defaults=True, adv_estimator="rloo", rollout_batch_size=4, save_steps=0)
    assert [of(taken.config, place) for place in ("adv_estimator", "rollout_batch_size", "save_steps")] == [
        "rloo",
        4,
        0,
    ]


def test_own_file_with_roll_snippet_is_not_rolls() -> None:
    values = yaml.safe_load(BARE)
    for key in ("logging_dir", "checkpoint_config", "logging_steps"):
        del values[key]
    _, found = read(yaml.safe_dump(values), dual_clip_loss=True)
    assert [
        text.split(":")[0] for text in found if "disable_gradient" not in text and "names no columns" not in text
    ] == []


@pytest.mark.parametrize(
    ("keys", "variant", "key", "value"),
    [
        ({"dual_clip_loss": True}, None, "dual_clip_loss", 1.4),
        ({"dual_clip_loss": True, "pg_clip": 0.3}, None, "dual_clip_loss", 1.6),
        ({"dual_clip_loss": 3.0}, None, "dual_clip_loss", 3.0),
        ({}, "cispo", "pg_clip_low", 0.1),
        ({"pg_clip_high": 0.4}, "cispo", "pg_clip_high", 0.4),
        ({"add_token_level_kl": True}, None, "init_kl_coef", 0.2),
    ],
)
def test_roll_defaults_convert_numbers_with_other_meaning(
    keys: dict, variant: str | None, key: str, value: float
) -> None:
    values = yaml.safe_load(BARE) | keys
    if variant:
        values["actor_train"]["pg_variant"] = variant
    taken, found = read(yaml.safe_dump(values), roll_defaults=True)
    assert not taken.faults and getattr(taken.config, key) == value
    assert not [text for text in found if text.startswith("policy_loss")]


@pytest.mark.parametrize(
    ("keys", "value"), [({}, 1.4), ({"pg_clip": 0.1}, 1.2), ({"pg_clip": 0.2, "pg_clip_high": 0.28}, 1.4)]
)
def test_the_dual_clip_of_rolls_files_is_rolls(keys: dict, value: float) -> None:
    for takes in (False, True):
        taken, found = read(BARE, dual_clip_loss=True, roll_defaults=takes, **keys)
        assert not taken.faults and isinstance(taken.config, RlvrConfig) and taken.config.dual_clip_loss == value
        assert (
            len(
                [
                    text
                    for text in found
                    if text.startswith(f"dual_clip_loss: true is read as 1 + 2 x pg_clip = {value}")
                ]
            )
            == 1
        )


REFUSED = {
    "megatron": (
        {"strategy_name": "megatron_train", "strategy_config": {"tensor_model_parallel_size": 1}},
        "strategy_name",
        "Megatron",
    ),
    "fsdp": ({"strategy_name": "fsdp2_train", "strategy_config": {"fsdp_size": 8}}, "strategy_name", "FSDP2"),
    "megatron's keys": (
        {
            "strategy_name": "deepspeed_train",
            "strategy_config": {"zero_optimization": {"stage": 1}, "use_distributed_optimizer": True},
        },
        "strategy_config.use_distributed_optimizer",
        "Megatron",
    ),
}


OURS = """
exp_name: ours
output_dir: ./output
pretrain: Qwen/Qwen2.5-7B
max_steps: 10
rewards: {math_rule: {}}
actor_train: {data_args: {file_name: a.jsonl, prompt: prompt}}
actor_infer: {strategy_args: {strategy_name: vllm}}
"""


@pytest.mark.parametrize("name", REFUSED)
def test_other_backends_are_called_by_their_name(name: str) -> None:
    strategy, place, said = REFUSED[name]
    values = yaml.safe_load(OURS)
    values["actor_train"]["strategy_args"] = strategy
    (fault,) = read(yaml.safe_dump(values))[0].faults
    assert coded([fault]) == [("not_supported", f"actor_train.strategy_args.{place}")] and said in fault.problem
    assert "did you mean" not in str(fault)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"vlm_filter": {"enable": True}}, "vlm_filter"),
        ({"actor_train": {"data_args": {"image_key": "images"}}}, "actor_train.data_args.image_key"),
        ({"actor_train": {"model_args": {"model_type": "diffusion_module"}}}, "actor_train.model_args.model_type"),
        (
            {"actor_train": {"strategy_args": {"strategy_name": "diffusion_deepspeed_train"}}},
            "actor_train.strategy_args.strategy_name",
        ),
    ],
)
def test_images_video_and_diffusion_are_refused_by_name(changes: dict, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(BARE, not_a_key=1, **changes)
    (fault,) = caught.value.faults
    assert coded([fault]) == [("not_supported", place)] and "images" in fault.problem and "diffusion" in fault.problem


def test_faults_of_every_stage_come_together() -> None:
    """The faults come from the translation (rl_loss_coef), the schema (max_step), the checks between keys, and the
    files on disk.
    """
    loaded, _ = read(BARE, rl_loss_coef=0.5, max_step=3, kl_loss_coef=0.1, resume_from_checkpoint="nowhere")
    assert loaded.config is not None
    with pytest.raises(ConfigError) as caught:
        make_plan(loaded.config, loaded.faults)
    places = [fault.place for fault in caught.value.faults]
    assert places[:2] == ["rl_loss_coef", "max_step"]
    assert {"use_kl_loss", "resume_from_checkpoint", "actor_train.data_args.file_name"} <= set(places)


@pytest.mark.parametrize("changes", [{"max_steps": "many"}, {"rewards": {"cv": {"worker_cls": "a.OtherWorker"}}}])
def test_unreadable_values_lead_to_no_further_faults(changes: dict) -> None:
    loaded, _ = read(BARE, **changes)
    assert loaded.config is None and len(loaded.faults) == 1
    with warnings.catch_warnings(), pytest.raises(ConfigError):
        warnings.simplefilter("ignore")
        checked_config(DictConfig(yaml.safe_load(BARE) | changes))
