"""Keys of ROLL's files that have another name or no meaning here. Each key that is ignored or renamed causes one
warning.

In a key path, `*` stands for any one name, and `<role>` for every role: `<role>.worker_cls`.
"""

from __future__ import annotations

from typing import Any

ROLES = ("actor_train", "actor_infer", "reference", "critic", "sft_train", "reward_train", "student", "teacher")
ROLE = "<role>"

CRITIC_START = "reward_pretrain"
"""Root key for the model of rewards, where a critic without a model of its own starts."""
VARIABLES = (
    *("lora_target", "lora_rank", "lora_alpha", "lora_dropout", "pg_variant", CRITIC_START),
    *(
        "custom_env",
        "env_manager_cls",
        "max_tokens_per_step",
        "max_actions_per_traj",
        "agent_system_template",
        "agent_template",
    ),
    *(
        "action_pattern",
        "think_action_pattern",
        "all_response_pattern",
        "sokoban_format_penalty",
        "frozen_format_penalty",
    ),
    *("single_prompt_agent_system_template", "single_prompt_agent_template"),
    *("gem_games", "gem_math", "gem_qa", "gem_rg", "gem_code", "default_history_length"),
)
"""Root keys that ROLL's files use as variables in `${...}`. An unused one is accepted in a file, but
refused on the command line."""

BEYOND = "no prompts beyond rollout_batch_size are generated; use async_generation_ratio"
DEAD = "ROLL itself never reads it; remove the key"
TOPR = "ROLL itself never reads it; use policy_loss: topr with topr_positive_weight and topr_negative_weight"
NORM = "use norm_mean_type and norm_std_type"
PACKED = "sequences are always packed; use max_tokens_per_microbatch"
PROFILED = "metrics.jsonl has the time and the memory of each part; remove the key"
PROMPTS = "the prompts come from actor_train.data_args"
SAMPLED = "responses are always sampled, without beam search; use temperature and top_p"
UNPADDED = "sequences are never padded; remove the key"

