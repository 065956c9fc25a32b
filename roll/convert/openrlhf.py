"""Reads the keys of OpenRLHF's trainers that need more than a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.convert.draft import Draft
from roll.convert.rewards import UNSET, put_own_reward, reward_name
from roll.convert.roles import (
    as_files,
    budget,
    device_list,
    put_adapter,
    put_engine,
    put_learner,
    put_names,
    put_reference,
    put_rows,
    put_shared_sequences,
    put_steps,
    put_trackers,
    updates_of,
)
from roll.convert.source import Source

ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_plus_plus",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
}
CORRECTIONS = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "geo_rs_tis"}
DISCOUNTED = ("reinforce_plus_plus", "gae")
PIPELINES = {"sft": "sft", "reward": "reward_model", "dpo": "dpo", "kto": "dpo"}


def build_openrlhf(source: Source, draft: Draft) -> None:
    """Write the experiment of a command line of OpenRLHF."""
    draft.put("pipeline", "rlvr" if source.in_rlvr else PIPELINES[source.trainer])
    role, optim = source.role, "actor." if source.in_rlvr else ""
    _count_rows(source, draft)
    targets = source.get("ds.lora.target_modules")
    alpha, dropout = source.number("ds.lora.alpha"), source.get("ds.lora.dropout")
    put_adapter(draft, role, source.count("ds.lora.rank"), alpha, targets, dropout)
    first, second = source.pair(f"{optim}adam.betas")
    draft.put(f"{role}.training_args.adam_beta1", first)
    draft.put(f"{role}.training_args.adam_beta2", second)
    if source.get(f"{optim}optim") == "muon":
        draft.put(f"{role}.training_args.optimizer", "muon")
        draft.put(f"{role}.training_args.learning_rate", source.get(f"{optim}muon.lr") or 0.02)
    _schedule(source, draft, role, optim)
    _run(source, draft)
    if source.in_rlvr:
        _sampled(source, draft)
    else:
        _given_rows(source, draft)


def _count_rows(source: Source, draft: Draft) -> None:
    """Bound the number of rows by `data.max_samples`."""
    if not (most := source.count("data.max_samples")):
        return
    if source.rows is None:
        draft.note(
            "assumed", "data.max_samples", f"the files have at least these {most:,} rows; else give --rows NUMBER"
        )
        source.rows = most
    elif source.rows > most:
        draft.note("lost", "data.max_samples", f"all {source.rows:,} rows are read; give a file with {most:,} of them")
        source.rows = most


def _schedule(source: Source, draft: Draft, role: str, prefix: str) -> None:
    kind = str(source.get(f"{prefix}lr_scheduler"))
    draft.put(f"{role}.training_args.lr_scheduler_type", kind)
    if kind == "cosine_with_min_lr":
        draft.put(f"{role}.training_args.lr_scheduler_kwargs.min_lr_rate", source.number(f"{prefix}min_lr_ratio"))
    draft.put(f"{role}.training_args.warmup_ratio", source.number(f"{prefix}lr_warmup_ratio"))


def _run(source: Source, draft: Draft) -> None:
    folder = draft.at("output_dir")
    name = source.get("logger.wandb.run_name") or (str(folder).rstrip("/").split("/")[-1] if folder else source.trainer)
    put_names(draft, name, folder)
    trackers = ["wandb"] if source.get("logger.wandb.key") else []
    trackers += ["tensorboard"] if source.get("logger.tensorboard_dir") else []
    if trackers:
        put_trackers(draft, "logger.wandb.key", trackers, source.get("logger.wandb.project"))
    every = source.count("ckpt.save_steps")
    draft.put("save_steps", every if every > 0 else None)
    draft.put("resume_from_checkpoint", "auto" if source.get("ckpt.load_enable") else "never")


def _preset(source: Source, draft: Draft) -> str:
    """Return the preset of DeepSpeed, and include it with its changes."""
    stage = source.count("ds.zero_stage")
    preset = {0: "deepspeed_zero", 1: "deepspeed_zero1", 2: "deepspeed_zero2"}.get(stage, "deepspeed_zero3")
    if source.count("ds.tensor_parallel_size") > 1:
        draft.note("changed", "ds.tensor_parallel_size", "ZeRO-3 shards the model instead of splitting its layers")
        preset = "deepspeed_zero3"
    if source.get("ds.adam_offload"):
        preset = "deepspeed_zero2_cpuoffload" if preset == "deepspeed_zero2" else "deepspeed_zero3_cpuoffload"
    shared = source.count("ds.ring_attn_size")
    if shared > 1:
        draft.note("changed", "ds.ring_attn_size", "ring attention becomes DeepSpeed-Ulysses")
    return put_shared_sequences(draft, preset, shared)


def _sampled(source: Source, draft: Draft) -> None:
    """Write what only PPO and its relatives have."""
    if source.get("actor.gradient_checkpointing_enable") is None:
        draft.put("actor_train.model_args.gradient_checkpointing", "none")
    devices = _place(source, draft)
    _step(source, draft)
    _losses(source, draft)
    _estimator(source, draft, devices["critic"])
    _kl(source, draft, devices["ref"])
    _rewards(source, draft, devices["reward"])
    _prompts(source, draft)
    longest = draft.at("prompt_length") + draft.at("response_length")
    shared = source.count("ds.ring_attn_size")
    if source.get("train.dynamic_batch_enable"):
        budget(draft, "actor_train", source.count("train.max_tokens_per_gpu") * shared, longest)
    else:
        micro = source.count("train.micro_batch_size")
        draft.put("actor_train.training_args.per_device_train_batch_size", micro)


def _place(source: Source, draft: Draft) -> dict[str, str]:
    """Place the policy and the engines. Return the devices of the other roles by OpenRLHF's name of the role."""
    sizes = {
        role: source.count(f"{role}.num_nodes") * source.count(f"{role}.num_gpus_per_node")
        for role in ("actor", "ref", "critic", "reward")
    }
    estimator, kl = source.get("algo.advantage.estimator"), source.number("algo.kl.init_coef")
    needed = {"ref": kl > 0, "critic": estimator == "gae", "reward": bool(_reward_model(source))}
    together = bool(source.get("train.colocate_all"))
    on_node, tensor_parallel = source.count("actor.num_gpus_per_node"), source.count("vllm.tensor_parallel_size")
    actor = device_list(0, sizes["actor"])
    found, used = {}, sizes["actor"]
    for role in ("ref", "critic", "reward"):
        shares = together or (role == "ref" and source.get("train.colocate_actor_ref"))
        with_critic = role == "reward" and source.get("train.colocate_critic_reward") and needed["critic"]
        if shares or not needed[role]:
            found[role] = actor
        elif with_critic:
            found[role] = found["critic"]
        else:
            found[role], used = device_list(used, sizes[role]), used + sizes[role]
    engines = source.count("vllm.num_engines") * tensor_parallel
    if (together and not source.get("train.async_enable")) or not engines:
        engines, generating = sizes["actor"], actor
    else:
        generating = device_list(used, engines)
    draft.put("num_gpus_per_node", on_node if on_node > 0 else None)
    put_learner(draft, "actor_train", _preset(source, draft), actor)
    put_engine(draft, generating, tensor_parallel, min(engines, on_node), "vllm.tensor_parallel_size")
    return found


