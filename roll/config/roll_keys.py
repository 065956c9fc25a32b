"""Keys of ROLL's files that have another name here, or no meaning. Each is accepted with one warning that says what to use.

In a place `*` stands for one free name: `rewards.*.worker_cls`. `ROLES` stands for every role.
"""

from __future__ import annotations

from typing import Any

ROLES = ("actor_train", "actor_infer", "reference", "critic", "sft_train", "reward_train", "student", "teacher")

VARIABLES = ("lora_target", "lora_rank", "lora_alpha", "lora_dropout", "pg_variant", "reward_pretrain")
"""Root keys that ROLL's files use as variables of `${...}`. In a file they may stand unused; on the command line that is a fault."""

IGNORED = {
    "logging_dir": "logs go to `logs/` in output_dir",
    "num_nodes": "the number of nodes follows from device_mapping and num_gpus_per_node",
    "checkpoint_config": "checkpoints go to `checkpoints/` in output_dir; see save_steps and keep_checkpoints",
    "logging_steps": "every step is logged; remove the key",
    "rpc_timeout": "use deadlines",
    "reward_pretrain": "a reward loads no tokenizer here; remove the key",
    "use_pg_clip_range": "pg_clip_low and pg_clip_high apply wherever they are given",
    "whiten_rewards": "use norm_mean_type and norm_std_type",
    "val_greedy": "use validation.generating_args.temperature=0",
    "val_n_sample": "use validation.generating_args.num_return_sequences",
    "sequence_length": "use prompt_length and response_length",
    "max_running_requests": "use actor_infer.strategy_args.strategy_config.max_num_seqs",
    "generate_opt_level": "generation always streams; remove the key",
    "use_additional_prompts": "no prompts are generated beyond rollout_batch_size; use async_generation_ratio",
    "is_use_additional_prompts": "no prompts are generated beyond rollout_batch_size; use async_generation_ratio",
    "max_additional_running_prompts": "no prompts are generated beyond rollout_batch_size; use async_generation_ratio",
    "is_num_return_sequences_expand": "the samples of a prompt always share one request; remove the key",
    "enable_reference": "the reference runs whenever a KL term uses it; remove the key",
    "enable_old_logprobs_recompute": "use behaviour_log_probs: trainer recomputes them",
    "force_disable_old_logprobs_recompute": "use behaviour_log_probs: engine keeps those of sampling",
    "rewards.*.model_args": "a reward is a function and loads no model; use reward_args",
    "rewards.*.data_args": "a reward is a function and reads no data set; use reward_args",
    "rewards.*.generating_args": "a reward is a function and generates nothing; use reward_args",
    "rewards.*.strategy_args": "a reward is a function and has no backend; use reward_args",
    "rewards.*.device_mapping": "a reward runs on the CPU; use world_size",
    "rewards.*.infer_batch_size": "responses are scored one by one; use world_size",
    "rewards.*.reward_type": "use failed_value and the reward function's own value",
    "rewards.*.response_length_for_code": "use reward_args",
    "rewards.*.query_filter_config": "groups are not filtered by domain; use dynamic_sampling",
    "rewards.*.response_filter_config": "responses are not filtered; use max_len_mask",
    "rewards.*.use_local": "use reward_args",
    "rewards.*.code_url": "use reward_args",
    "rewards.*.judge_prompt": "use reward_args",
    "rewards.*.judge_model_type": "use reward_args",
    "rewards.*.judge_model_name": "use reward_args",
    "rewards.*.judge_api_url": "use reward_args",
    "rewards.*.judge_api_key": "use system_envs and read it in the reward function",
    "validation.eval_steps": "use the root key eval_steps",
    "validation.strategy_args": "actor_infer answers the validation prompts",
    "validation.data_args.dataset_dir": "give the folder in file_name",
    "validation.data_args.interleave_probs": "validation answers every prompt; remove the key",
    "validation.generating_args.num_beams": "responses are sampled, not searched; use temperature and top_p",
    "validation.generating_args.logprobs": "use behaviour_log_probs",
    "actor_infer.data_args": "prompts come from actor_train.data_args",
    "actor_infer.generating_args.num_beams": "responses are sampled, not searched; use temperature and top_p",
    "actor_infer.generating_args.logprobs": "use behaviour_log_probs",
    "actor_infer.strategy_args.strategy_config.sleep_level": "engines that share GPUs leave them to others by turns; use time_sharing",
    "actor_infer.strategy_args.strategy_config.VLLM_USE_V1": "vLLM has one engine; remove the key",
    "actor_train.max_tokens_per_microbatch_in_infer": "max_tokens_per_microbatch bounds training and log-probs alike",
    "reference.data_args": "prompts come from actor_train.data_args",
    "reference.generating_args": "the reference generates nothing",
    "reference.training_args": "the reference does not learn",
    "critic.data_args": "prompts come from actor_train.data_args",
    "critic.generating_args": "the critic generates nothing",
    "critic.max_tokens_per_microbatch_in_infer": "max_tokens_per_microbatch bounds training and values alike",
} | {
    f"{role}.{key}": reason
    for role in ROLES
    for key, reason in {
        "worker_cls": "a role's class follows from its strategy; use strategy_args.strategy_name",
        "pg_variant": "use the root key policy_loss",
        "num_gpus_per_worker": "use strategy_args.strategy_config.tensor_parallel_size",
        "use_dynamic_batching_in_train": "sequences are always packed; use max_tokens_per_microbatch",
        "use_dynamic_batching_in_infer": "sequences are always packed; use max_tokens_per_microbatch",
        "sequence_length_round_in_train": "sequences are never padded; remove the key",
        "sequence_length_round_in_infer": "sequences are never padded; remove the key",
        "use_sequence_packing": "sequences are always packed; use max_tokens_per_microbatch",
        "model_update_frequency": "weights are synchronised after every step; use async_generation_ratio",
        "eval_steps": "use the root key eval_steps",
        "offload_nccl": "NCCL buffers stay; remove the key",
        "model_args.model_type": "the model's config.json says its type; remove the key",
        "data_args.dataset_dir": "give the folder in file_name",
        "data_args.interleave_probs": "use domain_interleave_probs",
        "strategy_args.strategy_config.checkpoint": "checkpoints are verified by roll's own manifest; remove the key",
    }.items()
}

