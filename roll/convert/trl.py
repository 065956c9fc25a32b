"""Reads the keys of TRL's trainers that need more than a copy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roll.config.derived.methods import WHOLE
from roll.convert.draft import Draft
from roll.convert.rewards import UNSET, note_own_reward, put_own_reward, reward_name
from roll.convert.roles import (
    as_files,
    put_adapter,
    put_engine,
    put_learner,
    put_names,
    put_reference,
    put_rows,
    put_steps,
    put_trackers,
    updates_of,
)
from roll.convert.rows import COLUMNS, MESSAGES
from roll.convert.source import Source

PAGE = "docs/moving/from_trl.md"
ACCURACY = ("accuracy_reward", "accuracy", "reasoning_accuracy_reward", "trl.rewards.accuracy_reward")
REWARDS = {**dict.fromkeys(ACCURACY, "math_rule"), "repetition_penalty": "repetition_penalty"}
"""Rewards of TRL and open-r1 with a counterpart."""
AGGREGATES = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
CORRECTIONS = {
    "token_truncate": "tis",
    "token_mask": "icepop",
    "sequence_truncate": "seq_tis",
    "sequence_mask": "seq_mis",
}
PREFERENCES = {
    "sigmoid": "dpo",
    "ipo": "ipo",
    "simpo": "simpo",
    "sigmoid_norm": "dpo_norm",
    "kto": "kto",
    "orpo": "orpo",
}
PART, FILE = re.compile(r"[\[+]"), re.compile(r"\.(parquet|jsonl?|ndjson|csv|tsv|arrow)\b")
"""Sign of a split that is a part or a sum of others, and of the name of a file, of which all rows are read."""
PREFERENCE_OF = {"kto": "kto", "orpo": "orpo"}
PIPELINES = {"sft": "sft", "reward": "reward_model"}


def build_trl(source: Source, draft: Draft) -> None:
    """Write the experiment of a configuration of TRL."""
    draft.put("pipeline", "rlvr" if source.in_rlvr else PIPELINES.get(source.trainer, "dpo"))
    _model(source, draft)
    _names(source, draft)
    if source.in_rlvr:
        _sampled(source, draft)
    else:
        _given_rows(source, draft)


def _model(source: Source, draft: Draft) -> None:
    role = source.role
    if source.get("fp16"):
        draft.put(f"{role}.model_args.dtype", "fp16")
    elif source.get("bf16") is False:
        draft.put(f"{role}.model_args.dtype", "fp32")
    file = str(source.get("deepspeed") or source.launcher)
    stage = match[1] if (match := re.search(r"zero_?([0-3])|stage_?([0-3])", file)) else "3" if "fsdp" in file else "2"
    if not file:
        draft.note(
            "assumed", "deepspeed", "ZeRO-2 with bf16; accelerate's file says how it shards, and with how many GPUs"
        )
    put_learner(draft, role, f"deepspeed_zero{stage or '2'}" if stage != "0" else "deepspeed_zero", source.devices)
    targets = source.get("lora_target_modules")
    if source.get("use_peft"):
        if not targets:
            draft.note("assumed", "lora_target_modules", "q_proj,v_proj, which PEFT takes for most models")
            targets = "q_proj,v_proj"
        dropout = source.number("lora_dropout")
        variants = {key: source.get(key) for key in ("use_rslora", "use_dora")}
        put_adapter(draft, role, source.count("lora_r"), source.number("lora_alpha"), targets, dropout, **variants)
    if source.get("load_in_4bit"):
        _hold_in_4_bits(source, draft, role, stage)
    steps, share = source.number("warmup_steps"), source.number("warmup_ratio")
    draft.put(f"{role}.training_args.warmup_steps", int(steps) if steps >= 1 else None)
    draft.put(f"{role}.training_args.warmup_ratio", (steps if 0 < steps < 1 else share) or None if steps < 1 else None)
    if source.get("resume_from_checkpoint") is False:
        draft.put("resume_from_checkpoint", "never")


def _hold_in_4_bits(source: Source, draft: Draft, role: str, stage: str | None) -> None:
    """Hold the weights under the adapter in 4 bits, or say what stands against it."""
    if not source.get("use_peft") or source.get("use_dora") or stage == "3":
        draft.note(
            "lost", "load_in_4bit", "`quantized_base` needs `lora_target` without `use_dora`, and ZeRO-0, 1 or 2"
        )
        return
    if (kind := source.get("bnb_4bit_quant_type")) not in (None, "nf4"):
        draft.note("changed", "bnb_4bit_quant_type", f"{kind} becomes nf4")
    draft.put(f"{role}.model_args.quantized_base", "nf4_double" if source.get("use_bnb_nested_quant") else "nf4")
    if source.in_rlvr:
        draft.put("weight_sync.lora", "merged")


def _names(source: Source, draft: Draft) -> None:
    folder = draft.at("output_dir")
    name = source.get("run_name", "hub_model_id") or (
        str(folder).rstrip("/").split("/")[-1] if folder else source.trainer
    )
    put_names(draft, name, folder)
    if (trackers := source.get("report_to")) is not None:
        put_trackers(draft, "report_to", trackers, source.get("wandb_project"))
    strategy = source.get("eval_strategy", "evaluation_strategy")
    files, split, held_out, of_held_out = _files(source, draft, strategy in ("steps", "epoch"))
    at = f"{source.role}.data_args"
    draft.put(f"{at}.file_name", files)
    if PART.search(split) and FILE.search(str(files)):
        draft.note("lost", "dataset_train_split", f"all rows of a file are read; give a file with those of {split}")
        split = "train"
    draft.put(f"{at}.split", split if split != "train" else None)
    draft.put(f"{at}.preprocessing_num_workers", source.get("dataset_num_proc"))
    draft.put(f"{at}.chat_template_kwargs", source.get("chat_template_kwargs"))
    if held_out is not None:
        draft.put("validation.data_args.file_name", held_out)
        draft.put("validation.data_args.split", of_held_out if of_held_out != "train" else None)


def _files(source: Source, draft: Draft, validates: bool) -> tuple[Any, str, Any, str]:
    """Return the training files and their split, and the held-out files, None without a validation, and theirs."""
    split, held_out = str(source.get("dataset_train_split")), "test"
    if validates:
        held_out = str(source.get("dataset_test_split"))
    mixture = source.get("dataset_mixture", "datasets")
    if isinstance(mixture, Mapping):
        mixture = mixture.get("datasets")
    if isinstance(mixer := source.get("dataset_mixer"), Mapping):
        mixture = [{"id": name, "weight": weight} for name, weight in mixer.items()]
    if not isinstance(mixture, list):
        name = source.get("dataset_name")
        if name is None:
            draft.note("assumed", "dataset_name", "data/train.jsonl")
        files = as_files(name or "data/train.jsonl")
        return files, split, as_files(source.get("eval_dataset") or files) if validates else None, held_out
    entries = [entry for entry in mixture if isinstance(entry, Mapping)]
    splits = [(entry.get("id") or entry.get("path"), str(entry.get("split", "train"))) for entry in entries]
    trained = [(name, one) for name, one in splits if not one.startswith("test")]
    tested = [(name, one) for name, one in splits if one.startswith("test")]
    kinds = dict.fromkeys(one for _, one in trained)
    if len(kinds) > 1 or any(entry.get("config", "default") not in ("default", None) for entry in entries):
        said = "one split for all sets, and no configurations: write each set to a folder with save_to_disk"
        draft.note("lost", "dataset_mixture", said)
    if any(entry.get("weight", 1) not in (1, None) for entry in entries):
        draft.note("lost", "dataset_mixture.weight", "all rows are read; give a file with fewer rows")
    names = list(dict.fromkeys(name for name, _ in trained))
    if not names:
        draft.note("assumed", "dataset_mixture", "data/train.jsonl")
    return (
        as_files(names or "data/train.jsonl"),
        next(iter(kinds), split),
        as_files([tested[0][0]]) if tested and validates else None,
        tested[0][1] if tested else held_out,
    )


def _sampled(source: Source, draft: Draft) -> None:
    """Write what only the trainers that sample have."""
    draft.put("actor_infer.generating_args.top_k", source.count("top_k") or None)
    _step(source, draft)
    _policy_loss(source, draft)
    _correction(source, draft)
    _estimator(source, draft)
    put_engine(
        draft, source.devices, source.count("vllm_tensor_parallel_size"), source.gpus, "vllm_tensor_parallel_size"
    )
    if not source.get("use_vllm"):
        draft.note("changed", "use_vllm", "responses are generated by vllm")
    if source.get("vllm_mode") == "server":
        draft.note("changed", "vllm_mode", "the engine shares the GPUs of the trainer; for its own, set device_mapping")
    length = source.count("max_prompt_length")
    draft.put("prompt_length", length or 1024)
    if not length:
        draft.note("assumed", "max_prompt_length", "1024 tokens; longer prompts are left out and counted")
    longest = draft.at("prompt_length") + draft.at("response_length")
    if (length := source.count("vllm_max_model_length")) >= longest:
        draft.put("actor_infer.strategy_args.strategy_config.max_model_len", length)
    _rewards(source, draft)
    at = "actor_train.data_args"
    column, system = source.get("dataset_prompt_column"), source.get("system_prompt")
    draft.put(f"{at}.prompt" if column or system else f"{at}.messages", column or "prompt")
    draft.put(f"{at}.system", system)
    scorer = next(iter(draft.at("rewards")))
    if scorer != "score":
        draft.put(f"{at}.ground_truth", "solution")
    if not column:
        draft.note("assumed", "dataset_name", COLUMNS)
    _share_columns(draft, at, ("prompt", "messages", "system", "ground_truth"))
    if draft.at("validation"):
        sampled = {
            "num_return_sequences": source.get("num_generations_eval") or draft.at("num_return_sequences_in_group")
        }
        draft.put("validation.generating_args", sampled)


def _step(source: Source, draft: Draft) -> None:
    """Set the numbers of prompts, updates and steps. TRL counts completions and updates."""
    device, passes = source.count("per_device_train_batch_size"), source.count("gradient_accumulation_steps")
    group = draft.at("num_return_sequences_in_group")
    update = device * passes * source.gpus
    step = source.count("generation_batch_size") or device * source.gpus * (
        source.count("steps_per_generation") or passes
    )
    if step % group:
        draft.note("changed", "num_generations", f"{step} completions of a step are not a multiple of {group}")
    prompts = max(1, step // group)
    draft.put("rollout_batch_size", prompts)
    updates = updates_of(draft, "steps_per_generation", prompts * group, min(update, prompts * group))
    draft.put("updates_per_step", updates if updates > 1 else None)
    draft.put("actor_train.training_args.per_device_train_batch_size", device)
    of_step = updates * source.count("num_iterations")
    most = source.count("max_steps")
    steps = max(1, most // of_step) if most > 0 else None
    put_steps(draft, source, ("num_train_epochs",), prompts, steps)
    if source.get("save_strategy") == "steps":
        draft.put("save_steps", max(1, _steps_of(source, "save_steps", draft.at("max_steps") * of_step) // of_step))
    elif source.get("save_strategy") == "epoch":
        _per_epoch(source, draft, "save", prompts)
    if draft.at("validation") and source.get("eval_strategy", "evaluation_strategy") == "epoch":
        _per_epoch(source, draft, "eval", prompts)
    elif draft.at("validation"):
        every = _steps_of(source, "eval_steps", draft.at("max_steps") * of_step) or 500
        draft.put("eval_steps", max(1, every // of_step))


def _steps_of(source: Source, key: str, all_steps: int) -> int:
    """Return a number of updates that may be given as a share of all."""
    value = source.number(key)
    return int(value * all_steps) if 0 < value < 1 else int(value)


def _per_epoch(source: Source, draft: Draft, what: str, prompts: int) -> None:
    steps = source.rows // prompts if source.rows else 0
    draft.put(f"{what}_steps", max(1, steps) if steps else draft.at("max_steps"))
    if not steps:
        draft.note("assumed", f"{what}_strategy", f"an epoch is rows / {prompts} steps; give --rows NUMBER")


def _policy_loss(source: Source, draft: Draft) -> None:
    kind, level = str(source.get("loss_type")), source.get("importance_sampling_level")
    draft.put("loss_agg_mode", AGGREGATES.get(kind, "seq-mean-token-mean"))
    if kind == "dr_grpo":
        draft.put("loss_scale_factor", draft.at("response_length"))
    if kind == "bnpo":
        draft.note(
            "changed", "loss_type", "bnpo averages over the tokens of a device's batch, roll over those of an update"
        )
    if kind not in AGGREGATES:
        draft.note("lost", "loss_type", f"{kind} has no counterpart; gspo takes its place")
    by_level = "gspo" if level == "sequence" or kind not in AGGREGATES else "ppo"
    loss = kind if kind in ("cispo", "sapo") else by_level
    draft.put("policy_loss", loss)
    if loss == "sapo":
        draft.put("sapo_positive_temperature", source.get("sapo_temperature_pos"))
        draft.put("sapo_negative_temperature", source.get("sapo_temperature_neg"))
    elif loss == "cispo":
        draft.put("pg_clip_low", 1)
        bound = source.number("epsilon_high") or source.number("epsilon")
        draft.put("pg_clip_high", max(bound - 1, 0.001))
    else:
        low, high = source.number("epsilon"), source.get("epsilon_high")
        draft.put("pg_clip_low", low)
        draft.put("pg_clip_high", low if high is None else high)
    if loss == "ppo":
        draft.put("dual_clip_loss", source.get("delta"))
    draft.put("behaviour_log_probs", "trainer")


def _correction(source: Source, draft: Draft) -> None:
    """Set the correction of the mismatch, unless the engine samples from a part of its distribution."""
    if not (source.get("use_vllm") and source.get("vllm_importance_sampling_correction")):
        return
    sampled = draft.at("actor_infer.generating_args") or {}
    if narrowed := [key for key, whole in WHOLE.items() if sampled.get(key, whole) != whole]:
        said = f"none: with {' and '.join(narrowed)} the engine's log-probs are of another distribution"
        draft.note("changed", "vllm_importance_sampling_correction", said)
        return
    correction, is_known = source.named("vllm_importance_sampling_mode", CORRECTIONS, "tis")
    if not is_known:
        draft.note("lost", "vllm_importance_sampling_mode", "an unknown mode; tis takes its place")
    bound = source.number("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
    least = source.number("vllm_importance_sampling_clip_min")
    draft.put("mismatch_correction", correction)
    if correction in ("tis", "seq_tis"):
        draft.put("mismatch_cap", bound)
    else:
        draft.put("mismatch_low", least)
        draft.put("mismatch_high", bound)


def _estimator(source: Source, draft: Draft) -> None:
    scale = source.get("scale_rewards")
    if source.trainer == "rloo":
        draft.put("adv_estimator", "rloo")
    elif scale == "batch":
        draft.put("adv_estimator", "reinforce")
        draft.put("norm_mean_type", "group")
        draft.put("norm_std_type", "batch")
    else:
        draft.put(
            "adv_estimator", "dr_grpo" if source.given.get("scale_rewards", True) in (False, None, "none") else "grpo"
        )
    if (weight := source.number("beta")) > 0:
        draft.put("use_kl_loss", True)
        draft.put("kl_loss_coef", weight)
        draft.put("kl_loss_type", "k3")
        draft.put("kl_loss_importance", bool(source.get("use_bias_correction_kl")))
        put_reference(draft, source.devices, sharded="zero3" in str(draft.values["defaults"]))


def _rewards(source: Source, draft: Draft) -> None:
    names = source.get("reward_funcs") or []
    names = names if isinstance(names, list) else [names]
    if not names and any(key.startswith("**") for key in source.computed):
        names = ["reward_func"]  # a trainer has one, which may be in this mapping
    weights = source.get("reward_weights")
    weights = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    if model := source.get("reward_model_name_or_path"):
        draft.put("rewards.score.reward", UNSET if names else "reward_model")
        draft.put("rewards.score.model_args.model_name_or_path", model)
        draft.put("rewards.score.strategy_args.strategy_name", "hf_infer")
        draft.put("rewards.score.device_mapping", source.devices)
        if names:
            said = "no sum of a model and functions; set rewards.score.reward: reward_model for the model alone"
            draft.note("lost", "reward_funcs", f"{said}; until then a run is refused")
    elif len(names) > 1:
        _parts(draft, names, weights)
    elif not names:
        draft.put("rewards.math_rule.world_size", 8)
        draft.note("assumed", "reward_funcs", "math_rule, which compares with the reference answer")
    elif known := REWARDS.get(str(names[0])):
        draft.put(f"rewards.{known}.world_size", 8)
    else:
        put_own_reward(draft, "reward_funcs", names[0], reward_name(names[0]), PAGE)


def _parts(draft: Draft, names: Sequence[Any], weights: Sequence[float]) -> None:
    """Write a weighted sum of rewards, of which those without a counterpart must be set before a run."""
    parts: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for number, (name, weight) in enumerate(zip(names, weights, strict=True)):
        known = REWARDS.get(str(name))
        part = known or reward_name(name)
        part = f"{part}_{number}" if part in parts else part
        if not known:
            own[part] = name
        parts[part] = {"weight": weight} if part == known else {"reward": known or UNSET, "weight": weight}
    domain = "math_rule" if "math_rule" in parts else next(iter(parts))
    draft.put(f"rewards.{domain}.parts", parts)
    draft.put(f"rewards.{domain}.world_size", 8)
    if own:
        keys = [f"rewards.{domain}.parts.{part}.reward" for part in own]
        note_own_reward(draft, "reward_funcs", ", ".join(map(str, own.values())), keys, PAGE)


def _given_rows(source: Source, draft: Draft) -> None:
    """Write what the trainers on given rows have."""
    role = source.role
    total = source.count("per_device_train_batch_size") * source.count("gradient_accumulation_steps") * source.gpus
    put_rows(
        draft, role, total, source.count("per_device_train_batch_size"), source.gpus, "per_device_train_batch_size"
    )
    if (most := source.count("max_steps")) > 0:
        draft.put("max_steps", most)
        draft.put(f"{role}.training_args.num_train_epochs", most)  # TRL repeats the rows until max_steps
    else:
        epochs = source.number("num_train_epochs")
        if epochs != int(epochs):
            draft.note("changed", "num_train_epochs", f"{epochs:g} becomes {max(1, round(epochs))}: passes are whole")
        draft.put(f"{role}.training_args.num_train_epochs", max(1, round(epochs)))
    draft.put("max_length", source.count("max_seq_length", "max_length"))
    draft.put("truncation", "start" if source.get("truncation_mode") == "keep_end" else "end")
    every = {"steps": source.count("save_steps") or 500, "epoch": "epoch"}.get(str(source.get("save_strategy")))
    draft.put("save_steps", every)
    if draft.at("validation"):
        steps = source.count("eval_steps") or 500
        if source.get("eval_strategy", "evaluation_strategy") == "epoch":
            steps = source.rows // total if source.rows else 500
            draft.note("assumed", "eval_strategy", f"a validation every {steps} steps instead of each epoch")
        draft.put("eval_steps", max(1, steps))
    off = source.get("disable_dropout")
    draft.put(f"{role}.model_args.dropout", True if off is False else None)
    if source.trainer == "sft":
        _sft(source, draft)
    else:
        _pairs(source, draft)


def _sft(source: Source, draft: Draft) -> None:
    at = f"{source.role}.data_args"
    text = source.get("dataset_text_field")
    if text and text != "messages":
        draft.put(f"{at}.text", text)
    else:
        draft.put(f"{at}.messages", "messages")
        if not text:
            draft.note("assumed", "dataset_text_field", MESSAGES)
        if source.get("assistant_only_loss"):
            draft.put("loss_on", "assistant")
        else:
            draft.put("loss_on", "response" if source.get("completion_only_loss") else "all")
    _share_columns(draft, at, ("text", "messages"))


def _pairs(source: Source, draft: Draft) -> None:
    at = f"{source.role}.data_args"
    kinds = source.get("loss_type") if source.trainer == "dpo" else source.trainer
    kinds = kinds if isinstance(kinds, list) else [kinds]
    weights = source.get("loss_weights")
    weights = weights if isinstance(weights, list) else [1.0] * len(kinds)
    if source.trainer == "reward":
        draft.put(f"{at}.chosen", "chosen")
        draft.put(f"{at}.rejected", "rejected")
        draft.note("assumed", "dataset_name", "`chosen` and `rejected` are whole conversations")
        _share_columns(draft, at, ("chosen", "rejected"))
        return
    main = PREFERENCES.get(str(kinds[0]))
    if main is None:
        draft.note("lost", "loss_type", f"{kinds[0]} has no counterpart; dpo takes its place")
    draft.put("preference_loss", main or "dpo")
    draft.put("beta", source.number("beta"))
    added = {
        PREFERENCES.get(str(kind), str(kind)): weight for kind, weight in zip(kinds[1:], weights[1:], strict=False)
    }
    if alpha := source.get("rpo_alpha"):
        added["sft"] = alpha
    draft.put("added_preference_losses", added or None)
    if main == "kto":
        columns = {"messages": "prompt", "response": "completion", "label": "label"}
        draft.note("assumed", "dataset_name", "the columns are `prompt` (messages), `completion` and `label`")
    else:
        columns = {"chosen": "chosen", "rejected": "rejected"}
        draft.note(
            "assumed", "dataset_name", "`chosen` and `rejected` are whole conversations; else name data_args.prompt"
        )
    for key, column in columns.items():
        draft.put(f"{at}.{key}", column)
    _share_columns(draft, at, tuple(columns))
    if main not in ("orpo", "simpo"):
        sharded = "zero3" in str(draft.values["defaults"])
        put_reference(draft, source.devices, sharded, source.get("ref_model", "ref_model_name_or_path"))
    else:
        draft.drop("reference_log_probs")


def _share_columns(draft: Draft, at: str, keys: tuple[str, ...]) -> None:
    """Give the held-out rows the columns of the training rows."""
    if draft.at("validation"):
        for key in keys:
            draft.put(f"validation.data_args.{key}", draft.at(f"{at}.{key}"))
