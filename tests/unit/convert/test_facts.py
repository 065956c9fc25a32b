"""What each program counts, and its defaults, in translated experiments. Figures are those of the programs' sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.convert.draft import Draft
from roll.convert.recognise import Wishes, converted
from roll.convert.source import plain_value

VERL = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m"
OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m --data.prompt_dataset a.jsonl"
OLD = "deepspeed --module openrlhf.cli.train_ppo_ray --pretrain m --prompt_data a.jsonl"
TRL: dict[str, Any] = {"model_name_or_path": "m", "output_dir": "output/x", "num_generations": 8, "max_steps": 100}


@pytest.fixture
def draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def translate(source: str | dict[str, Any], **wishes: Any) -> Draft:
        file = tmp_path / ("run.sh" if isinstance(source, str) else "grpo.yaml")
        file.write_text(source if isinstance(source, str) else yaml.safe_dump(source), encoding="utf-8")
        return converted(file, Wishes(**{"rows": 8000, **wishes}))[0]

    return translate


def values(draft: Draft, expected: dict[str, Any]) -> dict[str, Any]:
    """Return the draft's values of the expected keys."""
    return {path: draft.at(path) for path in expected}


FACTS = [
    # prompts of a step / prompts of an update
    (
        f"{VERL} data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128 "
        "actor_rollout_ref.rollout.n=8",
        {"rollout_batch_size": 512, "num_return_sequences_in_group": 8, "updates_per_step": 4},
    ),
    # verl's defaults
    (
        VERL,
        {
            "rollout_batch_size": 1024,
            "updates_per_step": 4,
            "loss_agg_mode": "token-mean",
            "dual_clip_loss": 3.0,
            "adv_estimator": "gae",
            "lambd": 1.0,
            "whiten_advantages": True,
            "value_clip": 0.5,
            "actor_train.training_args.weight_decay": 0.01,
            "actor_train.training_args.lr_scheduler_type": "constant",
            "actor_infer.strategy_args.strategy_config.tensor_parallel_size": 2,
            "actor_train.device_mapping": "list(range(0,8))",
            "max_steps": 30 * 8000 // 1024,
            "use_kl_loss": None,
        },
    ),
    (
        f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.use_kl_loss=True "
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        {
            "use_kl_loss": True,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "k3",
            "kl_loss_importance": False,
            "reference.strategy_args.strategy_name": "deepspeed_infer",
        },
    ),
    (
        f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 algorithm.norm_adv_by_std_in_grpo=False "
        "actor_rollout_ref.model.lora_rank=16 algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05",
        {
            "adv_estimator": "dr_grpo",
            "add_token_level_kl": True,
            "init_kl_coef": 0.05,
            "kl_penalty": "k1",
            "reference": None,
            "actor_train.model_args.lora_alpha": 16,
        },
    ),
    # bounds of the inverse
    (
        f"{VERL} algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
        "algorithm.rollout_correction.rollout_rs_threshold=0.8_1.25",
        {"mismatch_correction": "geo_rs", "mismatch_low": 0.8, "mismatch_high": 1.25},
    ),
    (
        "python -m verl.experimental.fully_async_policy.fully_async_main actor_rollout_ref.model.path=m "
        "actor_rollout_ref.actor.ppo_mini_batch_size=32 async_training.require_batches=4 "
        "async_training.trigger_parameter_sync_step=4 async_training.staleness_threshold=0.1 "
        "rollout.total_rollout_steps=51200 rollout.nnodes=1 rollout.n_gpus_per_node=8",
        {
            "rollout_batch_size": 512,
            "updates_per_step": 16,
            "max_steps": 100,
            "async_generation_ratio": 0.1,
            "behaviour_log_probs": "engine",
            "actor_infer.device_mapping": "list(range(8,16))",
        },
    ),
    # prompts of a step, responses of an update
    (
        f"{OPENRLHF} --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 256 "
        "--algo.advantage.estimator group_norm --train.num_episodes 2",
        {
            "rollout_batch_size": 128,
            "updates_per_step": 4,
            "adv_estimator": "grpo",
            "max_steps": 2 * 8000 // 128,
            "loss_agg_mode": "token-mean",
            "add_token_level_kl": True,
            "init_kl_coef": 0.01,
            "actor_train.training_args.lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "actor_train.training_args.warmup_ratio": 0.03,
            "actor_train.training_args.adam_beta2": 0.95,
        },
    ),
    # versions before 0.10
    (
        f"{OLD} --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 1024 --advantage_estimator rloo "
        "--init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 --eps_clip_low_high 0.2 0.27 --max_len 4096",
        {
            "updates_per_step": None,
            "adv_estimator": "rloo",
            "kl_loss_coef": 0.001,
            "kl_loss_type": "k3",
            "pg_clip_low": 0.2,
            "pg_clip_high": 0.27,
            "prompt_length": 2048,
        },
    ),
    # ratios of stale responses are to the policy that sampled, unless a correction weights them
    (
        f"{OPENRLHF} --train.async_enable --train.async_queue_size 2",
        {"async_generation_ratio": 2, "behaviour_log_probs": "engine", "mismatch_correction": None},
    ),
    (
        f"{OPENRLHF} --train.async_enable --algo.advantage.is_correction_enable",
        {"behaviour_log_probs": "trainer", "mismatch_correction": "tis", "mismatch_cap": 5.0},
    ),
    # completions of a step = 8 x 4 x 8, of an update = half of them; 100 updates are 50 steps
    (
        {**TRL, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
        {
            "rollout_batch_size": 32,
            "updates_per_step": 2,
            "max_steps": 50,
            "save_steps": 250,
            "loss_agg_mode": "token-mean",
            "adv_estimator": "grpo",
            "use_kl_loss": None,
        },
    ),
    (
        {**TRL, "num_iterations": 2, "beta": 0.04, "loss_type": "dr_grpo", "scale_rewards": False, "delta": 4.0},
        {
            "max_steps": 50,
            "ppo_epochs": 2,
            "kl_loss_coef": 0.04,
            "adv_estimator": "dr_grpo",
            "loss_agg_mode": "seq-mean-token-sum-norm",
            "loss_scale_factor": 512,
            "dual_clip_loss": 4.0,
        },
    ),
    (
        {
            **TRL,
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "scale_rewards": "batch",
            "epsilon": 3e-4,
        },
        {
            "policy_loss": "gspo",
            "pg_clip_high": 3e-4,
            "loss_agg_mode": "seq-mean-token-mean",
            "adv_estimator": "reinforce",
            "norm_mean_type": "group",
            "norm_std_type": "batch",
        },
    ),
    # an absolute bound of the ratio, none below
    (
        {**TRL, "loss_type": "cispo", "epsilon_high": 5.0},
        {"policy_loss": "cispo", "pg_clip_low": 1, "pg_clip_high": 4.0},
    ),
]


@pytest.mark.parametrize(("source", "expected"), FACTS)
def test_counts_and_defaults_are_the_programs(source: Any, expected: dict[str, Any], draft: Any) -> None:
    found = draft(source, gpus=8)
    assert values(found, expected) == expected


def test_indivisible_updates_are_said(draft: Any) -> None:
    found = draft(f"{VERL} data.train_batch_size=100 actor_rollout_ref.actor.ppo_mini_batch_size=30")
    assert found.at("updates_per_step") in (2, 4)
    assert "actor_rollout_ref.actor.ppo_mini_batch_size" in {note.place for note in found.of_kind("changed")}


def test_unknown_rows_make_one_step_and_note(draft: Any) -> None:
    found = draft(VERL, rows=None)
    assert found.at("max_steps") == 1
    assert "trainer.total_epochs" in {note.place for note in found.of_kind("assumed")}


def test_what_another_key_overrides_is_said(draft: Any) -> None:
    script = f"{VERL} trainer.total_training_steps=7 trainer.total_epochs=3 data.val_files=b.parquet"
    found = draft(f"{script} trainer.val_before_train=False")
    assert found.at("max_steps") == 7 and found.at("validation") is None
    assert {"trainer.total_epochs", "data.val_files"} <= {note.place for note in found.of_kind("idle")}


def test_preferences_keep_pairs_of_an_update(draft: Any, tmp_path: Path) -> None:
    keys = {"model_name_or_path": "m", "output_dir": "o", "beta": 0.05, "loss_type": ["sigmoid", "sft"]}
    keys |= {"loss_weights": [1.0, 0.2], "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    found = draft(keys, gpus=8, trainer="dpo")
    expected = {
        "pipeline": "dpo",
        "preference_loss": "dpo",
        "added_preference_losses": {"sft": 0.2},
        "beta": 0.05,
        "truncation": "end",
        "max_length": 1024,
        "actor_train.training_args.per_device_train_batch_size": 4,
        "actor_train.training_args.gradient_accumulation_steps": 2,
        "actor_train.training_args.num_train_epochs": 3,
    }
    assert values(found, expected) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("10", 10),
        ("1_000", 1000),
        ("True", True),
        ("null", None),
        ("['a','b']", ["a", "b"]),
        ("[0.9,1e-3]", [0.9, 1e-3]),
        ("'left'", "left"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("[unclosed", "[unclosed"),
    ],
)
def test_words_become_values(text: str, value: Any) -> None:
    assert plain_value(text) == value


OWN = [
    ({**TRL, "reward_funcs": "mine:last_number"}, "last_number.reward"),
    ({**TRL, "reward_funcs": ["mine.close"], "reward_weights": [2.0]}, "close.reward"),
    ({**TRL, "reward_funcs": ["accuracy_reward", "mine.close"]}, "math_rule.parts.close.reward"),
    ({**TRL, "reward_funcs": ["a.f", "b.f"]}, "f.parts.f_1.reward"),
    ({**TRL, "reward_funcs": "mine.close", "reward_model_name_or_path": "r"}, "score.reward"),
    (f"{VERL} custom_reward_function.path=a/mine.py", "mine.reward"),
    (f"{VERL} custom_reward_function.path=mine.py custom_reward_function.name=close", "close.reward"),
    (f"{VERL} reward.custom_reward_function.path=mine.py", "mine.reward"),
    (f"{VERL} reward_model.reward_manager=close", "close.reward"),
    (f"{VERL} reward_model.sandbox_fusion.url=http://x/y", "sandbox_fusion.reward"),
    (f"{OPENRLHF} --reward.remote_url a/mine.py", "mine.reward"),
    (f"{OPENRLHF} --reward.remote_url http://x:1/y --reward.model_name_or_path r", "reward_func.reward"),
    (f"{OPENRLHF} --train.agent_func_path agent.py", "agent.reward"),
]


@pytest.mark.parametrize(("source", "key"), OWN)
def test_own_reward_must_be_set(source: Any, key: str, draft: Any) -> None:
    found = draft(source)
    assert found.at(f"rewards.{key}") == "???"
    assert len(found.at("rewards")) == 1
    assert any(f"rewards.{key}" in note.said and "refused" in note.said for note in found.of_kind("lost"))


@pytest.mark.parametrize("source", [TRL, VERL, f"{VERL} reward_model.reward_manager=dapo", OPENRLHF])
def test_unnamed_reward_is_math_rule(source: Any, draft: Any) -> None:
    assert draft(source).at("rewards") == {"math_rule": {"world_size": 8}}


def test_known_reward_is_kept(draft: Any) -> None:
    assert draft({**TRL, "reward_funcs": "repetition_penalty"}).at("rewards") == {
        "repetition_penalty": {"world_size": 8}
    }


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path m", "data.prompt_dataset"),
        ("python -m openrlhf.cli.train_sft --model.model_name_or_path m", "data.dataset"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=m", "data.train_files"),
        ({**TRL, "datasets": [{"path": "a", "split": "test"}]}, "dataset_mixture"),
    ],
)
def test_unnamed_file_is_said(source: Any, place: str, draft: Any) -> None:
    assert any(note.place == place and "data/train" in note.said for note in draft(source).of_kind("assumed"))