def _step(source: Source, draft: Draft) -> None:
    prompts, group = source.count("rollout.batch_size"), source.count("rollout.n_samples_per_prompt")
    updates = updates_of(draft, "train.batch_size", prompts * group, source.count("train.batch_size"))
    draft.put("updates_per_step", updates if updates > 1 else None)
    drawn = source.count("rollout.vllm_generate_batch_size")
    if drawn and drawn != prompts:
        said = f"{drawn} prompts are generated for a step of {prompts}; a step of roll generates its own"
        draft.note("changed", "rollout.vllm_generate_batch_size", said)
    epochs = source.count("train.max_epochs")
    draft.put("ppo_epochs", epochs if epochs > 1 else None)
    put_steps(draft, source, ("train.num_episodes",), prompts, None)
    if source.get("train.async_enable"):
        draft.put("async_generation_ratio", source.count("train.async_queue_size"))


def _losses(source: Source, draft: Draft) -> None:
    if "actor.eps_clip_low_high" in source.given:
        low, high = source.pair("actor.eps_clip_low_high")
        draft.put("pg_clip_low", low)
        draft.put("pg_clip_high", high)
    else:
        draft.put("pg_clip", source.number("actor.eps_clip"))
    gspo = draft.at("policy_loss") == "gspo"
    draft.put("dual_clip_loss", None if gspo else source.get("actor.dual_clip"))
    draft.put("loss_agg_mode", "seq-mean-token-mean" if gspo else "token-mean")
    draft.put("entropy_loss_coef", source.get("actor.entropy_coef"))
    corrected = bool(source.get("algo.advantage.is_correction_enable"))
    draft.put("behaviour_log_probs", "trainer")
    if draft.at("async_generation_ratio") and not corrected:
        draft.put("behaviour_log_probs", "engine")
        said = "generation runs ahead, so ratios are to the engine's log-probs, not to those of the trainer"
        draft.note("changed", "train.async_enable", said)
    if corrected:
        kind = _named(source, draft, "algo.advantage.is_correction_type", CORRECTIONS, "tis")
        low, high = source.pair("algo.advantage.is_correction_threshold")
        draft.put("mismatch_correction", kind)
        if kind == "tis":
            draft.put("mismatch_cap", high)
            draft.note("changed", "algo.advantage.is_correction_threshold", f"tis has no lower bound {low:g} in roll")
        else:
            draft.put("mismatch_low", low)
            draft.put("mismatch_high", high)
        if kind == "geo_rs_tis":
            said = "seq-mask-tis becomes geo_rs_tis, whose weights of tokens are at most mismatch_cap"
            draft.note("changed", "algo.advantage.is_correction_type", said)