IGNORED = {
    "logging_dir": "logs go to `logs/` in output_dir",
    "base_dir": "everything goes to output_dir",
    "rollout_dump_dir": "responses go to `samples.jsonl` in output_dir",
    "save_logging_board_dir": "metrics go to `metrics.jsonl` in output_dir",
    "num_nodes": "the number of nodes follows from device_mapping and num_gpus_per_node",
    "local_rank": "roll sets it for each worker; remove the key",
    "checkpoint_config": "checkpoints go to `checkpoints/` in output_dir; see save_steps and keep_checkpoints",
    "logging_steps": "every step is logged; remove the key",
    "track_name": DEAD,
    "rpc_timeout": "use deadlines",
    "model_download_type": "a model is a folder or a name on the Hugging Face Hub; remove the key",
    "reward_pretrain": "no role uses it; set rewards.<domain>.model_args.model_name_or_path for a judge or a reward "
    "model",
    "reward_filter": DEAD,
    "group_filter": DEAD,
    "batch_adjust_mode": "each episode is trained on once: none is copied, removed or drawn to fill an update; remove "
    "the key",
    "partial_gpu_mode": "device_mapping alone decides which roles share GPUs; remove the key",
    "is_offload_optimizer_states_in_train_step": "use zero_optimization: {offload_optimizer: {device: cpu}}",
    "env_monitor": "use environments.<domain>.step_timeout and episode_timeout",
    "render_save_dir": "episodes go to `samples.jsonl` in output_dir, turn by turn",
    "reward_norm": NORM,
    "reward_shift": NORM,
    "reward_scale": NORM,
    "use_reward_norm": DEAD,
    "use_reward_scaling": DEAD,
    "use_policy_loss_type": DEAD,
    "use_topr_loss": TOPR,
    "use_topr_neg_loss_coef": TOPR,
    "positive_loss_coef": TOPR,
    "postive_loss_coef": TOPR,
    "l2": DEAD,
    "add_len_reward": DEAD,
    "dataset_filter": DEAD,
    "mask_type": DEAD,
    "balance_length": DEAD,
    "minibatch_data_iter_num": DEAD,
    "val_greedy": "use validation.generating_args.temperature=0",
    "val_n_sample": "use validation.generating_args.num_return_sequences",
    "val_batch_size": "validation uses all held-out rows; remove the key",
    "train_batch_size": "use per_device_train_batch_size and gradient_accumulation_steps",
    "max_running_requests": "use actor_infer.strategy_args.strategy_config.max_num_seqs",
    "generate_opt_level": "each response is always a separate request, scored as soon as it is complete; remove the "
    "key",
    "use_additional_prompts": BEYOND,
    "is_use_additional_prompts": BEYOND,
    "max_additional_running_prompts": BEYOND,
    "is_num_return_sequences_expand": "each sample is always a separate request; remove the key",
    "is_offload_states": "roles that share GPUs take turns and offload their states; use time_sharing",
    "enable_reference": "the reference runs whenever a KL term uses it; remove the key",
    "enable_old_logprobs_recompute": "use behaviour_log_probs=trainer, which recomputes them",
    "force_disable_old_logprobs_recompute": "use behaviour_log_probs=engine, which keeps the log-probs from sampling",
    "report_length_and_rewards": PROFILED,
    "length_profiler_dir": PROFILED,
    "profiler_output_dir": PROFILED,
    "profiler_timeline": PROFILED,
    "profiler_memory": PROFILED,
    "logits_transfer_backend": "the teacher sends hidden states, not logits; remove the key",
    "adaptive_kl_alpha": "no divergence reads it; remove the key",
    "skew_lambda": "no divergence reads it; remove the key",
    "rewards.*.response_length_for_code": "use reward_args",
    "rewards.*.format_pattern": "use reward_args",
    "rewards.*.response_filter_config": "responses are not filtered; use max_len_mask",
    "tracker_kwargs.wandb.log_dir": "the tracker's files go to output_dir",
    "tracker_kwargs.swanlab.logdir": "the tracker's files go to output_dir",
    "validation.eval_steps": "use the root key eval_steps",
    "validation.strategy_args": "actor_infer generates the responses for validation",
    "validation.data_args.dataset_dir": "include the folder in file_name",
    "validation.data_args.interleave_probs": "validation uses every prompt; remove the key",
    "validation.generating_args.num_beams": SAMPLED,
    "validation.generating_args.do_sample": SAMPLED,
    "validation.generating_args.length_penalty": SAMPLED,
    "validation.generating_args.logprobs": "use behaviour_log_probs",
    "actor_infer.data_args": PROMPTS,
    "actor_infer.generating_args.num_beams": SAMPLED,
    "actor_infer.generating_args.do_sample": SAMPLED,
    "actor_infer.generating_args.length_penalty": SAMPLED,
    "actor_infer.generating_args.logprobs": "use behaviour_log_probs",
    "actor_infer.strategy_args.strategy_config.sleep_level": "engines that share GPUs take turns with other roles; "
    "use time_sharing",
    "actor_infer.strategy_args.strategy_config.VLLM_USE_V1": "vLLM has one engine; remove the key",
    "actor_train.max_tokens_per_microbatch_in_infer": "max_tokens_per_microbatch applies to both training and "
    "log-probs",
    "reference.data_args": PROMPTS,
    "reference.generating_args": "the reference generates nothing",
    "reference.training_args": "the reference is not trained",
    "critic.data_args": PROMPTS,
    "critic.generating_args": "the critic generates nothing",
    "critic.max_tokens_per_microbatch_in_infer": "max_tokens_per_microbatch applies to both training and values",
    "teacher.data_args": "the rows come from student.data_args",
    "teacher.training_args": "the teacher is not trained",
    "<role>.num_gpus_per_worker": "use strategy_args.strategy_config.tensor_parallel_size",
    "<role>.max_concurrency": "the engine limits the number of concurrent requests; use max_num_seqs",
    "<role>.logits_in_fp32": "log-probs are always computed in fp32; remove the key",
    "<role>.apply_loss_scale": "the loss is always normalised over the whole update; remove the key",
    "<role>.use_dynamic_batching_in_train": PACKED,
    "<role>.use_dynamic_batching_in_infer": PACKED,
    "<role>.use_sequence_packing": PACKED,
    "<role>.sequence_packing_args": PACKED,
    "<role>.sequence_length_round_in_train": UNPADDED,
    "<role>.sequence_length_round_in_infer": UNPADDED,
    "<role>.use_remove_padding": UNPADDED,
    "<role>.model_update_frequency": "weights are synchronised after every step; use async_generation_ratio",
    "<role>.eval_steps": "use the root key eval_steps",
    "<role>.offload_nccl": "NCCL buffers are never offloaded; remove the key",
    "<role>.model_args.model_type": "the model's config.json specifies its type; remove the key",
    "<role>.model_args.gradient_checkpointing_use_reentrant": "roll chooses the implementation of recomputation; "
    "remove the key",
    "<role>.model_args.num_labels": "a value head or score head always has one output; remove the key",
    "<role>.model_args.device_map": "each rank has its own device; remove the key",
    "<role>.training_args.save_hf_model": "a run exports its model at the end; see save_at_end",
    "<role>.data_args.dataset_dir": "include the folder in file_name",
    "<role>.data_args.dataset_type": "the suffix of a file determines its format; remove the key",
    "<role>.data_args.interleave_probs": "use domain_interleave_probs",
    "<role>.data_args.cache_path": "tokenised rows are cached in the folder HF_DATASETS_CACHE; remove the key",
    "<role>.data_args.eval_file_name": "use validation.data_args.file_name",
    "<role>.strategy_args.strategy_config.checkpoint": "checkpoints are verified by roll's own manifest; remove the "
    "key",
}
"""Keys that do not affect the result of training, with replacements, by key path."""

