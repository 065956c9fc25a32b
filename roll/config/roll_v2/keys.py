"""Keys of ROLL's files that have another name here, or no meaning. What is ignored or read otherwise gives one warning each.

In a place `*` stands for one free name, and `<role>` for every role: `<role>.worker_cls`.
"""

from __future__ import annotations

from typing import Any

ROLES = ("actor_train", "actor_infer", "reference", "critic", "sft_train", "reward_train", "student", "teacher")
ROLE = "<role>"

VARIABLES = (
    *("lora_target", "lora_rank", "lora_alpha", "lora_dropout", "pg_variant", "reward_pretrain"),
    *("custom_env", "env_manager_cls", "max_tokens_per_step", "max_actions_per_traj", "agent_system_template", "agent_template"),
    *("action_pattern", "think_action_pattern", "all_response_pattern", "sokoban_format_penalty", "frozen_format_penalty"),
    *("single_prompt_agent_system_template", "single_prompt_agent_template"),
)
"""Root keys that ROLL's files use as variables of `${...}`. In a file they may stand unused; on the command line that is a fault."""

BEYOND = "no prompts are generated beyond rollout_batch_size; use async_generation_ratio"
DEAD = "ROLL's own code reads it nowhere; remove the key"
TOPR = "ROLL's own code reads it nowhere; policy_loss: topr has topr_positive_weight and topr_negative_weight"
NORM = "use norm_mean_type and norm_std_type"
PACKED = "sequences are always packed; use max_tokens_per_microbatch"
PROFILED = "metrics.jsonl has the times and the memory of each part; remove the key"
PROMPTS = "prompts come from actor_train.data_args"
SAMPLED = "responses are sampled, not searched; use temperature and top_p"
UNPADDED = "sequences are never padded; remove the key"

