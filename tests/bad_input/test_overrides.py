"""One wrong key or value on the command line: exit status 2, and a message with place, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from roll.config.shipped import known_rewards
from roll.pipeline import main

TRAIN = "actor_train.training_args"
ENGINE = "actor_infer.strategy_args.strategy_config"
ZERO = "deepspeed_zero3.zero_optimization"
REFERENCE = "reference.strategy_args.strategy_name"
SAMPLING = "actor_infer.generating_args"
BY_UPDATES = ("actor_train.training_args.gradient_accumulation_steps=null",)
ONE = (
    "num_return_sequences_in_group=1",
    "actor_train.training_args.per_device_train_batch_size=4",
    "adv_estimator=reinforce",
)
IN_REWARD = ("add_token_level_kl=true", "init_kl_coef=0.1", "actor_train.model_args.lora_target=all-linear")
MODEL = "actor_train.model_args"
GPUS = ("actor_train.device_mapping=[0,1]", "rollout_batch_size=8")

KEYS = [
    (["max_step=3"], "max_step", "3", "did you mean 'max_steps'"),
    (["learn=0.1"], "learn", "0.1", "docs/configuration.md lists the keys of the root"),
    (["actor_train.rank=1"], "actor_train.rank", "1", "known keys of actor_train: data_args, device_mapping"),
    (
        ["beta=0.1"],
        "beta",
        "0.1",
        "use kl_loss_coef; it is the weight of the KL, with use_kl_loss: true; beta is a key of pipeline: dpo",
    ),
    (
        ["num_train_epochs=2"],
        "num_train_epochs",
        "2",
        "use max_steps; one pass over the rows takes about rows / rollout_batch_size",
    ),
    ([f"{TRAIN}.learning_rte=0.1"], f"{TRAIN}.learning_rte", "0.1", "did you mean 'learning_rate'"),
    (
        ["actor_train.learning_rate=0.1"],
        "actor_train.learning_rate",
        "0.1",
        "belongs to actor_train.training_args.learning_rate",
    ),
    (["learning_rate=0.1"], "learning_rate", "0.1", "belongs to actor_train.training_args.learning_rate"),
    (["actor_trian.world_size=2"], "actor_trian", "world_size", "did you mean 'actor_train'"),
    (["actor_train.model_args.dtpe=fp32"], "actor_train.model_args.dtpe", "fp32", "did you mean 'dtype'"),
    ([f"{ENGINE}.max_num_seq=4"], f"{ENGINE}.max_num_seq", "4", "did you mean 'max_num_seqs'"),
    ([f"{ENGINE}.swap_space=4"], f"{ENGINE}.swap_space", "4", "engine_args"),
    (
        ["deepspeed_zero3.zero_optimisation.stage=2"],
        "strategy_config.zero_optimisation",
        "stage",
        "did you mean 'zero_optimization'",
    ),
    ([f"{ZERO}.overlap_com=true"], "zero_optimization.overlap_com", "true", "did you mean 'overlap_comm'"),
    (["rewards.math_rule.time_out=3"], "rewards.math_rule.time_out", "3", "did you mean 'timeout'"),
    (["validation.data_args.file_names=x"], "validation.data_args.file_names", "x", "did you mean 'file_name'"),
    (["deadlines.rolout=3"], "deadlines.rolout", "3", "did you mean 'rollout'"),
    (["weight_sync.buckets=3"], "weight_sync.buckets", "3", "bucket_mib"),
    (["lora_rank=8"], "lora_rank", "8", "belongs to actor_train.model_args.lora_rank"),
]
VALUES = [
    (["max_steps=abc"], "max_steps", '"abc"', "a whole number"),
    (["max_steps='3'"], "max_steps", '"3"', "without quotes"),
    ([f"{TRAIN}.learning_rate='1e-5'"], f"{TRAIN}.learning_rate", '"1e-5"', "a number, without quotes"),
    ([f"{ZERO}.stage='3'"], "zero_optimization.stage", '"3"', "0, 1, 2 or 3, without quotes"),
    (["max_steps=0"], "max_steps", "0", "a number above 0"),
    (["max_steps=1.5"], "max_steps", "1.5", "a whole number"),
    (["max_steps=null"], "max_steps", "null", "a whole number"),
    (["max_steps=???"], "max_steps", "???", "max_steps=..."),
    (["seed=-1"], "seed", "-1", "a number at least 0"),
    ([f"{TRAIN}.learning_rate=fast"], f"{TRAIN}.learning_rate", '"fast"', "a number"),
    ([f"{TRAIN}.learning_rate=inf"], f"{TRAIN}.learning_rate", "Infinity", "a finite number"),
    ([f"{TRAIN}.adam_beta1=1.5"], f"{TRAIN}.adam_beta1", "1.5", "a number below 1"),
    (["actor_train.model_args.dtype=bf61"], "actor_train.model_args.dtype", '"bf61"', "did you mean 'bf16'"),
    (["actor_train=3"], "actor_train", "3", "a block of keys"),
    (["actor_train.data_args.file_name=[1]"], "actor_train.data_args.file_name[0]", "1", "a string"),
    (["actor_train.data_args.template=qwen9"], "actor_train.data_args.template", '"qwen9"', "'native'"),
    (["adv_estimator=grppo"], "adv_estimator", '"grppo"', "'grpo'"),
    (["loss_agg_mode=mean"], "loss_agg_mode", '"mean"', "'token-mean'"),
    (["kl_penalty=full"], "kl_penalty", '"full"', "'k1'"),
    (["overlong_buffer.lenght=4"], "overlong_buffer.lenght", "4", "did you mean 'len'"),
    (["exp_name='a b'"], "exp_name", '"a b"', "a string of the form"),
    (["use_kl_loss=maybe"], "use_kl_loss", '"maybe"', "true or false"),
    (["pipeline=rlhf"], "pipeline", '"rlhf"', "use one of: rlvr"),
    (["~rewards"], "rewards", "missing", "add the reward of each domain"),
    (
        ["+tracker_kwargs.tensorboard.flush_sec=9"],
        "tracker_kwargs.tensorboard.flush_sec",
        "flush_sec",
        "did you mean 'flush_secs'",
    ),
    (["track_with=[tensorbord]"], "track_with", "tensorbord", "did you mean 'tensorboard'"),
    ([f"{ENGINE}.gpu_memory_utilization=60"], f"{ENGINE}.gpu_memory_utilization", "60", "at most 1"),
    (["dual_clip_loss=0.5"], "dual_clip_loss", "0.5", "above 1"),
    (["pretrain=${nope}"], "pretrain", "nope", "define that key"),
    (
        ["actor_train.strategy_args.strategy_config=${deepspeed_zero2}"],
        "actor_train.strategy_args.strategy_config",
        "deepspeed_zero2",
        "`defaults`: ../config/deepspeed_zero2@_here_",
    ),
]
STRATEGIES = [
    (
        ["actor_train.strategy_args.strategy_name=megatron_train"],
        "actor_train.strategy_args.strategy_name",
        "megatron_train",
        "'deepspeed_train'",
    ),
    (
        ["~actor_train.strategy_args.strategy_name"],
        "actor_train.strategy_args.strategy_name",
        "missing",
        "Train with DeepSpeed",
    ),
    (
        ["actor_train.strategy_args.strategy_name=vllm"],
        "actor_train.strategy_args.strategy_name",
        '"vllm"',
        "'deepspeed_train'",
    ),
    (
        ["actor_infer.strategy_args.strategy_name=sglang"],
        "actor_infer.strategy_args.strategy_name",
        "sglang",
        "'vllm', 'hf_infer'",
    ),
    (
        ["actor_train.strategy_args.strategy_config=config/ds_z3.json"],
        "actor_train.strategy_args.strategy_config",
        "config/ds_z3.json",
        "in the folder of the experiment, and add `- ds_z3@actor_train.strategy_args.strategy_config` to `defaults`",
    ),
    (
        ["actor_train.strategy_args.strategy_config=deepspeed_zero2"],
        "actor_train.strategy_args.strategy_config",
        "deepspeed_zero2",
        "${deepspeed_zero2}",
    ),
    (
        ["~actor_infer.strategy_args.strategy_name"],
        "actor_infer.strategy_args.strategy_name",
        "missing",
        "'vllm', 'hf_infer'",
    ),
    ([f"{REFERENCE}=vllm"], REFERENCE, "vllm", "'hf_infer', 'deepspeed_infer'"),
    (
        [f"{REFERENCE}=deepspeed_infer", "++reference.strategy_args.strategy_config={zero_optimization:{stage:2}}"],
        "reference.strategy_args.strategy_config.zero_optimization.stage",
        "stage 2",
        "stage 3",
    ),
    (
        ["actor_infer.strategy_args={strategy_name: hf_infer}"],
        "actor_infer.strategy_args.strategy_config",
        "settings of vllm (max_num_seqs), but strategy_name is hf_infer",
        "~actor_infer.strategy_args.strategy_config",
    ),
    (
        [
            "++reference.strategy_args={strategy_name: hf_infer, strategy_config: {zero_optimization: {stage: "
            "3}, "
            "steps_per_print: 9}}"
        ],
        "reference.strategy_args.strategy_config",
        "settings of deepspeed_infer (zero_optimization, steps_per_print), but strategy_name is hf_infer",
        "~reference.strategy_args.strategy_config",
    ),
]
DEVICES = [
    (["actor_train.device_mapping=foo"], "actor_train.device_mapping", "foo", "list(range(0,16))"),
    (
        ["actor_train.device_mapping='__import__(\"os\")'"],
        "actor_train.device_mapping",
        "__import__",
        "list(range(0,16))",
    ),
    (["actor_train.device_mapping=[-1]"], "actor_train.device_mapping[0]", "-1", "at least 0"),
    (
        ["actor_train.device_mapping=[]", "actor_infer.device_mapping=[0]"],
        "actor_train.device_mapping",
        "[]",
        "name devices",
    ),
    ([*GPUS, "actor_infer.device_mapping=[2,2]"], "actor_infer.device_mapping", "devices 2", "once"),
    (
        [*GPUS, "actor_infer.device_mapping=[2,3,4]", f"{ENGINE}.tensor_parallel_size=2"],
        "actor_infer.device_mapping",
        "3 devices",
        "multiple of 2",
    ),
    (
        [*GPUS, "actor_infer.device_mapping=[7,8]", f"{ENGINE}.tensor_parallel_size=2"],
        "actor_infer.device_mapping",
        "nodes 0, 1",
        "one node",
    ),
    (
        [*GPUS, "actor_infer.device_mapping=[2]", "actor_infer.world_size=3"],
        "actor_infer.world_size",
        "3",
        "remove world_size",
    ),
    ([*GPUS], "actor_infer.device_mapping", "missing", "to both"),
    (
        [*GPUS, "actor_infer.device_mapping=[1,2]", f"{ENGINE}.tensor_parallel_size=2", "weight_sync.lora=merged"],
        "actor_infer.device_mapping",
        "shares 1 with actor_train, but not the others",
        "only devices of actor_train, or none of them",
    ),
    (
        [*GPUS, "actor_infer.device_mapping=[2]", "actor_train.model_args.lora_target=all-linear"],
        "weight_sync.lora",
        "not fp32",
        "`merged`",
    ),
    ([f"{ENGINE}.tensor_parallel_size=2"], f"{ENGINE}.tensor_parallel_size", "2", "device_mapping"),
    (["actor_infer.world_size=100000"], "actor_infer.world_size", "100000", "at most 1024"),
    (
        ["actor_train.device_mapping=[5000]", "actor_infer.device_mapping=[0]"],
        "actor_train.device_mapping",
        "5000",
        "1023",
    ),
]
TRAINER = "behaviour_log_probs=trainer"
ON_POLICY = "behaviour_log_probs=on_policy"
LOSSES = [
    ([ON_POLICY, "ppo_epochs=2"], "behaviour_log_probs", "2 updates", "one update per step"),
    ([ON_POLICY, "policy_loss=kl_cov"], "behaviour_log_probs", "kl_cov", "engine or trainer"),
    (
        [ON_POLICY, "add_token_level_kl=true", "init_kl_coef=0.1"],
        "behaviour_log_probs",
        "add_token_level_kl",
        "use_kl_loss",
    ),
    ([f"{SAMPLING}.top_k=50", "behaviour_log_probs=engine"], f"{SAMPLING}.top_k", "top_k 50", TRAINER),
    (
        [f"{SAMPLING}.repetition_penalty=1.1", "behaviour_log_probs=engine"],
        f"{SAMPLING}.repetition_penalty",
        "1.1",
        "repetition_penalty=1",
    ),
    ([f"{SAMPLING}.top_p=0.9", "mismatch_correction=tis"], f"{SAMPLING}.top_p", "mismatch_correction tis", "top_p=1"),
    (["mismatch_correction=tis"], "mismatch_correction", "behaviour_log_probs is engine", TRAINER),
    ([TRAINER, "mismatch_correction=tis", "policy_loss=gspo"], "mismatch_correction", "token by token", "seq_tis"),
    (
        [TRAINER, "mismatch_correction=icepop", "policy_loss=topr"],
        "mismatch_correction",
        "whole sequences",
        "policy_loss=ppo",
    ),
    ([TRAINER, "mismatch_correction=tis", "mismatch_low=0.5"], "mismatch_low", "0.5", "icepop"),
    (
        [TRAINER, "mismatch_correction=icepop", "mismatch_low=6"],
        "mismatch_low",
        "6 is not below the upper bound 5",
        "smaller",
    ),
    (["mismatch_cap=2"], "mismatch_cap", "mismatch_correction none", "tis"),
    (["mismatch_correction=seq_tsi"], "mismatch_correction", '"seq_tsi"', "did you mean 'seq_tis'"),
    (["policy_loss=gsop"], "policy_loss", '"gsop"', "did you mean 'gspo'"),
    (["policy_loss=gspo", "dual_clip_loss=true"], "dual_clip_loss", "gspo", "policy_loss=ppo"),
    (["policy_loss=pg", "pg_clip_high=0.3"], "pg_clip_high", "0.3", "policy_loss=ppo or gspo"),
    (["policy_loss=pg", "pg_clip=0.3"], "pg_clip", "0.3, but policy_loss pg", "policy_loss=ppo or gspo"),
    (
        ["policy_loss=topr", "topr_positive_weight=0", "topr_negative_weight=0"],
        "topr_positive_weight",
        "the loss would be 0",
        "weights",
    ),
    (
        [ON_POLICY, "pg_clip_high=0.3"],
        "pg_clip_high",
        "0.3, but with behaviour_log_probs on_policy every ratio is 1",
        "engine",
    ),
    ([ON_POLICY, "dual_clip_loss=true"], "dual_clip_loss", "true, but with behaviour_log_probs on_policy", "remove it"),
    (["policy_loss=pg", TRAINER], "behaviour_log_probs", "pg uses no ratio", "on_policy"),
    (
        ["policy_loss=gmpo", "adv_estimator=reinforce", "gamma=0.9"],
        "policy_loss",
        "gamma 0.9 gives the tokens",
        "ppo, pg, gspo, cispo",
    ),
    (
        ["policy_loss=gmpo", "adv_estimator=step_reinforce"],
        "policy_loss",
        "step_reinforce gives the tokens",
        "use one of",
    ),
    (
        ["policy_loss=gmpo", *IN_REWARD],
        "policy_loss",
        "add_token_level_kl gives each token its own penalty",
        "use one of",
    ),
    (["clip_cov_ratio=0.1"], "clip_cov_ratio", "0.1", "policy_loss=clip_cov"),
    (["policy_loss=clip_cov", "clip_cov_low=9"], "clip_cov_low", "9", "1 and 5"),
    (["kl_cov_coef=2"], "kl_cov_coef", "2", "policy_loss=kl_cov"),
    (["topr_negative_weight=2"], "topr_negative_weight", "2", "policy_loss=topr"),
    (
        [ON_POLICY, "off_policy_mask_threshold=0.5"],
        "off_policy_mask_threshold",
        "0.5, but behaviour_log_probs is on_policy",
        "engine",
    ),
    (["dppo_threshold=0.1"], "dppo_threshold", "0.1", "policy_loss=dppo"),
    ([ON_POLICY, "policy_loss=dppo", "dppo_threshold=0.1"], "dppo_threshold", "every ratio is 1", "engine"),
    (["sapo_negative_temperature=2"], "sapo_negative_temperature", "2", "policy_loss=sapo"),
]
TEACHER = "+teacher={model_args: {model_name_or_path: model}, strategy_args: {strategy_name: hf_infer}}"
CONTRADICTIONS = [
    (["+divergence=jsd"], "divergence", "jsd, but there is no teacher", "add a teacher block"),
    (["+distill_loss_coef=0.5"], "distill_loss_coef", "0.5, but there is no teacher", "remove it"),
    ([TEACHER, "+distill_loss_coef=0"], "distill_loss_coef", "0", "above 0"),
    ([TEACHER, "+jsd_beta=0.3"], "jsd_beta", "divergence reverse_kl does not read it", "divergence=jsd"),
    (
        [TEACHER, "+teacher.model_args.lora_target=all-linear"],
        "teacher.model_args.lora_target",
        "without an adapter",
        "remove it",
    ),
    (["adv_estimator=pass_at_k", "pass_k=9"], "pass_k", "9, but num_return_sequences_in_group is", "at most"),
    (["adv_estimator=pass_at_k", "pass_k=1"], "pass_k", "1", "2"),
    (["pass_k=3"], "pass_k", "3", "adv_estimator=pass_at_k"),
    (["rollout_batch_size=5"], f"{TRAIN}.gradient_accumulation_steps", "10 sequences", "multiple of 8"),
    (
        ["num_return_sequences_in_group=1", f"{TRAIN}.per_device_train_batch_size=4"],
        "num_return_sequences_in_group",
        "1",
        "at least 2",
    ),
    *(
        (
            ["num_return_sequences_in_group=1", f"{TRAIN}.per_device_train_batch_size=4", f"adv_estimator={estimator}"],
            "num_return_sequences_in_group",
            f"1, but adv_estimator {estimator} compares",
            "reinforce, reinforce_plus_plus, remax, gae, step_reinforce",
        )
        for estimator in ("dr_grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")
    ),
    ([*ONE, "+dynamic_sampling={}"], "dynamic_sampling", "num_return_sequences_in_group is 1", "at least 2"),
    (
        ["dynamic_sampling.max_num_gen_batches=1"],
        "dynamic_sampling.max_num_gen_batches",
        "1: no further batch",
        "at least 2",
    ),
    (
        ["max_len_mask=true", "actor_infer.generating_args.ignore_eos=true"],
        "max_len_mask",
        "every response is truncated",
        "one of the two",
    ),
    (
        ["adv_estimator=step_reinforce"],
        "adv_estimator",
        "no reward of this run returns turns",
        "math_steps, right_prefix",
    ),
    (["adv_estimator=gigpo"], "adv_estimator", "this run has no environments", "add an environments block"),
    (["gigpo_std=false"], "gigpo_std", "adv_estimator", "gigpo"),
    (["kl_loss_type=k2"], "kl_loss_type", "'k2', but use_kl_loss is not set", "use_kl_loss=true"),
    (["kl_loss_importance=true"], "kl_loss_importance", "true, but use_kl_loss is not set", "use_kl_loss=true"),
    (["kl_penalty=k3"], "kl_penalty", "'k3', but add_token_level_kl is not set", "add_token_level_kl=true"),
    ([*ONE, "difficulty_mask=true"], "difficulty_mask", "num_return_sequences_in_group is 1", "at least 2"),
    (
        [*ONE, "difficulty_loss_weight=true"],
        "difficulty_loss_weight",
        "num_return_sequences_in_group is 1",
        "at least 2",
    ),
    (["adv_estimator=rloo", "norm_std_type=group"], "norm_std_type", "'group'", "adv_estimator=reinforce"),
    (["norm_mean_type=running"], "norm_mean_type", "'running'", "adv_estimator=reinforce"),
    (
        ["adv_estimator=step_reinforce", "norm_std_type=running"],
        "norm_std_type",
        "'running'",
        "set it to batch or group",
    ),
    (["gamma=0.9"], "gamma", "0.9, but adv_estimator grpo", "reinforce_plus_plus"),
    (["overlong_buffer.len=9"], "overlong_buffer.len", "9 is more than the longest response, 8", "at most 8"),
    (
        ["overlong_buffer.len=5", "actor_infer.generating_args.max_new_tokens=4"],
        "overlong_buffer.len",
        "4 tokens",
        "at most 4",
    ),
    (["difficulty_mask=true", "difficulty_low_threshold=1"], "difficulty_low_threshold", "1 is not below", "0.95"),
    (["difficulty_high_threshold=0.9"], "difficulty_high_threshold", "0.9", "difficulty_mask=true"),
    (
        ["error_max_len_clip=true"],
        "error_max_len_threshold",
        "missing, but error_max_len_clip is true",
        "number of tokens, at most 8",
    ),
    (
        ["error_max_len_threshold=6"],
        "error_max_len_threshold",
        "6, but error_max_len_clip is not set",
        "error_max_len_clip=true",
    ),
    (
        ["error_max_len_clip=true", "error_max_len_threshold=9"],
        "error_max_len_threshold",
        "9 is more than the longest",
        "at most 8",
    ),
    (["loss_scale_factor=100"], "loss_scale_factor", "100", "loss_agg_mode=seq-mean-token-sum-norm"),
    (["target_kl=0.1"], "target_kl", "0.1", "add_token_level_kl=true"),
    (["kl_horizon=100"], "kl_horizon", "100", "set target_kl"),
    ([*IN_REWARD, "target_kl=0.1", "kl_horizon=1"], "kl_horizon", "1 responses, but a step has 8", "at least 2"),
    (["add_token_level_kl=true"], "init_kl_coef", "0", "0.001"),
    (
        ["actor_infer.generating_args.num_return_sequences=3"],
        "actor_infer.generating_args.num_return_sequences",
        "3",
        "equal",
    ),
    (["actor_infer.generating_args.max_new_tokens=9"], "actor_infer.generating_args.max_new_tokens", "9", "at most 8"),
    (["actor_infer.generating_args.temperature=0"], "actor_infer.generating_args.temperature", "0", "above 0"),
    (
        ["actor_infer.generating_args.temperature=0", "adv_estimator=reinforce"],
        "actor_infer.generating_args.temperature",
        "0 is greedy",
        "above 0",
    ),
    (
        ["validation={data_args:{file_name:x.jsonl,prompt:q},generating_args:{temperature:0,num_return_sequences:4}}"],
        "validation.generating_args.num_return_sequences",
        "4, but temperature is 0",
        "temperature above 0",
    ),
    ([f"{ENGINE}.max_model_len=20"], f"{ENGINE}.max_model_len", "20", "at least 24"),
    ([f"{ENGINE}.max_num_batched_tokens=4"], f"{ENGINE}.max_num_batched_tokens", "4", "at least 8"),
    ([f"{ENGINE}.engine_args.block_size=16"], f"{ENGINE}.engine_args.block_size", "16", f"{ENGINE}.block_size"),
    *LOSSES,
    (["use_kl_loss=true", "kl_loss_coef=0.1"], "reference", "missing", "hf_infer"),
    (["use_kl_loss=true", "actor_train.model_args.lora_target=all-linear"], "kl_loss_coef", "0", "0.001"),
    (["kl_loss_coef=0.1"], "use_kl_loss", "0.1", "use_kl_loss=true"),
    (["init_kl_coef=0.1"], "add_token_level_kl", "0.1", "add_token_level_kl=true"),
    ([f"{TRAIN}.warmup_steps=2", f"{TRAIN}.warmup_ratio=0.1"], f"{TRAIN}.warmup_ratio", "0.1", "one of the two"),
    (["actor_train.data_args.messages=m"], "actor_train.data_args.prompt", "'m'", "one of the two"),
    (["~actor_train.data_args.prompt"], "actor_train.data_args", "neither", "messages: messages"),
    (["eval_steps=5"], "eval_steps", "5", "validation.data_args"),
    (["actor_train.model_args.lora_rank=4"], "actor_train.model_args.lora_rank", "4", "lora_target"),
    (
        ["actor_train.model_args.lora_target=all-linear", "actor_infer.model_args.lora_target=q_proj"],
        "actor_infer.model_args.lora_target",
        "q_proj",
        "equal",
    ),
    (
        ["actor_train.model_args.lora_target=all-linear", "actor_train.model_args.lora_rank=1024"],
        "actor_train.model_args.lora_rank",
        "1024",
        "weight_sync.lora=merged",
    ),
    (
        ["actor_train.model_args.lora_target=all-linear", f"{ENGINE}.load_format=dummy"],
        f"{ENGINE}.load_format",
        "dummy",
        "auto",
    ),
    (["norm_mean_type=batch"], "norm_mean_type", "batch", "adv_estimator=reinforce"),
    (
        ["deepspeed_zero3.train_micro_batch_size_per_gpu=4"],
        "strategy_config.train_micro_batch_size_per_gpu",
        "4",
        "per_device_train_batch_size",
    ),
    (
        ["updates_per_step=2"],
        "updates_per_step",
        "gradient_accumulation_steps, which is 1, also says",
        "~updates_per_step",
    ),
    ([*BY_UPDATES, "updates_per_step=3"], "updates_per_step", "3, but 8 sequences a step", "2 or 4"),
    ([*BY_UPDATES, "updates_per_step=9"], "updates_per_step", "9, but 8 sequences a step", "set it to 8"),
    ([*BY_UPDATES, "updates_per_step=0"], "updates_per_step", "0", "above 0"),
    (
        [*BY_UPDATES, "deepspeed_zero3.gradient_accumulation_steps=4"],
        "strategy_config.gradient_accumulation_steps",
        "4, but updates_per_step says the size",
        "auto",
    ),
    (
        [*BY_UPDATES, "deepspeed_zero3.train_batch_size=4"],
        "strategy_config.train_batch_size",
        "4, but the number of sequences",
        "auto",
    ),
    (["deepspeed_zero3.train_batch_size=4"], "strategy_config.train_batch_size", "4", "auto"),
    (
        ["deepspeed_zero3.zero_allow_untested_optimizer=false"],
        "strategy_config.zero_allow_untested_optimizer",
        "false",
        "allowed: True",
    ),
    (["deepspeed_zero3.gradient_clipping=0.5"], "strategy_config.gradient_clipping", "0.5", "max_grad_norm"),
    (["deepspeed_zero3.bf16.enabled=true"], "strategy_config.bf16.enabled", "true", "model_args.dtype"),
    (
        [f"{ZERO}.stage=2", f"{ZERO}.offload_param.device=cpu"],
        "zero_optimization.offload_param.device",
        "stage 2",
        "stage 3",
    ),
    ([f"{ZERO}.offload_optimizer.device=nvme"], "offload_optimizer.nvme_path", "missing", "folder"),
    (["rewards.code.world_size=1"], "rewards.code", "'code'", "math_rule"),
    (
        ["rewards.other={reward:math_rule,tag_included:[math_rule]}"],
        "rewards.other.tag_included",
        "math_rule",
        "one domain",
    ),
    (
        ["actor_train.data_args.domain_interleave_probs={maths:1}"],
        "actor_train.data_args.domain_interleave_probs.maths",
        "maths",
        "math_rule",
    ),
    (
        ["actor_train.model_args.flash_attn=fa2", "actor_train.model_args.attn_implementation=sdpa"],
        "actor_train.model_args.flash_attn",
        "fa2",
        "remove",
    ),
    (
        ["rewards.math_rule.worker_cls=roll.pipeline.rlvr.rewards.GeneralValRuleRewardWorker"],
        "rewards.math_rule.worker_cls",
        "GeneralValRuleRewardWorker",
        f"set rewards.math_rule.reward to {', '.join(known_rewards())}",
    ),
    (
        [f"{MODEL}.attn_implementation=fa2"],
        f"{MODEL}.attn_implementation",
        "runs on the CPU",
        "actor_train.device_mapping",
    ),
    ([f"{MODEL}.liger=true"], f"{MODEL}.liger", "runs on the CPU", "remove the key"),
    ([f"{ENGINE}.dtype=bfloat16"], f"{ENGINE}.dtype", "bfloat16", "actor_infer.model_args.dtype"),
]
PATHS = [
    (["pretrain=./nowhere"], "pretrain", "./nowhere", "config.json"),
    (["pretrain=exp"], "pretrain", "'exp'", "saved model"),
    (
        ["actor_train.data_args.file_name=[train.jsonl,gone.jsonl]"],
        "actor_train.data_args.file_name[1]",
        "gone.jsonl",
        "correct the path",
    ),
    (["actor_train.data_args.file_name=exp/sound.yaml"], "actor_train.data_args.file_name", "sound.yaml", ".jsonl"),
    (["output_dir=train.jsonl/run"], "output_dir", "train.jsonl/run", "another folder"),
    (["output_dir=''"], "output_dir", "''", "./output"),
    (["resume_from_checkpoint=./step_9"], "resume_from_checkpoint", "./step_9", "auto"),
    (["response_length=60"], "response_length", "76", "64"),
]
GRAMMAR = [
    (["norm_mean_type=~"], "command line", "norm_mean_type=~", "write norm_mean_type=null"),
    (
        ["actor_train.device_mapping=list(range(0,8))"],
        "command line",
        "list(range(0,8))",
        "'actor_train.device_mapping=\"list(range(0,8))\"'",
    ),
    (["a=[1"], "command line", "a=[1", "key=value"),
    (["seed=1,2"], "command line", "1,2", "--multirun"),
    (["+max_steps=3"], "command line", "max_steps", "++max_steps=3"),
    (["~nope"], "command line", "nope", "override"),
    (["hydra.nope=1"], "command line", "hydra.nope", "override"),
    (["db@x=1"], "command line", "db@x=1", "override"),
    (
        ["actor_train.strategy_args.strategy_config.zero_optimization.stage=2"],
        "actor_train.strategy_args.strategy_config.zero_optimization.stage",
        "${deepspeed_zero3}",
        "set deepspeed_zero3.zero_optimization.stage instead",
    ),
    (
        ["--multirun", "actor_train.strategy_args.strategy_config.zero_optimization.stage=2,3"],
        "actor_train.strategy_args.strategy_config.zero_optimization.stage",
        "${deepspeed_zero3}",
        "set deepspeed_zero3.zero_optimization.stage instead",
    ),
    (["--multirun", "seed=1,2"], "output_dir", "'output'", "${hydra:job.num}"),
    (["--multirun", "output_dir=output,./exp/../output"], "output_dir", "the run folder of 2 jobs", "${hydra:job.num}"),
]
CASES = KEYS + VALUES + STRATEGIES + DEVICES + CONTRADICTIONS + PATHS
BY_COMMAND = GRAMMAR + [cases[0] for cases in (KEYS, VALUES, STRATEGIES, DEVICES, CONTRADICTIONS, PATHS)]


@pytest.mark.parametrize(
    ("overrides", "place", "value", "remedy"), CASES, ids=[" ".join(case[0])[:70] for case in CASES]
)
def test_a_bad_override_is_refused(
    refused: Callable[..., str], overrides: list[str], place: str, value: str, remedy: str
) -> None:
    assert_said(refused(*overrides), place, value, remedy)


@pytest.mark.parametrize(
    ("overrides", "place", "value", "remedy"), BY_COMMAND, ids=[" ".join(case[0])[:70] for case in BY_COMMAND]
)
def test_the_command_ends_with_what_is_refused(
    refused_by_command: Callable[..., str], overrides: list[str], place: str, value: str, remedy: str
) -> None:
    assert_said(refused_by_command(*overrides), place, value, remedy)


def assert_said(message: str, place: str, value: str, remedy: str) -> None:
    """Assert that the first fault at this place contains the value and the remedy."""
    faults = message.split("\n  ")
    said = [index for index, line in enumerate(faults) if f"{place}:" in line or f"{place} or defaults:" in line]
    assert said, message
    fault = "\n".join(faults[said[0] : said[0] + 2])
    assert value in fault, message
    assert remedy in fault, message


def test_an_item_of_a_list_cannot_be_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "tiny/tiny_dpo", "~data_split.1", "dry_run=true"]) == 2
    assert_said(capsys.readouterr().err, "~data_split.1", "data_split is a list", "data_split=[...]")


def test_a_path_is_no_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "exp/sound.yaml"]) == 2
    assert "--config-path exp --config-name sound" in capsys.readouterr().err


def test_block_of_other_strategy_is_one_fault(refused: Callable[..., str]) -> None:
    chosen = ("actor_infer.strategy_args={strategy_name: hf_infer}", f"{ENGINE}.block_size=16", "max_steps=0")
    assert refused(*chosen).startswith("2 faults")
    message = refused(*chosen, "~actor_infer.strategy_args.strategy_config")
    assert message.startswith("1 fault in the configuration:\n  max_steps:")