def test_engine_keeps_its_limits_on_the_cpu(draft: Any) -> None:
    found = draft(f"{VERL} actor_rollout_ref.rollout.max_num_seqs=8", gpus=0)
    assert found.at("actor_infer.strategy_args.strategy_config.max_num_seqs") == 8


@pytest.mark.parametrize(("name", "split"), [("a.parquet", None), ("org/set", "train[:9]")])
def test_part_of_a_file_is_said(name: str, split: str | None, draft: Any) -> None:
    found = draft({**TRL, "dataset_name": name, "dataset_train_split": "train[:9]"})
    assert found.at("actor_train.data_args.split") == split
    assert any(note.place == "dataset_train_split" for note in found.of_kind("lost")) == (split is None)


@pytest.mark.parametrize(
    ("given", "narrowed"),
    [({}, ""), ({"top_p": 1.0, "top_k": 0}, ""), ({"top_k": 10}, "top_k"), ({"top_p": 0.9}, "top_p")],
)
def test_no_correction_of_a_part_of_the_distribution(given: dict[str, Any], narrowed: str, draft: Any) -> None:
    found = draft({**TRL, "use_vllm": True, **given})
    assert found.at("mismatch_correction") == (None if narrowed else "seq_mis")
    said = [note.said for note in found.of_kind("changed") if note.place == "vllm_importance_sampling_correction"]
    assert [narrowed in one for one in said] == ([True] if narrowed else [])