IGNORED = {
    "logging_dir": "logs go to `logs/` in output_dir",
    "base_dir": "everything goes to output_dir",
    "rollout_dump_dir": "responses go to `samples.jsonl` in output_dir",
    "save_logging_board_dir": "metrics go to `metrics.jsonl` in output_dir",
    "num_nodes": "the number of nodes follows from device_mapping and num_gpus_per_node",
    "local_rank": "roll gives each worker its own; remove the key",
    "checkpoint_config": "checkpoints go to `checkpoints/` in output_dir; see save_steps and keep_checkpoints",
    "logging_steps": "every step is logged; remove the key",
    "track_name": DEAD,
    "rpc_timeout": "use deadlines",
    "model_download_type": "a model is a folder, or a name of Hugging Face's Hub; remove the key",
    "reward_pretrain": "no reward uses it; a judge's or a reward model's is rewards.<domain>.model_args.model_name_or_path",
    "use_pg_clip_range": "pg_clip_low and pg_clip_high apply wherever they are given",
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
    "val_batch_size": "held-out rows are all answered; remove the key",
    "train_batch_size": "use per_device_train_batch_size and gradient_accumulation_steps",
    "max_running_requests": "use actor_infer.strategy_args.strategy_config.max_num_seqs",
    "generate_opt_level": "generation always streams; remove the key",
    "use_additional_prompts": BEYOND,
    "is_use_additional_prompts": BEYOND,
    "max_additional_running_prompts": BEYOND,
    "is_num_return_sequences_expand": "the samples of a prompt always share one request; remove the key",
    "is_offload_states": "roles that share GPUs leave them to others by turns; use time_sharing",
    "enable_reference": "the reference runs whenever a KL term uses it; remove the key",
    "enable_old_logprobs_recompute": "use behaviour_log_probs: trainer recomputes them",
    "force_disable_old_logprobs_recompute": "use behaviour_log_probs: engine keeps those of sampling",
    "report_length_and_rewards": PROFILED,
    "length_profiler_dir": PROFILED,
    "profiler_output_dir": PROFILED,
    "profiler_timeline": PROFILED,
    "profiler_memory": PROFILED,
    "logits_topk": "student and teacher are compared over the whole vocabulary; use distill_top_k for a part of it",
    "logits_transfer_backend": "the teacher sends hidden states, not logits; remove the key",
    "adaptive_kl_alpha": "no divergence reads it; remove the key",
    "skew_lambda": "no divergence reads it; remove the key",
    "rewards.*.response_length_for_code": "use reward_args",
    "rewards.*.format_pattern": "use reward_args",
    "rewards.*.response_filter_config": "responses are not filtered; use max_len_mask",
    "tracker_kwargs.wandb.log_dir": "its files go below output_dir",
    "tracker_kwargs.swanlab.logdir": "its files go below output_dir",
    "validation.eval_steps": "use the root key eval_steps",
    "validation.strategy_args": "actor_infer answers the validation prompts",
    "validation.data_args.dataset_dir": "give the folder in file_name",
    "validation.data_args.interleave_probs": "validation answers every prompt; remove the key",
    "validation.generating_args.num_beams": SAMPLED,
    "validation.generating_args.do_sample": SAMPLED,
    "validation.generating_args.length_penalty": SAMPLED,
    "validation.generating_args.logprobs": "use behaviour_log_probs",
    "actor_infer.data_args": PROMPTS,
    "actor_infer.generating_args.num_beams": SAMPLED,
    "actor_infer.generating_args.do_sample": SAMPLED,
    "actor_infer.generating_args.length_penalty": SAMPLED,
    "actor_infer.generating_args.logprobs": "use behaviour_log_probs",
    "actor_infer.strategy_args.strategy_config.sleep_level": "engines that share GPUs leave them to others by turns; use time_sharing",
    "actor_infer.strategy_args.strategy_config.VLLM_USE_V1": "vLLM has one engine; remove the key",
    "actor_train.max_tokens_per_microbatch_in_infer": "max_tokens_per_microbatch bounds training and log-probs alike",
    "reference.data_args": PROMPTS,
    "reference.generating_args": "the reference generates nothing",
    "reference.training_args": "the reference does not learn",
    "critic.data_args": PROMPTS,
    "critic.generating_args": "the critic generates nothing",
    "critic.max_tokens_per_microbatch_in_infer": "max_tokens_per_microbatch bounds training and values alike",
    "teacher.data_args": "rows come from student.data_args",
    "teacher.training_args": "the teacher does not learn",
    "<role>.worker_cls": "a role's class follows from its strategy; use strategy_args.strategy_name",
    "<role>.num_gpus_per_worker": "use strategy_args.strategy_config.tensor_parallel_size",
    "<role>.max_concurrency": "requests are as many as the engine takes; use max_num_seqs",
    "<role>.logits_in_fp32": "log-probs are always computed in fp32; remove the key",
    "<role>.apply_loss_scale": "a loss is always normalised over the whole update; remove the key",
    "<role>.use_dynamic_batching_in_train": PACKED,
    "<role>.use_dynamic_batching_in_infer": PACKED,
    "<role>.use_sequence_packing": PACKED,
    "<role>.sequence_packing_args": PACKED,
    "<role>.sequence_length_round_in_train": UNPADDED,
    "<role>.sequence_length_round_in_infer": UNPADDED,
    "<role>.use_remove_padding": UNPADDED,
    "<role>.model_update_frequency": "weights are synchronised after every step; use async_generation_ratio",
    "<role>.eval_steps": "use the root key eval_steps",
    "<role>.offload_nccl": "NCCL buffers stay; remove the key",
    "<role>.model_args.model_type": "the model's config.json says its type; remove the key",
    "<role>.model_args.gradient_checkpointing_use_reentrant": "roll chooses how layers are recomputed; remove the key",
    "<role>.model_args.num_labels": "a head has one number; remove the key",
    "<role>.model_args.device_map": "each rank has its own device; remove the key",
    "<role>.training_args.save_hf_model": "a run exports its model at the end; see save_at_end",
    "<role>.data_args.dataset_dir": "give the folder in file_name",
    "<role>.data_args.dataset_type": "a file's suffix determines its format; remove the key",
    "<role>.data_args.interleave_probs": "use domain_interleave_probs",
    "<role>.data_args.cache_path": "rows are read anew by each run; remove the key",
    "<role>.data_args.eval_file_name": "use validation.data_args.file_name",
    "<role>.strategy_args.strategy_config.checkpoint": "checkpoints are verified by roll's own manifest; remove the key",
}
"""Keys that do not affect what the run learns, with replacements, by place."""

