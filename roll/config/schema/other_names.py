"""Names of other programs for roll's keys: TRL, transformers, accelerate, verl, OpenRLHF, DeepSpeed's examples.

These names are refused. The message names the key of roll to use instead, and the form of its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ExperimentConfig

LEARNER = "<learner>"
"""Placeholder for the trained role of the pipeline, for example `actor_train`."""
LEARNERS = ("actor_train", "sft_train", "reward_train", "student")


@dataclass(frozen=True)
class Counterpart:
    """The key of roll that corresponds to a key of another program."""

    key: str | None
    """Path in the schema. None if roll needs no key for it."""
    how: str = ""
    """Form of the value in roll. Without a key: what to do instead, and why no key is needed."""


MODEL, TRAINING, ROWS = f"{LEARNER}.model_args", f"{LEARNER}.training_args", f"{LEARNER}.data_args"
BACKEND, BUDGET, ENGINE = (
    f"{LEARNER}.strategy_args.strategy_config",
    f"{LEARNER}.max_tokens_per_microbatch",
    "actor_infer.strategy_args",
)
DEVICES = f"{LEARNER}.device_mapping"

PRETRAIN = Counterpart("pretrain")
FILES = Counterpart(f"{ROWS}.file_name", "files, folders or Hub names")
HELD_OUT = Counterpart("validation.data_args.file_name")
LENGTHS = Counterpart("prompt_length", "and response_length: their sum is the longest sequence")
RESPONSE = Counterpart("response_length")
ACCUMULATED = Counterpart(
    f"{TRAINING}.gradient_accumulation_steps", "sequences of an update = per_device_train_batch_size x this x ranks"
)
SAMPLES = Counterpart("num_return_sequences_in_group")
EPOCHS = Counterpart(f"{TRAINING}.num_train_epochs", "max_steps also ends the run; rlvr reads only max_steps")
STEPS = Counterpart("max_steps")
RATE = Counterpart(f"{TRAINING}.learning_rate")
CRITIC_RATE = Counterpart("critic.training_args.learning_rate")
SCHEDULE = Counterpart(f"{TRAINING}.lr_scheduler_type")
NORM = Counterpart("max_grad_norm")
DTYPE = Counterpart(
    f"{MODEL}.dtype", "bfloat16 is bf16, float16 is fp16, float32 and no are fp32; set it for every role"
)
RECOMPUTED = Counterpart(
    f"{MODEL}.gradient_checkpointing",
    "true is all, false is none; auto, the default, recomputes as many layers as memory requires",
)
FLASH = Counterpart(
    f"{MODEL}.attn_implementation",
    "auto, the default, is torch's FlashAttention; fa2 is that of the package flash-attn",
)
RANK = Counterpart(f"{MODEL}.lora_rank")
TARGET = Counterpart(
    f"{MODEL}.lora_target", "all-linear, or comma-separated names of modules; only the adapter is then trained"
)
QUANTISED = Counterpart(
    BACKEND, "roll does not quantise weights; ${deepspeed_zero3_offload_all} keeps them in host memory"
)
PRESET = Counterpart(
    BACKEND, "${deepspeed_zero3}, with `- ../config/deepspeed_zero3@_here_` in `defaults`; set it for each role"
)
OFFLOADED = Counterpart(
    f"{BACKEND}.zero_optimization", "offload_optimizer: {device: cpu}, or the preset ${deepspeed_zero3_cpuoffload}"
)
TRACKERS = Counterpart("track_with", "one name, or a list: tensorboard, wandb, swanlab, mlflow, trackio, none")
RUN_NAME = Counterpart("exp_name")
OUTPUT = Counterpart("output_dir")
TRACKER_KEYS = Counterpart("tracker_kwargs", "by tracker: {wandb: {project: NAME, entity: NAME}}")
SAVED = Counterpart("save_steps", "a number of steps; 0 saves only at the end")
KEPT = Counterpart("keep_checkpoints")
RESUMED = Counterpart("resume_from_checkpoint", "auto, never, or the folder of a checkpoint")
VALIDATED = Counterpart("eval_steps", "a number of steps; 0 never validates")
GPUS = Counterpart(
    DEVICES,
    "the GPUs of the role, for example list(range(0,8)); set it for each role: a role without it runs on the CPU",
)
NODES = Counterpart(
    DEVICES, "it counts over all nodes, num_gpus_per_node on each; docs/clusters.md describes how to connect the nodes"
)
JOINED = Counterpart(None, "remove it: Ray connects the nodes; docs/clusters.md describes how")
IN_TURNS = Counterpart("time_sharing", "roles with the same GPUs in device_mapping take turns on them")
VLLM = Counterpart(f"{ENGINE}.strategy_name", "vllm")
MEMORY = Counterpart(f"{ENGINE}.strategy_config.gpu_memory_utilization")
TENSORS = Counterpart(f"{ENGINE}.strategy_config.tensor_parallel_size")
CLIP = Counterpart("pg_clip")
CLIP_LOW, CLIP_HIGH = Counterpart("pg_clip_low"), Counterpart("pg_clip_high")
KL_LOSS = Counterpart("kl_loss_coef", "with use_kl_loss: true")
ENTROPY = Counterpart("entropy_loss_coef")
TRUNCATED = Counterpart("max_len_mask")
REWARDS = Counterpart("rewards", "{DOMAIN: {reward: package.module:function}}")
REPLACED = Counterpart("dynamic_sampling", "a block: {max_num_gen_batches: 3}")
PASSES = Counterpart("ppo_epochs")
PACKED = Counterpart(None, f"remove it: sequences are always packed and never padded; {BUDGET} is the budget")
LOGGED = Counterpart(None, "remove it: every step is logged")
ALWAYS = Counterpart(None, "remove it: roll always does this")
LOADED = Counterpart(None, "remove it: rows are tokenised once, before the run")
UNCUT = Counterpart("response_length", "and prompt_length: longer rows are dropped and counted, not truncated")
UNDROPPED = Counterpart(
    f"{MODEL}.lora_dropout",
    "with lora_target; without LoRA there is no dropout, so that log-probs do not change between passes",
)
END_TOKEN = Counterpart(
    None,
    "copy the model, set eos_token in its tokenizer_config.json and eos_token_id in its generation_config.json; set "
    "pretrain to the copy",
)
SEQUENCES = Counterpart(f"{BACKEND}.sequence_parallel_size")
LEARNT = Counterpart("loss_on", "response, assistant or all")
EPOCH_NAMES = ("num_train_epochs", "num_epochs", "total_epochs", "max_epochs", "epochs")

OTHER_NAMES: Mapping[str, Counterpart] = {
    # the model
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path", "base_model", "model_id",
    "actor_model_name_or_path"), PRETRAIN),
    **dict.fromkeys(("critic_model_name_or_path", "critic_pretrain"),
    Counterpart("critic.model_args.model_name_or_path")),
    **dict.fromkeys(("ref_model", "ref_pretrain", "ref_model_name_or_path"),
    Counterpart("reference.model_args.model_name_or_path")),
    "bf16": Counterpart(f"{MODEL}.dtype", "true is bf16, the default; false is fp32"),
    "fp16": Counterpart(f"{MODEL}.dtype", "true is fp16; for false, remove it"),
    **dict.fromkeys(("torch_dtype", "precision", "mixed_precision", "param_dtype", "model_dtype"), DTYPE),
    **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing", "use_gradient_checkpointing"),
    RECOMPUTED),
    **dict.fromkeys(("actor_gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing"),
    RECOMPUTED),
    **dict.fromkeys(("use_flash_attn", "use_flash_attention_2", "use_flash_attention"), FLASH),
    **dict.fromkeys(("use_liger_kernel", "use_liger"), Counterpart(f"{MODEL}.liger")),
    **dict.fromkeys(("torch_compile", "use_torch_compile"), Counterpart(f"{MODEL}.compile_layers")),
    **dict.fromkeys(("lora_r", "lora_dim", "peft_lora_r"), RANK),
    **dict.fromkeys(("use_peft", "use_lora", "lora_target_modules", "lora_module_name", "target_modules",
    "only_optimize_lora"), TARGET),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), QUANTISED),
    # rows
    **dict.fromkeys(("dataset_name", "dataset_path", "dataset", "data_path", "train_file", "train_files",
    "prompt_data"), FILES),
    **dict.fromkeys(
        ("dataset_config", "dataset_config_name"),
        Counterpart(f"{ROWS}.file_name", "the folder that load_dataset(NAME, CONFIG).save_to_disk(FOLDER) writes"),
    ),
    **dict.fromkeys(("eval_dataset", "eval_file", "validation_file", "val_files", "eval_data"), HELD_OUT),
    **dict.fromkeys(("dataset_split", "dataset_train_split"), Counterpart(f"{ROWS}.split")),
    "dataset_text_field": Counterpart(f"{ROWS}.text"),
    "input_key": Counterpart(f"{ROWS}.prompt", "or messages, if the column has lists of messages"),
    "output_key": Counterpart(f"{ROWS}.response"),
    **dict.fromkeys(("apply_chat_template", "input_template", "chat_template"), Counterpart(f"{ROWS}.template")),
    **dict.fromkeys(("dataset_num_proc", "num_proc"), Counterpart(f"{ROWS}.preprocessing_num_workers")),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_length", "max_len"), LENGTHS),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len", "max_prompt_seq_len"), Counterpart("prompt_length")),
    **dict.fromkeys(("max_completion_length", "max_response_length", "generate_max_len", "max_answer_seq_len"),
    RESPONSE),
    **dict.fromkeys(("packing", "padding_free", "group_by_length", "use_dynamic_bsz", "packing_samples"), PACKED),
    **dict.fromkeys(("truncation", "truncation_side", "truncation_mode"), UNCUT),
    **dict.fromkeys(("eot_token", "add_eot_token", "eos_token", "end_of_conversation_token", "end_token"), END_TOKEN),
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "actor_dropout", "critic_dropout",
    "disable_dropout"), UNDROPPED),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_drop_last", "dataloader_pin_memory",
    "remove_unused_columns"), LOADED),
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss", "train_on_prompt", "train_on_inputs"), LEARNT),
    # the batch and the optimizer
    "micro_train_batch_size": Counterpart(f"{TRAINING}.per_device_train_batch_size"),
    "ppo_mini_batch_size": ACCUMULATED,
    **dict.fromkeys(("per_device_eval_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"),
    Counterpart(BUDGET)),
    "micro_rollout_batch_size": Counterpart("max_running_samples"),
    **dict.fromkeys(("num_generations", "n_samples_per_prompt"), SAMPLES),
    **dict.fromkeys(("num_iterations", "num_ppo_epochs", "mu"), PASSES),
    **dict.fromkeys(EPOCH_NAMES, EPOCHS),
    **dict.fromkeys(("total_training_steps", "max_train_steps"), STEPS),
    **dict.fromkeys(("lr", "actor_learning_rate"), RATE),
    **dict.fromkeys(("critic_learning_rate", "critic_lr"), CRITIC_RATE),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_name"), SCHEDULE),
    **dict.fromkeys(("num_warmup_steps", "lr_warmup_steps"), Counterpart(f"{TRAINING}.warmup_steps")),
    **dict.fromkeys(("lr_warmup_ratio", "lr_warmup_steps_ratio"), Counterpart(f"{TRAINING}.warmup_ratio")),
    "optim": Counterpart(f"{TRAINING}.optimizer", "adamw_torch is adamw, adamw_bnb_8bit is adamw_8bit"),
    **dict.fromkeys(("adam_betas", "betas"), Counterpart(f"{TRAINING}.adam_beta1", "and adam_beta2, one number each")),
    "adam_eps": Counterpart(f"{TRAINING}.adam_epsilon"),
    **dict.fromkeys(("max_norm", "grad_clip", "clip_grad"), NORM),
    **dict.fromkeys(("full_determinism", "enable_full_determinism"), Counterpart("deterministic")),
    "data_seed": Counterpart("seed"),
    "label_smoothing_factor": Counterpart("label_smoothing"),
    # DeepSpeed and devices
    **dict.fromkeys(("deepspeed", "deepspeed_config", "deepspeed_config_file", "ds_config", "fsdp", "fsdp_config"),
    PRESET),
    "zero_stage": Counterpart(f"{BACKEND}.zero_optimization", "stage: 2, or the preset ${deepspeed_zero2}"),
    **dict.fromkeys(("offload", "adam_offload", "cpu_offload"), OFFLOADED),
    **dict.fromkeys(("num_gpus", "num_processes", "nproc_per_node", "gpu_ids", "vllm_num_engines"), GPUS),
    **dict.fromkeys(("actor_num_gpus_per_node", "ref_num_gpus_per_node", "actor_num_nodes", "ref_num_nodes"), GPUS),
    **dict.fromkeys(("nnodes", "num_machines", "num_nodes"), NODES),
    **dict.fromkeys(("machine_rank", "node_rank", "main_process_ip", "main_process_port", "master_addr", "master_port"),
    JOINED),
    **dict.fromkeys(("hostfile", "no_ssh", "launcher", "include", "exclude"), JOINED),
    "n_gpus_per_node": Counterpart("num_gpus_per_node"),
    **dict.fromkeys(("colocate_all_models", "colocate_all", "vllm_enable_sleep", "vllm_mode", "free_cache_engine"),
    IN_TURNS),
    **dict.fromkeys(("ring_attn_size", "ulysses_sequence_parallel_size", "sp_size", "context_parallel_size"),
    SEQUENCES),
    # the engine
    "use_vllm": VLLM,
    "vllm_gpu_memory_utilization": MEMORY,
    **dict.fromkeys(("vllm_tensor_parallel_size", "tensor_model_parallel_size"), TENSORS),
    "vllm_max_model_len": Counterpart(f"{ENGINE}.strategy_config.max_model_len"),
    "stop": Counterpart("actor_infer.generating_args.stop_strings"),
    # the algorithm
    **dict.fromkeys(("advantage_estimator", "algorithm"), Counterpart("adv_estimator",
    "grpo, reinforce, gae, rloo, " "...")),
    "loss_type": Counterpart("policy_loss",
    "loss_agg_mode sets the reduction over tokens; in dpo, use preference_loss"),
    **dict.fromkeys(("epsilon", "cliprange", "clip_ratio", "eps_clip"), CLIP),
    **dict.fromkeys(("epsilon_low", "clip_ratio_low", "eps_clip_low"), CLIP_LOW),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high", "eps_clip_high"), CLIP_HIGH),
    "clip_ratio_c": Counterpart("dual_clip_loss"),
    **dict.fromkeys(("cliprange_value", "value_clip_range"), Counterpart("value_clip")),
    **dict.fromkeys(("kl_coef", "kl_coeff"), KL_LOSS),
    "use_kl_in_reward": Counterpart("add_token_level_kl", "init_kl_coef is its weight"),
    **dict.fromkeys(("entropy_coeff", "ent_coef", "entropy_coef"), ENTROPY),
    **dict.fromkeys(("lam", "gae_lambda"), Counterpart("lambd")),
    "scale_rewards": Counterpart("norm_std_type",
    "true and group are group, batch is batch; for false and none, remove it"),
    "mask_truncated_completions": TRUNCATED,
    **dict.fromkeys(("reward_funcs", "reward_fn", "custom_reward_function", "remote_rm_url"), REWARDS),
    **dict.fromkeys(("filter_groups", "dynamic_filtering"), REPLACED),
    # the run
    **dict.fromkeys(("report_to", "logger", "use_wandb", "use_tensorboard"), TRACKERS),
    **dict.fromkeys(("run_name", "experiment_name", "wandb_run_name"), RUN_NAME),
    **dict.fromkeys(("project_name", "wandb_project", "wandb_org", "wandb_group", "trackio_space_id"), TRACKER_KEYS),
    **dict.fromkeys(("save_path", "ckpt_path", "default_local_dir", "tensorboard_path"), OUTPUT),
    **dict.fromkeys(("save_strategy", "save_freq", "save_interval"), SAVED),
    **dict.fromkeys(("save_total_limit", "max_ckpt_num", "max_actor_ckpt_to_keep"), KEPT),
    **dict.fromkeys(("resume_mode", "load_checkpoint", "overwrite_output_dir"), RESUMED),
    **dict.fromkeys(("evaluation_strategy", "eval_strategy", "test_freq"), VALIDATED),
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "print_loss", "disable_tqdm", "log_level",
        "log_dir"), LOGGED
    ),
    **dict.fromkeys(("do_train", "save_safetensors", "save_hf_ckpt", "save_hf_format"), ALWAYS),
    "push_to_hub": Counterpart(None, "remove it; after the run, use: hf upload NAME output_dir/export"),
    "load_best_model_at_end": Counterpart("keep_checkpoints",
    "`python -m roll.export` exports the checkpoint that you choose"),
}  # fmt: skip
"""Counterparts in roll, by the name in the other program."""

OTHER_NAMES_IN_RLVR: Mapping[str, Counterpart] = {
    "beta": Counterpart(
        "kl_loss_coef", "it is the weight of the KL, with use_kl_loss: true; beta is a key of pipeline: dpo"
    ),
    **dict.fromkeys(
        EPOCH_NAMES, Counterpart("max_steps", "one pass over the rows takes about rows / rollout_batch_size steps")
    ),
}
"""Counterparts in `pipeline: rlvr` that differ from those in the other pipelines, or that exist only there."""

PROGRAMS: Mapping[str, str] = {
    "actor_rollout_ref": "verl",
    "algorithm": "verl",
    "trainer": "verl",
    "data": "verl",
    "custom_reward_function": "verl",
    "compute_environment": "accelerate",
    "distributed_type": "accelerate",
    "deepspeed_config": "accelerate",
}
"""Root keys of other programs' configuration files, each with the name of its program."""
MOST_NAMED = 12
"""Largest number of keys of a block that one message translates."""