@pytest.mark.parametrize(("bf16", "synced"), [(True, None), (False, "merged")])
def test_adapters_in_fp32_are_merged(bf16: bool, synced: str | None, draft: Any) -> None:
    assert draft({**TRL, "use_peft": True, "bf16": bf16}).at("weight_sync.lora") == synced


@pytest.mark.parametrize(
    ("given", "kind", "kept"),
    [
        ({"use_peft": True, "load_in_4bit": True}, "nf4", ""),
        ({"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True}, "nf4_double", ""),
        ({"use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "nf4", "bnb_4bit_quant_type"),
        ({"use_peft": True, "load_in_4bit": False}, None, ""),
        ({"load_in_4bit": True}, None, "load_in_4bit"),
        ({"use_peft": True, "use_dora": True, "load_in_4bit": True}, None, "load_in_4bit"),
        ({"use_peft": True, "load_in_4bit": True, "deepspeed": "zero3.json"}, None, "load_in_4bit"),
    ],
)
def test_weights_in_4_bits(given: dict[str, Any], kind: str | None, kept: str, draft: Any) -> None:
    found = draft({**TRL, "beta": 0.1, **given})
    assert found.at("actor_train.model_args.quantized_base") == kind
    assert not kind or (found.at("weight_sync.lora") == "merged" and found.at("reference") is None)
    said = [note.place for note in found.notes if note.kind in ("lost", "changed") and "4bit" in note.place]
    assert said == ([kept] if kept else [])