LOGIN = (
    "log in before the run (`wandb login`, `swanlab login`), or set the key in an environment variable, so that no "
    "file contains it"
)
ON_POLICY = "for on-policy distillation use pipeline: rlvr with a teacher; see docs/post_training.md"
REFUSED = {
    "train_infer_correction": "use mismatch_correction, mismatch_cap, mismatch_low and mismatch_high",
    "whiten_rewards": "use norm_mean_type=batch and norm_std_type=batch",
    "rl_loss_coef": "the policy term always has the weight 1; use kl_loss_coef and entropy_loss_coef for the other "
    "terms",
    "cispo_epsilon_low": "use pg_clip_low",
    "cispo_epsilon_high": "use pg_clip_high",
    "tis_upper_bound": "use mismatch_correction=tis and mismatch_cap",
    "kimi15_tau": "no policy_loss has such a term; use use_kl_loss and kl_loss_coef",
    "reward_model": "set rewards.<domain>.reward to reward_model, with model_args and strategy_args in the same block",
    "user_defined_rollout_loop_cls": "use dynamic_sampling, or your own reward",
    "rollout_mock": "rollouts cannot be replayed; samples.jsonl records them",
    "val_prompt_length": "use prompt_length",
    "val_sequence_length": "use prompt_length and response_length",
    "is_pure_opd": ON_POLICY,
    "use_opd": ON_POLICY,
    "opd_kl_coef": ON_POLICY,
    "student_train": ON_POLICY,
    "student_infer": ON_POLICY,
    "dirty_data_mask": "an episode whose environment fails is repeated, and its group replaced",
    "use_token_reward": "use adv_estimator=step_reinforce or gigpo, which credit turns",
    "open_feedback_turn": "the messages of an environment are its feedback",
    "exp_mode": "use roll.evaluate to evaluate a model",
    "ratio_type": "use policy_loss=gspo, which uses the ratio of a whole episode",
    "system_key": "data_args.system is the system message itself; if rows have different ones, put them into messages",
    "query_key": "append its text to the prompt column of the rows",
    "distill_on_prompt": "the student is trained on the responses only",
    "teacher_temperature": "distill_temperature applies to both models",
    "tracker_kwargs.*.api_key": LOGIN,
    "tracker_kwargs.*.login_kwargs": LOGIN,
    "<role>.ratio_type": "use policy_loss",
    "<role>.router_replay": "training computes the routing of experts again",
    "<role>.model_args.adapter_name_or_path": "merge the adapter into the model, and set model_name_or_path to the "
    "merged model's folder",
    "<role>.model_args.additional_target": "list every module in lora_target; with an adapter, no module is trained "
    "as a whole",
    "<role>.model_args.moe_aux_loss_coef": "use training_args.router_aux_loss_coef for the loss of the routers",
    "<role>.model_args.model_config_kwargs": "change the model's config.json",
    "<role>.model_args.freeze_module_prefix": "use lora_target to train a part of the model",
}
"""Keys that affect the result of training, so that ignoring them would be wrong: they are faults. With replacements, by
key path.
"""
HOLDS = {
    "ratio_type": "token",
    "whiten_rewards": False,
    "rl_loss_coef": 1,
    "distill_on_prompt": False,
    "teacher_temperature": 1,
    "dirty_data_mask": False,
    "use_token_reward": False,
    "open_feedback_turn": False,
    "exp_mode": "train",
}
"""Values for which ROLL does what roll always does. A key with this value is not a fault."""