LOGIN = "log in before the run (`wandb login`, `swanlab login`), or set the key in its environment, where no file holds it"
ON_POLICY = "on-policy distillation is pipeline: rlvr with a teacher; see docs/post_training.md"
REFUSED = {
    "train_infer_correction": "use mismatch_correction, mismatch_cap, mismatch_low and mismatch_high",
    "whiten_rewards": "use norm_mean_type=batch and norm_std_type=batch",
    "rl_loss_coef": "the policy's term has the weight 1; use kl_loss_coef and entropy_loss_coef for the others",
    "cispo_epsilon_low": "use pg_clip_low",
    "cispo_epsilon_high": "use pg_clip_high",
    "tis_upper_bound": "use mismatch_correction=tis and mismatch_cap",
    "kimi15_tau": "policy_loss has no such term; use use_kl_loss and kl_loss_coef",
    "reward_model": "set rewards.<domain>.reward to reward_model, and model_args and strategy_args beside it",
    "user_defined_rollout_loop_cls": "use dynamic_sampling, or a reward of your own",
    "rollout_mock": "rollouts are not replayed; samples.jsonl records them",
    "val_prompt_length": "use prompt_length",
    "val_sequence_length": "use prompt_length and response_length",
    "is_pure_opd": ON_POLICY,
    "use_opd": ON_POLICY,
    "opd_kl_coef": ON_POLICY,
    "student_train": ON_POLICY,
    "student_infer": ON_POLICY,
    "ratio_type": "use policy_loss: gspo takes the ratio of a whole episode",
    "system_key": "data_args.system is the system message itself; rows with one of their own use messages",
    "query_key": "join it to the prompt's column in the rows",
    "distill_on_prompt": "the student learns the responses alone",
    "teacher_temperature": "distill_temperature is that of both models",
    "tracker_kwargs.*.api_key": LOGIN,
    "tracker_kwargs.*.login_kwargs": LOGIN,
    "<role>.ratio_type": "use policy_loss",
    "<role>.router_replay": "experts are routed anew in training",
    "<role>.model_args.adapter_name_or_path": "merge the adapter into the model, and give that folder as model_name_or_path",
    "<role>.model_args.additional_target": "name every module in lora_target; none is trained whole beside an adapter",
    "<role>.model_args.moe_aux_loss_coef": "training_args.router_aux_loss_coef weighs the routers' loss",
    "<role>.model_args.model_config_kwargs": "change the model's config.json",
    "<role>.model_args.freeze_module_prefix": "use lora_target to train a part of the model",
}
"""Keys that affect what the run learns, so they are faults, with replacements, by place."""
HOLDS = {"ratio_type": "token", "whiten_rewards": False, "rl_loss_coef": 1, "distill_on_prompt": False, "teacher_temperature": 1}
"""Values that request what roll always does. With one of these the key is not a fault."""

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
"""Old place to new."""

MEANINGS: dict[str, dict[Any, Any]] = {
    "importance_sampling": {"token": None, "seq": "gspo"},
    "actor_train.pg_variant": {"ppo": None, "vanilla": "pg", "topr": "topr", "cispo": "cispo"},
    "ipo": {False: None, True: "ipo"},
    "<role>.model_args.disable_gradient_checkpointing": {True: "none", False: "auto"},
}
"""Translations of values, for places in `READ_AS`. None: roll always does that. Other values have no counterpart."""

DIFFERS = {
    ("actor_train.pg_variant", "topr"): "in ROLL a reward above 0 tells good responses from bad ones, whose ratio tapers token by token; "
    "here the advantage's sign does, and the ratio is the whole response's",
    ("ipo", True): "ROLL compares sums over a response's tokens, and here means are compared: choose beta anew",
}
"""Differences of the counterparts here, for places and values in `MEANINGS`."""
UNREAD = {
    "topr": ("dual_clip_loss", "pg_clip", "pg_clip_low", "pg_clip_high"),
    "vanilla": ("dual_clip_loss", "pg_clip", "pg_clip_low", "pg_clip_high"),
    "cispo": ("dual_clip_loss",),
}
"""Root keys that neither ROLL nor its counterpart here reads, by value of `actor_train.pg_variant`."""

VALUES: dict[str, dict[Any, Any]] = {
    "resume_from_checkpoint": {True: "auto", False: "never", None: "never"},
    "kl_penalty": {"kl": "k1", "mse": "k2"},
    "track_with": {"stdout": "none", None: "none"},
    "divergence": {"js_divergence": "jsd"},
    "validation.data_args.template": {"qwen3": "native"},
    "<role>.data_args.template": {"qwen3": "native"},
    "<role>.model_args.lora_target": {"all": "all-linear"},
    "<role>.model_args.attn_implementation": {"flash_attention_2": "fa2", "flash_attn": "fa2"},
}
"""ROLL's values that are written differently here."""

REWARD_CLASSES = {
    "MathRuleRewardWorker": "math_rule",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "CrossThinkQARuleRewardWorker": "crossthinkqa",
    "GeneralRuleRewardWorker": "ifeval",
    "CodeSandboxRewardWorker": "code_sandbox",
    "LLMJudgeRewardWorker": "llm_judge",
}
"""Last part of `rewards.*.worker_cls` to the name of the reward function, for the classes that have a counterpart here."""
