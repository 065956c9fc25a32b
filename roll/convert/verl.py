"""Reads the keys of verl's RL trainers (`main_ppo`, its asynchronous variants, DAPO) that need more than a copy."""

from __future__ import annotations

import re
from typing import Any

from roll.convert.draft import Draft
from roll.convert.rewards import put_own_reward, reward_name
from roll.convert.roles import (
    as_files,
    budget,
    device_list,
    put_adapter,
    put_engine,
    put_learner,
    put_names,
    put_reference,
    put_shared_sequences,
    put_steps,
    put_trackers,
    updates_of,
)
from roll.convert.source import Source

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL, OPTIM = "actor_rollout_ref.model", "actor_rollout_ref.actor.optim"
SHARING = (
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    f"{ACTOR}.megatron.context_parallel_size",
)
"""Keys of the number of ranks that share a sequence."""
ESTIMATORS = {
    **{name: name for name in ("grpo", "gae", "rloo", "remax", "opo", "gpg")},
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
LOSSES = {
    "vanilla": "ppo",
    "geo_mean": "gmpo",
    "gpg": "pg",
    **{name: name for name in ("gspo", "cispo", "sapo", "clip_cov", "kl_cov")},
}
CLIPPED = ("ppo", "gspo", "gmpo", "cispo", "clip_cov")
DISCOUNTED = ("reinforce_plus_plus", "remax", "gae")
KLS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "k1+": "k1+", "k3+": "k3+"}
CORRECTIONS = {
    ("token", ""): "tis",
    ("sequence", ""): "seq_tis",
    ("", "token_k1"): "token_rs",
    ("", "seq_sum_k1"): "seq_rs",
    ("", "seq_mean_k1"): "geo_rs",
    ("token", "seq_mean_k1"): "geo_rs_tis",
}
"""By `rollout_is` and `rollout_rs`."""
OWN_REWARD = re.compile(
    r"(reward\.)?custom_reward_function\.path|reward\.reward_model\.enable|"
    r"(reward\.|reward_model\.)?(sandbox_fusion\.url|reward_manager(\.name|\.module\.path)?)"
)
"""Keys of a reward that is not verl's own, also those of later versions, below `reward`."""
VERLS = (None, False, "", "naive", "dapo", "batch", "prime", "remote")
"""Values of those keys that mean verl's own scores."""


def build_verl(source: Source, draft: Draft) -> None:
    """Write the experiment of a command line of verl's RL trainers."""
    draft.put("pipeline", "rlvr")
    _adapter(source, draft)
    sharing = _devices(source, draft)
    _steps(source, draft)
    _optimizer(source, draft)
    _loss(source, draft)
    _estimator(source, draft, sharing)
    _kl(source, draft, sharing)
    _batches(source, draft)
    _sampling(source, draft)
    _log_probs(source, draft)
    _rows(source, draft)
    _rewards(source, draft, sharing)
    _run(source, draft)


def _adapter(source: Source, draft: Draft) -> None:
    rank = source.count(f"{MODEL}.lora.rank", f"{MODEL}.lora_rank")
    if rank > 0:
        targets = source.get(f"{MODEL}.lora.target_modules", f"{MODEL}.target_modules")
        alpha = source.number(f"{MODEL}.lora.alpha", f"{MODEL}.lora_alpha")
        if isinstance(targets, list) and any(str(name).startswith("linear_") for name in targets):
            said = "Megatron's names of layers become all-linear; the engine gets the merged model"
            draft.note("changed", f"{MODEL}.lora.target_modules", said)
            targets = "all-linear"
            draft.put("weight_sync.lora", "merged")
        put_adapter(draft, "actor_train", rank, alpha, targets, source.get(f"{MODEL}.lora.dropout"))