def _named(source: Source, draft: Draft, key: str, names: Mapping[Any, str], otherwise: str) -> str:
    found, is_known = source.named(key, names, otherwise)
    if not is_known:
        draft.note("lost", key, f"{source.get(key)} has no counterpart; {otherwise} takes its place")
    return found


def _estimator(source: Source, draft: Draft, devices: str) -> None:
    estimator = _named(source, draft, "algo.advantage.estimator", ESTIMATORS, "grpo")
    draft.put("adv_estimator", estimator)
    gamma = source.number("algo.advantage.gamma")
    draft.put("gamma", gamma if gamma != 1 and estimator in DISCOUNTED else None)
    if estimator != "gae":
        return
    draft.put("whiten_advantages", True)
    draft.put("lambd", source.number("algo.advantage.lambd"))
    draft.put("value_clip", source.number("critic.value_clip"))
    warm_up = source.count("critic.freezing_steps")
    draft.put("critic_warmup", warm_up if warm_up > 0 else None)
    preset = draft.at("actor_train.strategy_args.strategy_config").strip("${}")
    put_learner(draft, "critic", preset, devices)
    model = source.get("critic.model_name_or_path") or _reward_model(source)
    draft.put("critic.model_args.model_name_or_path", str(model).split(",")[0] if model else None)
    draft.put("critic.training_args.learning_rate", source.number("critic.adam.lr"))
    draft.put("critic.training_args.weight_decay", source.number("critic.adam.weight_decay"))
    draft.put("critic.training_args.per_device_train_batch_size", source.count("train.micro_batch_size"))
    _schedule(source, draft, "critic", "critic.")