RENAMED = (
    {
        "max_ckpt_to_keep": "keep_checkpoints",
    }
    | {
        f"{role}.{old}": new
        for role in ROLES
        for old, new in {
            "max_tokens_per_microbatch_in_train": "max_tokens_per_microbatch",
            "model_args.flash_attn": "attn_implementation",
        }.items()
    }
    | {f"{role}.max_tokens_per_microbatch_in_infer": "max_tokens_per_microbatch" for role in ("actor_infer", "reference")}
)
"""Old place to the new name in the same block."""

VALUES: dict[str, dict[Any, Any]] = {
    "resume_from_checkpoint": {True: "auto", False: "never", None: "never"},
    "kl_penalty": {"kl": "k1", "mse": "k2"},
    "track_with": {"stdout": "none", None: "none"},
} | {
    f"{role}.model_args.{key}": values
    for role in ROLES
    for key, values in {
        "lora_target": {"all": "all-linear"},
        "attn_implementation": {"flash_attention_2": "fa2", "flash_attn": "fa2"},
    }.items()
}
"""ROLL's values that are written differently here."""

CHECKPOINTING = {True: "none", False: "auto"}
"""`model_args.disable_gradient_checkpointing` to `gradient_checkpointing`."""

REWARD_CLASSES = {"MathRuleRewardWorker": "math_rule", "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice"}
"""Last part of `rewards.*.worker_cls` to the name of the reward function, for the classes that have a counterpart here."""