def _devices(source: Source, draft: Draft) -> str:
    """Place the roles, and return the devices of the trained ones."""
    on_node, nodes = source.count("trainer.n_gpus_per_node"), source.count("trainer.nnodes")
    number = max(1, on_node * nodes)
    trained = device_list(0, number)
    preset = "deepspeed_zero3"
    if source.get(f"{ACTOR}.fsdp_config.offload_policy"):
        preset = "deepspeed_zero3_offload_all"
    elif source.get(f"{OPTIM}.override_optimizer_config.optimizer_cpu_offload"):
        preset = "deepspeed_zero3_cpuoffload"
    shared = source.count(*SHARING)
    put_learner(draft, "actor_train", put_shared_sequences(draft, preset, shared), trained)
    if (backend := source.get(f"{ACTOR}.strategy")) == "megatron":
        draft.note("changed", f"{ACTOR}.strategy", "Megatron becomes DeepSpeed with ZeRO-3")
    elif backend not in ("fsdp", "fsdp2"):
        draft.note("lost", f"{ACTOR}.strategy", f"{backend} has no counterpart; DeepSpeed with ZeRO-3 takes its place")
    apart_on_node, apart_nodes = source.count("rollout.n_gpus_per_node"), source.count("rollout.nnodes")
    apart = apart_on_node * apart_nodes
    devices = device_list(number, apart) if apart else trained
    most = min(apart or number, apart_on_node or on_node)
    place = f"{ROLLOUT}.tensor_model_parallel_size"
    put_engine(draft, devices, source.count(place), most, place)
    if (engine := source.get(f"{ROLLOUT}.name")) != "vllm":
        draft.note("changed", f"{ROLLOUT}.name", f"{engine} becomes vllm")
    if apart and apart_on_node != on_node:
        draft.put("num_gpus_per_node", max(on_node, apart_on_node))
    return trained


def _steps(source: Source, draft: Draft) -> None:
    """Set the numbers of prompts, updates and steps."""
    prompts = source.count("data.train_batch_size")
    mini = source.count(f"{ACTOR}.ppo_mini_batch_size")
    if source.trainer == "fully_async":
        syncs = source.count("async_training.trigger_parameter_sync_step") or 4
        prompts = mini * syncs * (source.count("async_training.require_batches") or 1)
        draft.put("async_generation_ratio", source.number("async_training.staleness_threshold"))
    elif source.trainer == "one_step_off":
        draft.put("async_generation_ratio", 1)
    if (drawn := source.count("data.gen_batch_size")) not in (0, prompts) and source.trainer != "fully_async":
        said = f"{drawn} prompts are generated at a time for a step of {prompts}; a step of roll generates its own"
        draft.note("changed", "data.gen_batch_size", said)
    if mini > prompts:
        draft.note("changed", f"{ACTOR}.ppo_mini_batch_size", f"{mini}, but a step has {prompts} prompts: one update")
    draft.put("rollout_batch_size", prompts)
    updates = updates_of(draft, f"{ACTOR}.ppo_mini_batch_size", prompts, min(mini, prompts))
    draft.put("updates_per_step", updates if updates > 1 else None)
    drawn_in_all = source.count("rollout.total_rollout_steps")
    most = drawn_in_all // prompts if drawn_in_all else source.count("trainer.total_training_steps")
    put_steps(draft, source, ("rollout.total_epochs", "trainer.total_epochs"), prompts, most or None)


def _optimizer(source: Source, draft: Draft) -> None:
    put_schedule(source, draft, "actor_train", OPTIM)
    first, second = source.pair(f"{OPTIM}.betas")
    draft.put("actor_train.training_args.adam_beta1", first if first != 0.9 else None)
    draft.put("actor_train.training_args.adam_beta2", second if second != 0.999 else None)
    clip = source.number(f"{OPTIM}.clip_grad", f"{ACTOR}.grad_clip")
    draft.put("max_grad_norm", clip if clip != 1 else None)


def put_schedule(source: Source, draft: Draft, role: str, optim: str) -> None:
    """Set the learning-rate schedule of a role from verl's keys below `optim`."""
    names = ("lr_scheduler_type", "warmup_style", "lr_decay_style", "lr_scheduler")
    kind = source.get(*(f"{optim}.{name}" for name in names)) or "constant"
    steps, share = source.count(f"{optim}.lr_warmup_steps"), source.number(f"{optim}.lr_warmup_steps_ratio")
    least = source.number(f"{optim}.min_lr_ratio")
    at = f"{role}.training_args"
    if kind == "constant" and (steps > 0 or share > 0):
        kind = "constant_with_warmup"
    if kind == "cosine" and least > 0:
        kind = "cosine_with_min_lr"
        draft.put(f"{at}.lr_scheduler_kwargs.min_lr_rate", least)
    draft.put(f"{at}.lr_scheduler_type", kind)
    draft.put(f"{at}.warmup_steps", steps if steps > 0 else None)
    draft.put(f"{at}.warmup_ratio", share if steps <= 0 and share > 0 else None)