def _kl(source: Source, draft: Draft, devices: str) -> None:
    weight, estimator = source.number("algo.kl.init_coef"), source.get("algo.kl.estimator")
    if weight <= 0:
        return
    if source.get("algo.kl.use_loss"):
        draft.put("use_kl_loss", True)
        draft.put("kl_loss_coef", weight)
        draft.put("kl_loss_type", estimator)
        draft.put("kl_loss_importance", False)
    else:
        draft.put("add_token_level_kl", True)
        draft.put("init_kl_coef", weight)
        draft.put("kl_penalty", estimator)
        if target := source.get("algo.kl.target"):
            draft.put("target_kl", target)
            draft.put("kl_horizon", source.count("algo.kl.horizon"))
    put_reference(draft, devices, sharded=source.count("ds.zero_stage") == 3)


def _reward_model(source: Source) -> Any:
    """Return the model that scores, or None if a function does."""
    functions = source.get("reward.remote_url"), source.get("train.agent_func_path")
    return None if any(functions) else source.get("reward.model_name_or_path")


def _rewards(source: Source, draft: Draft, devices: str) -> None:
    low, high = source.pair("reward.clip_range")
    if -low == high:
        draft.put("reward_clip", float(high))
    else:
        draft.note("lost", "reward.clip_range", f"[{low}, {high}] is not symmetric; see `reward_clip`")
    domain = "math_rule"
    model, where = source.get("reward.model_name_or_path"), source.get("reward.remote_url")
    if where:
        domain = reward_name("reward_func" if "://" in str(where) else where)
        put_own_reward(draft, "reward.remote_url", where, domain, "docs/moving/from_openrlhf.md")
    elif agent := source.get("train.agent_func_path"):
        domain = reward_name(agent)
        draft.put(f"rewards.{domain}.reward", UNSET)
        said = f"write an environment (docs/environments.md), or, for answers in one turn, set rewards.{domain}.reward"
        draft.note("lost", "train.agent_func_path", f"{said}; until then a run is refused")
    elif model:
        domain = "score"
        draft.put("rewards.score.reward", "reward_model")
        draft.put("rewards.score.model_args.model_name_or_path", str(model).split(",")[0])
        draft.put("rewards.score.strategy_args.strategy_name", "hf_infer")
        draft.put("rewards.score.device_mapping", devices)
        if "," in str(model):
            draft.note("lost", "reward.model_name_or_path", "only the first model is kept; for a sum, see `parts`")
    else:
        draft.put("rewards.math_rule.world_size", 8)
        draft.note("assumed", "reward.remote_url", "math_rule, which compares with the reference answer")
    if model and domain != "score":
        draft.note("idle", "reward.model_name_or_path", "the function takes its place, in OpenRLHF too")
    if length := source.count("reward.overlong_buffer_len"):
        draft.put("overlong_buffer.len", length)
        draft.put("overlong_buffer.penalty_factor", source.number("reward.overlong_penalty_factor"))
    if source.get("algo.dynamic_filtering_enable"):
        down, up = source.pair("algo.dynamic_filtering_range")
        draft.put("dynamic_sampling.max_num_gen_batches", 10)
        bounds = {"threshold_down": down, "threshold_up": up}
        draft.put(f"rewards.{domain}.query_filter_config", {"type": "mean_filter", "filter_args": bounds})


def _files(source: Source, draft: Draft, place: str) -> None:
    """Name the training files."""
    files = source.get(place)
    if not files:
        draft.note("assumed", place, "data/train.jsonl")
    draft.put(f"{source.role}.data_args.file_name", as_files(files or "data/train.jsonl"))