def counterpart_of(name: str, root: type[BaseModel]) -> str | None:
    """Return the remedy for another program's name: the key to use instead. Return None for an unknown name.

    Args:
        name: The name in the other program.
        root: The schema of the pipeline, or `ExperimentConfig` if the pipeline is unknown.
    """
    found = OTHER_NAMES_IN_RLVR.get(name) if root is RlvrConfig else None
    found = found or OTHER_NAMES.get(name)
    if found is None:
        return None
    learner = next((role for role in LEARNERS if role in root.model_fields), "ROLE")
    how = found.how.replace(LEARNER, learner)
    if found.key is None:
        return how
    key = found.key.replace(LEARNER, learner)
    first = key.partition(".")[0]
    if first == "ROLE":
        key += f" (ROLE is {', '.join(LEARNERS)})"
    elif root is not ExperimentConfig and first not in root.model_fields:
        key += ", a key of another pipeline"
    return f"use {key}" + (f"; {how}" if how else "")


def counterparts_of_block(name: str, block: Any, root: type[BaseModel]) -> str | None:
    """Return the remedy for a block of another program's file, key by key. Return None if none of its keys is known."""
    if not isinstance(block, Mapping):
        return None
    known = [f"{path}: {text}" for path, leaf in _leaves(block) if (text := counterpart_of(leaf, root))]
    if not known:
        return None
    more = f"; and {len(known) - MOST_NAMED} more" if len(known) > MOST_NAMED else ""
    of = f"this is a block of {PROGRAMS[name]}; " if name in PROGRAMS else ""
    return f"{of}use these keys: " + "; ".join(known[:MOST_NAMED]) + more


def _leaves(block: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in block.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, str(key)