def _loss(source: Source, draft: Draft) -> None:
    mode = str(source.get(f"{ACTOR}.policy_loss.loss_mode"))
    loss = LOSSES.get(mode, "ppo")
    if mode not in LOSSES:
        draft.note("lost", f"{ACTOR}.policy_loss.loss_mode", f"{mode} has no counterpart; ppo takes its place")
    draft.put("policy_loss", loss)
    if loss in CLIPPED:
        low, high = source.get(f"{ACTOR}.clip_ratio_low"), source.get(f"{ACTOR}.clip_ratio_high")
        draft.put("pg_clip", source.get(f"{ACTOR}.clip_ratio") if None in (low, high) else None)
        draft.put("pg_clip_low", low)
        draft.put("pg_clip_high", high)
    if loss == "ppo":
        draft.put("dual_clip_loss", source.number(f"{ACTOR}.clip_ratio_c"))
    if loss == "sapo":
        draft.put("sapo_positive_temperature", source.get(f"{ACTOR}.tau_pos"))
        draft.put("sapo_negative_temperature", source.get(f"{ACTOR}.tau_neg"))
    pairs = {"clip_cov": {"ratio": "ratio", "lb": "low", "ub": "high"}, "kl_cov": {"ratio": "ratio"}}
    for theirs, ours in pairs.get(loss, {}).items():
        draft.put(f"{loss}_{ours}", source.get(f"{ACTOR}.policy_loss.{loss}_{theirs}"))
    if loss == "kl_cov":
        draft.put("kl_cov_coef", source.get(f"{ACTOR}.policy_loss.ppo_kl_coef") or 0.1)
    draft.put("entropy_loss_coef", source.number(f"{ACTOR}.entropy_coeff") or None)
    if draft.at("loss_agg_mode") != "seq-mean-token-sum-norm":
        draft.drop("loss_scale_factor")


def _estimator(source: Source, draft: Draft, devices: str) -> None:
    name = str(source.get("algorithm.adv_estimator"))
    if name not in ESTIMATORS:
        draft.note("lost", "algorithm.adv_estimator", f"{name} has no counterpart; dr_grpo takes its place")
    estimator = ESTIMATORS.get(name, "dr_grpo")
    if estimator == "grpo" and not source.get("algorithm.norm_adv_by_std_in_grpo"):
        estimator = "dr_grpo"
    if draft.at("num_return_sequences_in_group") == 1 and estimator not in (*DISCOUNTED, "opo"):
        said = f"{estimator} compares the responses of a group, and there is 1: verl then takes the reward itself"
        draft.note("changed", "algorithm.adv_estimator", f"{said}, which is `reinforce`")
        estimator = "reinforce"
    draft.put("adv_estimator", estimator)
    gamma = source.number("algorithm.gamma")
    draft.put("gamma", gamma if gamma != 1 and estimator in DISCOUNTED else None)
    if estimator != "gae":
        return
    draft.put("whiten_advantages", True)
    draft.put("lambd", source.number("algorithm.lam"))
    draft.put("value_clip", source.number("critic.cliprange_value"))
    draft.put("critic_warmup", source.count("trainer.critic_warmup") or None)
    put_learner(draft, "critic", "deepspeed_zero3", devices)
    draft.put("critic.model_args.model_name_or_path", source.get("critic.model.path"))
    draft.put("critic.model_args.trust_remote_code", source.get("critic.model.trust_remote_code"))
    whole = source.get("critic.model.enable_gradient_checkpointing")
    draft.put("critic.model_args.gradient_checkpointing", "none" if whole is False else "all")
    draft.put("critic.training_args.learning_rate", source.number("critic.optim.lr"))
    draft.put("critic.training_args.weight_decay", source.number("critic.optim.weight_decay"))
    put_schedule(source, draft, "critic", "critic.optim")


def _kl(source: Source, draft: Draft, devices: str) -> None:
    in_loss = bool(source.get(f"{ACTOR}.use_kl_loss")) and source.number(f"{ACTOR}.kl_loss_coef") > 0
    in_reward = bool(source.get("algorithm.use_kl_in_reward")) and source.number("algorithm.kl_ctrl.kl_coef") > 0
    if in_loss:
        draft.put("use_kl_loss", True)
        draft.put("kl_loss_coef", source.number(f"{ACTOR}.kl_loss_coef"))
        draft.put("kl_loss_type", _kl_name(source, draft, f"{ACTOR}.kl_loss_type", "k3"))
        draft.put("kl_loss_importance", False)
    if in_reward:
        draft.put("add_token_level_kl", True)
        draft.put("init_kl_coef", source.number("algorithm.kl_ctrl.kl_coef"))
        draft.put("kl_penalty", _kl_name(source, draft, "algorithm.kl_penalty", "k1"))
        if source.get("algorithm.kl_ctrl.type") == "adaptive":
            draft.put("target_kl", source.number("algorithm.kl_ctrl.target_kl"))
            draft.put("kl_horizon", source.count("algorithm.kl_ctrl.horizon"))
    if in_loss or in_reward:
        put_reference(draft, devices, sharded=True)