def _prompts(source: Source, draft: Draft) -> None:
    whole, response = source.count("data.max_len"), source.count("rollout.max_new_tokens")
    prompt = source.count("data.prompt_max_len")
    if prompt and response:
        draft.put("prompt_length", prompt)
        draft.put("response_length", response)
    else:
        response = response or whole // 2
        draft.put("response_length", response)
        draft.put("prompt_length", max(1, whole - response))
        if not source.get("rollout.max_new_tokens"):
            said = f"{whole} tokens are shared by prompt and response; roll bounds each, here by a half"
            draft.note("changed", "data.max_len", said)
    at = "actor_train.data_args"
    _files(source, draft, "data.prompt_dataset")
    column, chat = source.get("data.input_key"), source.get("data.apply_chat_template")
    draft.put(f"{at}.messages" if chat else f"{at}.prompt", column)
    draft.put(f"{at}.template", None if chat else "raw")
    if "score" not in draft.at("rewards"):
        draft.put(f"{at}.ground_truth", source.get("data.label_key"))
    every = source.count("eval.steps")
    if every > 0 and (files := source.get("eval.dataset")):
        draft.put("eval_steps", every)
        columns = {key: value for key, value in draft.at(at).items() if key not in ("file_name", "split")}
        split = source.get("eval.split")
        held_out = {"file_name": as_files(files), **({"split": split} if split != "train" else {})}
        draft.put("validation.data_args", {**held_out, **columns})
        sampled = {
            "temperature": source.number("eval.temperature"),
            "num_return_sequences": source.count("eval.n_samples_per_prompt"),
        }
        draft.put("validation.generating_args", sampled)


def _given_rows(source: Source, draft: Draft) -> None:
    """Write what the trainers on given rows have."""
    role = source.role
    if source.get("model.gradient_checkpointing_enable") is None:
        draft.put(f"{role}.model_args.gradient_checkpointing", "none")
    put_learner(draft, role, _preset(source, draft), source.devices)
    ranks = max(1, source.gpus // max(1, source.count("ds.ring_attn_size")))
    put_rows(
        draft, role, source.count("train.batch_size"), source.count("train.micro_batch_size"), ranks, "train.batch_size"
    )
    draft.put(f"{role}.training_args.num_train_epochs", source.count("train.max_epochs"))
    draft.put("max_length", source.count("data.max_len"))
    draft.put("truncation", "end")
    at = f"{role}.data_args"
    _files(source, draft, "data.dataset")
    _columns(source, draft, at)
    every = source.count("eval.steps")
    if every > 0 and (files := source.get("eval.dataset")):
        draft.put("eval_steps", every)
        columns = {key: value for key, value in draft.at(at).items() if key not in ("file_name", "split")}
        draft.put("validation.data_args", {"file_name": as_files(files), **columns})


def _columns(source: Source, draft: Draft, at: str) -> None:
    chat = source.get("data.apply_chat_template")
    if source.trainer == "sft":
        answer, question = source.get("data.output_key"), source.get("data.input_key")
        if source.get("model.pretrain_mode_enable"):
            draft.put(f"{at}.text", question)
        elif answer:
            draft.put(f"{at}.messages" if chat else f"{at}.prompt", question)
            draft.put(f"{at}.response", answer)
        else:
            draft.put(f"{at}.messages", question)
        if source.get("data.multiturn"):
            draft.put("loss_on", "assistant")
        return
    if source.trainer == "kto":
        draft.put("preference_loss", "kto")
        draft.put(f"{at}.messages", source.get("data.input_key"))
        draft.put(f"{at}.response", source.get("data.output_key"))
        draft.put(f"{at}.label", source.get("data.label_key") or "label")
    else:
        if question := source.get("data.prompt_key"):
            draft.put(f"{at}.messages" if chat else f"{at}.prompt", question)
        draft.put(f"{at}.chosen", source.get("data.chosen_key"))
        draft.put(f"{at}.rejected", source.get("data.rejected_key"))
    if source.trainer == "reward":
        draft.put(f"{at}.margin", "margin" if source.get("model.margin_loss_enable") else None)
        return
    draft.put("preference_loss", "ipo" if source.get("model.ipo_enable") else draft.at("preference_loss") or "dpo")
    draft.put("beta", source.number("model.beta"))
    draft.put("label_smoothing", source.get("model.label_smoothing") or None)
    if weight := source.get("model.nll_loss_coef"):
        draft.put("added_preference_losses", {"sft": weight})
    sharded = source.count("ds.zero_stage") == 3
    put_reference(draft, source.devices, sharded, source.get("ref.model_name_or_path"))