READ_AS = {
    "max_ckpt_to_keep": "keep_checkpoints",
    "model_update_buffer_size_mb": "weight_sync.bucket_mib",
    "importance_sampling": "policy_loss",
    "actor_train.pg_variant": "policy_loss",
    "actor_train.topr_positive_weight": "topr_positive_weight",
    "actor_train.topr_negative_weight": "topr_negative_weight",
    "ipo": "preference_loss",
    "chosen_key": "actor_train.data_args.chosen",
    "rejected_key": "actor_train.data_args.rejected",
    "prompt_key": "sft_train.data_args.prompt",
    "response_key": "sft_train.data_args.response",
    "question_key": "student.data_args.prompt",
    "answer_key": "student.data_args.response",
    "student_pretrain": "pretrain",
    "teacher_pretrain": "teacher.model_args.model_name_or_path",
    "kd_objective": "divergence",
    "kd_temperature": "distill_temperature",
    "actor_infer.max_tokens_per_microbatch_in_infer": "actor_infer.max_tokens_per_microbatch",
    "reference.max_tokens_per_microbatch_in_infer": "reference.max_tokens_per_microbatch",
    "<role>.max_tokens_per_microbatch_in_train": "<role>.max_tokens_per_microbatch",
    "<role>.model_args.flash_attn": "<role>.model_args.attn_implementation",
    "<role>.model_args.disable_gradient_checkpointing": "<role>.model_args.gradient_checkpointing",
}
"""ROLL's key path to roll's key path."""

MEANINGS: dict[str, dict[Any, Any]] = {
    "importance_sampling": {"token": None, "seq": "gspo"},
    "actor_train.pg_variant": {"ppo": None, "vanilla": "pg", "topr": "topr", "cispo": "cispo"},
    "ipo": {False: None, True: "ipo"},
    "<role>.model_args.disable_gradient_checkpointing": {True: "none", False: "auto"},
}
"""Translations of values, for key paths in `READ_AS`. None means that roll always does what the value requests. Other
values have no counterpart."""

DIFFERS = {
    (
        "actor_train.pg_variant",
        "topr",
    ): "ROLL separates good responses from bad ones by a reward above 0, and tapers each token's ratio; "
    "roll separates them by the sign of the advantage, and uses the ratio of the whole response",
    ("ipo", True): "ROLL compares sums over the tokens of a response, and roll compares means: choose a new beta",
}
"""Differences between ROLL's behaviour and roll's counterpart, for key paths and values in `MEANINGS`."""
UNREAD = {
    "topr": ("dual_clip_loss", "pg_clip", "pg_clip_low", "pg_clip_high"),
    "vanilla": ("dual_clip_loss", "pg_clip", "pg_clip_low", "pg_clip_high"),
    "cispo": ("dual_clip_loss",),
}
"""Root keys that neither ROLL's loss nor roll's counterpart reads, by value of `actor_train.pg_variant`."""

VALUES: dict[str, dict[Any, Any]] = {
    "resume_from_checkpoint": {True: "auto", False: "never", None: "never"},
    "kl_penalty": {"kl": "k1", "mse": "k2"},
    "track_with": {"stdout": "none", None: "none"},
    "divergence": {"js_divergence": "jsd"},
    "norm_mean_type": {"None": None},  # a text in ROLL's files, not YAML's null
    "norm_std_type": {"None": None},
    "validation.data_args.template": {"qwen3": "native"},
    "<role>.data_args.template": {"qwen3": "native"},
    "<role>.model_args.lora_target": {"all": "all-linear"},
    "<role>.model_args.attn_implementation": {"flash_attention_2": "fa2", "flash_attn": "fa2"},
}
"""Values that ROLL and roll write differently, by key path."""

OWN_WORKERS = {
    f"roll.pipeline.{name}"
    for name in (
        *("base_worker.ActorWorker", "base_worker.InferWorker", "base_worker.CriticWorker"),
        *("rlvr.actor_worker.ActorWorker", "rlvr.actor_pg_worker.ActorPGWorker"),
        *("dpo.actor_worker.ActorWorker", "sft.sft_worker.SFTWorker"),
        *("agentic.agentic_actor_worker.ActorWorker", "agentic.agentic_actor_pg_worker.ActorWorker"),
        *("distill.distill_worker.StudentWorker", "distill.distill_worker.TeacherWorker"),
        *("agentic.environment_worker.EnvironmentWorker",),
    )
}
"""Classes of ROLL's roles that have counterparts in roll. Any other `worker_cls` is the user's, with a loss or a
rollout of its own.
"""
BY_VARIANT = {
    "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
    "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker",
}
"""Classes whose loss `pg_variant` chooses. All others have PPO's."""

REWARD_CLASSES = {
    "MathRuleRewardWorker": "math_rule",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "CrossThinkQARuleRewardWorker": "crossthinkqa",
    "GeneralRuleRewardWorker": "ifeval",
    "CodeSandboxRewardWorker": "code_sandbox",
    "LLMJudgeRewardWorker": "llm_judge",
}
"""Class name at the end of `rewards.*.worker_cls` to the name of the reward function, for classes with a counterpart in
roll.
"""