def _kl_name(source: Source, draft: Draft, place: str, otherwise: str) -> str:
    name = str(source.get(place))
    if name == "abs" and otherwise == "k1":
        return name
    if name not in KLS:
        draft.note("lost", place, f"{name} has no counterpart; {otherwise} takes its place")
    return KLS.get(name, otherwise)


def _batches(source: Source, draft: Draft) -> None:
    """Set the sizes of forward passes, which do not change a result."""
    longest = draft.at("prompt_length") + draft.at("response_length")
    shared = max(1, source.count(*SHARING))
    if source.get(f"{ACTOR}.use_dynamic_bsz"):
        budget(draft, "actor_train", source.count(f"{ACTOR}.ppo_max_token_len_per_gpu") * shared, longest)
    else:
        micro = source.count(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
        whole = source.count(f"{ACTOR}.ppo_micro_batch_size")
        ranks = source.count("trainer.n_gpus_per_node") * source.count("trainer.nnodes")
        draft.put("actor_train.training_args.per_device_train_batch_size", micro or max(1, whole // max(1, ranks)))
    if draft.at("critic"):
        if source.get("critic.use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz"):
            budget(draft, "critic", source.count("critic.ppo_max_token_len_per_gpu"), longest)
        elif micro := source.count("critic.ppo_micro_batch_size_per_gpu"):
            draft.put("critic.training_args.per_device_train_batch_size", micro)
    if draft.at("reference"):
        if source.get(f"{REF}.log_prob_use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz"):
            place = (f"{REF}.log_prob_max_token_len_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu")
            budget(draft, "reference", source.count(*place), longest)
        elif micro := source.count(f"{REF}.log_prob_micro_batch_size_per_gpu"):
            draft.put("reference.infer_batch_size", micro)


def _sampling(source: Source, draft: Draft) -> None:
    at, longest = "actor_infer.strategy_args.strategy_config", draft.at("prompt_length") + draft.at("response_length")
    draft.put("actor_infer.generating_args.top_k", source.count(f"{ROLLOUT}.top_k"))
    if source.get(f"{ROLLOUT}.do_sample") is False:
        draft.put("actor_infer.generating_args.temperature", 0)
    if (length := source.count(f"{ROLLOUT}.max_model_len")) >= longest:
        draft.put(f"{at}.max_model_len", length)
    draft.put(f"{at}.max_num_batched_tokens", source.count(f"{ROLLOUT}.max_num_batched_tokens") or None)
    draft.put("weight_sync.lora", "merged" if source.get(f"{MODEL}.lora.merge") else None)
    draft.put("weight_sync.bucket_mib", source.get(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"))


def _log_probs(source: Source, draft: Draft) -> None:
    """Set whose log-probs the ratios compare with, and the correction for those of the engine."""
    at, loss = "algorithm.rollout_correction", draft.at("policy_loss")
    runs_ahead = (draft.at("async_generation_ratio") or 0) > 0
    bypass = source.get(f"{at}.bypass_mode") or source.get("async_training.use_rollout_log_probs")
    if loss == "pg":
        return
    weights, rejected = source.get(f"{at}.rollout_is"), source.get(f"{at}.rollout_rs")
    corrected = weights is not None or rejected is not None
    if runs_ahead and not bypass and not corrected:
        draft.note("changed", f"{at}.bypass_mode", "generation runs ahead, so ratios are to the engine's log-probs")
    from_engine = bool(bypass) or (runs_ahead and not corrected)
    draft.put("behaviour_log_probs", "engine" if from_engine else "trainer")
    if weights is None and rejected is None:
        return
    kind = CORRECTIONS.get((str(weights or ""), str(rejected or "")))
    if kind is None or from_engine:
        place = f"{at}.rollout_is" if weights is not None else f"{at}.rollout_rs"
        said = f"{weights} with {rejected} has no counterpart with these log-probs; see `mismatch_correction`"
        draft.note("lost", place, f"{said} in docs/algorithms.md")
        return
    draft.put("mismatch_correction", kind)
    draft.put("mismatch_cap", source.number(f"{at}.rollout_is_threshold") if "tis" in kind else None)
    bounds = re.findall(r"[\d.]+", str(source.get(f"{at}.rollout_rs_threshold")))
    if rejected is not None and bounds:
        low, high = 1 / float(bounds[-1]), 1 / float(bounds[0]) if len(bounds) > 1 else float(bounds[0])
        draft.put("mismatch_low", round(low, 9))
        draft.put("mismatch_high", round(high, 9))


def _rows(source: Source, draft: Draft) -> None:
    at = "actor_train.data_args"
    draft.put(f"{at}.file_name", as_files(draft.at(f"{at}.file_name") or "data/train.parquet"))
    draft.put(f"{at}.ground_truth", "reward_model.ground_truth")
    draft.put(f"{at}.chat_template_kwargs", source.below("data.apply_chat_template_kwargs") or None)
    if "data.train_files" not in source.given:
        draft.note("assumed", "data.train_files", "data/train.parquet")
    every = source.count("rollout.test_freq", "trainer.test_freq")
    before = source.get("trainer.val_before_train")
    if not (every > 0 or before) or not (files := source.get("data.val_files")):
        return
    draft.put("eval_steps", every if every > 0 else draft.at("max_steps"))
    if every > 0 and not before:
        draft.note("changed", "trainer.val_before_train", "a validation also runs before the first step")
    rows = {key: value for key, value in draft.at(at).items() if key != "chat_template_kwargs"}
    draft.put("validation.data_args", {**rows, "file_name": as_files(files)})
    sampled: dict[str, Any] = {"temperature": source.number(f"{ROLLOUT}.val_kwargs.temperature")}
    if not source.get(f"{ROLLOUT}.val_kwargs.do_sample"):
        sampled["temperature"] = 0
    sampled["top_p"] = source.number(f"{ROLLOUT}.val_kwargs.top_p")
    sampled["top_k"] = source.count(f"{ROLLOUT}.val_kwargs.top_k")
    samples = source.count(f"{ROLLOUT}.val_kwargs.n")
    if sampled["temperature"] == 0 and samples > 1:
        draft.note("changed", f"{ROLLOUT}.val_kwargs.n", f"greedy responses are equal: 1 instead of {samples}")
        samples = 1
    sampled["num_return_sequences"] = samples
    draft.put("validation.generating_args", sampled)


def _rewards(source: Source, draft: Draft, devices: str) -> None:
    if source.get("reward_model.enable"):
        model = source.get("reward_model.model.path")
        draft.put("rewards.score.reward", "reward_model")
        draft.put("rewards.score.model_args.model_name_or_path", model or draft.at("pretrain"))
        draft.put("rewards.score.strategy_args.strategy_name", "hf_infer")
        draft.put("rewards.score.device_mapping", devices)
        draft.put("rewards.score.infer_batch_size", source.get("reward_model.micro_batch_size_per_gpu"))
        for at in ("actor_train.data_args", "validation.data_args"):
            draft.drop(f"{at}.ground_truth")
    elif place := _own_reward(source):
        written = source.get(place)
        function = source.get(place.replace(".path", ".name")) if "custom_reward_function" in place else None
        domain = reward_name(function or ("sandbox_fusion" if "://" in str(written) else written))
        put_own_reward(draft, place, written, domain, "docs/moving/from_verl.md")
    else:
        draft.put("rewards.math_rule.world_size", 8)
        draft.note("changed", "data.reward_fn_key", "verl scores by `data_source`; here math_rule scores every row")
    for at in ("reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer"):
        if source.get(f"{at}.enable"):
            draft.put("overlong_buffer.len", source.get(f"{at}.len"))
            draft.put("overlong_buffer.penalty_factor", source.get(f"{at}.penalty_factor"))
    if source.get("algorithm.filter_groups.enable"):
        most = source.count("algorithm.filter_groups.max_num_gen_batches")
        draft.put("dynamic_sampling.max_num_gen_batches", most if most > 0 else 10)


def _own_reward(source: Source) -> str | None:
    """Return the key by which a source names a reward of its own, if there is one."""
    return next((key for key, value in source.given.items() if OWN_REWARD.fullmatch(key) and value not in VERLS), None)


def _run(source: Source, draft: Draft) -> None:
    put_names(draft, str(source.get("trainer.experiment_name")), source.get("trainer.default_local_dir"))
    put_trackers(draft, "trainer.logger", source.get("trainer.logger"), source.get("trainer.project_name"))
    every = source.count("trainer.save_freq")
    draft.put("save_steps", every if every > 0 else None)
