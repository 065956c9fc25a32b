"""Checks keys against each other. roll never overrides a key that the user set, so every contradiction is a fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.config.checks.algorithm import credit_faults, credit_warnings, loss_faults, loss_warnings, method_faults
from roll.config.checks.curriculum import curriculum_faults
from roll.config.checks.domains import domain_faults, environment_warnings
from roll.config.checks.held_out import watched_metric_faults
from roll.config.checks.offline import (
    column_faults,
    offline_faults,
    offline_warnings,
    on_policy_distillation_faults,
    rows_of,
)
from roll.config.checks.partners import partner_faults
from roll.config.checks.pictures import picture_key_faults
from roll.config.checks.plausible import plausible_warnings
from roll.config.checks.rules import rule_faults
from roll.config.checks.self_distillation import self_distillation_faults
from roll.config.derived.batch import learner
from roll.config.derived.flops import GPUS, gpu_rates
from roll.config.derived.held_out import held_out_warnings
from roll.config.derived.hints import has_frozen_teacher
from roll.config.derived.methods import compares, has_kl
from roll.config.derived.placement import generates, model_roles, ranks, sharing_with_engines
from roll.config.derived.trackers import TRACKERS, chosen_trackers
from roll.config.schema.faults import printable
from roll.config.schema.model import LORA_KEYS
from roll.config.schema.offline import DpoConfig, OfflineConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ActorInferConfig, LearnerConfig, RoleConfig, RowsTrainConfig, ValidationConfig
from roll.config.schema.secrets import HIDDEN
from roll.errors import Fault
from roll.registry import nearest


def determinism_faults(config: Config) -> Iterator[Fault]:
    """Yield a fault for each role with compiled layers: their kernels are chosen by speed, so rounding may differ."""
    for name, role in model_roles(config).items() if config.deterministic else ():
        wish = role.model_args.compile_layers
        if not role.strategy_args.traits.own_kernels and (wish is True or wish == "auto" and role.device_mapping):
            problem = (
                f"{printable(wish)}, but deterministic is true, and compiled layers "
                "choose their kernels by measured speed"
            )
            yield Fault(
                f"{name}.model_args.compile_layers",
                problem,
                f"set {name}.model_args.compile_layers=false",
                "contradiction",
            )


def determinism_warnings(config: RlvrConfig) -> Iterator[str]:
    """Yield warnings about differences between runs that `deterministic` alone does not prevent."""
    if not config.deterministic:
        return
    if not config.actor_infer.generating_args.seeded:
        yield "deterministic: responses still differ between runs; set actor_infer.generating_args.seeded=true"
    infer = config.actor_infer
    if (key := infer.strategy_args.traits.invariance_key) and infer.device_mapping is not None:
        key = f"actor_infer.strategy_args.strategy_config.{key}"
        yield f"deterministic: responses depend on what an engine generates together, and so on timing; set {key}=true"
    if config.async_generation_ratio:
        yield "deterministic: which weights sample a token depends on timing; set async_generation_ratio=0"


def upload_faults(config: Config) -> Iterator[Fault]:
    """Yield faults of an upload without an export, and of its visibility without an upload."""
    if config.push_to_hub is not None and not config.save_at_end:
        problem = f"'{config.push_to_hub}', but save_at_end is false, so that nothing is exported"
        yield Fault("push_to_hub", problem, "remove one of the two keys", "contradiction")
    if config.push_to_hub is None and "push_to_hub_private" in config.model_fields_set:
        remedy = "set push_to_hub to owner/name, or remove it"
        yield Fault("push_to_hub_private", "set, but nothing is uploaded", remedy, "owner_missing")


def gpu_faults(config: Config) -> Iterator[Fault]:
    """Yield a fault if `gpu_name` names no GPU whose rates are known."""
    name = config.gpu_name
    if name is not None and gpu_rates(name) is None:
        known = [gpu.name for gpu in GPUS]
        problem = f"the rates of a GPU named {printable(name)} are not known{nearest(name, known)}"
        remedy = f"use one of: {', '.join(known)}; or remove the key, which only the plan's estimate of time reads"
        yield Fault("gpu_name", problem, remedy, "unknown_name")


def experiment_faults(config: Config) -> list[Fault]:
    """Return a fault for each contradiction among the keys of a configuration that passed the schema."""
    faults = [*rule_faults(config), *_experiment(config), *_learner(config), *method_faults(config)]
    faults += [*determinism_faults(config), *gpu_faults(config), *watched_metric_faults(config)]
    faults += [*upload_faults(config), *picture_key_faults(config), *_secrets(config.model_dump(mode="json"))]
    for name, role in model_roles(config).items():
        faults += _kernels(name, role)
        target = role.model_args.lora_target
        if open_names := [one.strip() for one in (target or "").split(",") if one.strip().endswith(".")]:
            problem = f"'{open_names[0]}' is the start of names, but a layer is chosen by the end of its name"
            remedy = "use all-linear, which adapts every linear layer of the decoder, or names such as q_proj,v_proj"
            faults.append(Fault(f"{name}.model_args.lora_target", problem, remedy, "malformed"))
        if target and not isinstance(role, LearnerConfig | ActorInferConfig):
            problem = f"'{target}', but {name} is a fixed model without an adapter"
            faults.append(Fault(f"{name}.model_args.lora_target", problem, "remove it", "not_supported"))
        if role.model_args.use_dora and isinstance(kind := role.model_args.init_lora_weights, str):
            problem = f"true, but init_lora_weights is {kind}, and the two are not combined here"
            faults.append(Fault(f"{name}.model_args.use_dora", problem, "set only one of the two", "exclusive"))
        if role.model_args.dropout and not isinstance(role, RowsTrainConfig):
            problem = f"true, but only roles that train on rows drop anything, and {name} is none of them"
            faults.append(Fault(f"{name}.model_args.dropout", problem, "remove it", "not_supported"))
    if isinstance(config, OfflineConfig):
        faults += offline_faults(config)
    else:
        faults += [
            *_window(config),
            *_while_training(config),
            *_running(config),
            *_kl(config),
            *credit_faults(config),
            *loss_faults(config),
        ]
        faults += [*on_policy_distillation_faults(config), *self_distillation_faults(config)]
        faults += [*_same_policy(config), *domain_faults(config), *partner_faults(config)]
        faults += [*curriculum_faults(config), *_replay(config), *_replayed_run(config)]
    return faults


def _secrets(tree: Any, place: str = "") -> Iterator[Fault]:
    """Yield a fault for each value that the record of a run hides."""
    if isinstance(tree, Mapping):
        for key, below in tree.items():
            yield from _secrets(below, f"{place}.{key}".lstrip("."))
    elif isinstance(tree, list):
        for number, below in enumerate(tree):
            yield from _secrets(below, f"{place}[{number}]")
    elif tree == HIDDEN:
        yield Fault(place, "the record of a run holds no secrets", f"give it again: {place}=...", "missing")


def _experiment(config: Config) -> Iterator[Fault]:
    trackers = chosen_trackers(config)
    for tracker in trackers:
        if tracker not in TRACKERS:
            problem = f"unknown tracker '{tracker}'{nearest(tracker, list(TRACKERS))}"
            yield Fault("track_with", problem, f"use one of: {', '.join(TRACKERS)}", "unknown_name")
    for name in config.tracker_kwargs:
        if name not in trackers:
            remedy = f"remove it, or add it to track_with, which is {', '.join(trackers) or 'empty'}"
            yield Fault(f"tracker_kwargs.{name}", f"'{name}' is not a tracker of this run", remedy, "owner_missing")
    if isinstance(config, RlvrConfig) and config.eval_steps and config.validation is None:
        problem = f"{config.eval_steps}, but there is no validation block"
        yield Fault("eval_steps", problem, "add validation.data_args, or set eval_steps to 0", "owner_missing")


def _learner(config: Config) -> Iterator[Fault]:
    name, role = learner(config)
    if role.data_args:
        yield from column_faults(
            f"{name}.data_args", role.data_args, rows_of(config) if isinstance(config, OfflineConfig) else "prompts"
        )
    if isinstance(config, RlvrConfig) and config.validation:
        yield from _held_out(config.validation)


def _held_out(validation: ValidationConfig) -> Iterator[Fault]:
    sets, places = validation.named_sets(), validation.places()
    for name, place in places.items():
        if columns := sets[name].data_args:
            yield from column_faults(f"{place}.data_args", columns, "prompts")
        elif not sets[name].rows:
            yield Fault(
                f"{place}.data_args",
                "missing",
                "add the data file of the set's prompts, or rows of environments",
                "missing",
            )
    if not sets:
        problem = "missing, and there are no validation.sets"
        yield Fault("validation.data_args", problem, "add the data file of one set, or several sets", "missing")
    if validation.sets and (validation.data_args or validation.rows or "name" in validation.model_fields_set):
        key = "data_args" if validation.data_args else "rows" if validation.rows else "name"
        problem = "set, and so is validation.sets, where each set has its own name and data_args"
        yield Fault(f"validation.{key}", problem, "remove it, or move it into one of the sets", "exclusive")


def _window(config: RlvrConfig) -> Iterator[Fault]:
    window, batch = config.rollout_window, config.rollout_batch_size
    if window is None:
        return
    if window % batch:
        multiples = f"{window // batch * batch} or {(window // batch + 1) * batch}" if window > batch else str(batch)
        yield Fault(
            "rollout_window",
            f"{window} is not divisible by rollout_batch_size {batch}",
            f"use {multiples}",
            "not_divisible",
        )
    elif window > batch and not config.async_generation_ratio:
        problem = (
            f"{window}, but async_generation_ratio is 0: a step generates only the {batch} prompts that it trains on"
        )
        yield Fault("rollout_window", problem, "set async_generation_ratio above 0, or remove this key", "no_effect")


def _while_training(config: RlvrConfig) -> Iterator[Fault]:
    if not config.generate_while_training:
        return
    place = "generate_while_training"
    if not config.async_generation_ratio:
        problem = "true, but async_generation_ratio is 0: no response is unfinished while a role trains"
        yield Fault(place, problem, "set async_generation_ratio above 0, or remove this key", "no_effect")
    elif not sharing_with_engines(config):
        problem = "true, but actor_infer shares no device with a trained role, so that its engines never pause"
        yield Fault(place, problem, "remove it", "no_effect")
    elif config.time_sharing:
        problem = "true, but time_sharing is true: the engines leave their devices while a role trains"
        yield Fault(place, problem, "set time_sharing=false, or remove this key", "contradiction")


def _running(config: RlvrConfig) -> Iterator[Fault]:
    most, strategy = config.max_running_samples, config.actor_infer.strategy_args
    if most is None:
        return
    if strategy.traits.most_requests is None:
        problem = f"{most}, but {strategy.strategy_name} answers one prompt at a time"
        yield Fault("max_running_samples", problem, "remove it, or use the strategy vllm", "no_effect")
    elif most < (engines := ranks(config.actor_infer) // strategy.traits.devices_per_rank):
        problem = f"{most}, but actor_infer has {engines} engines"
        yield Fault("max_running_samples", problem, f"set it to at least {engines}, or remove it", "too_small")


def _kernels(name: str, role: RoleConfig) -> Iterator[Fault]:
    if role.device_mapping is not None:
        return
    model = role.model_args
    if isinstance(role, LearnerConfig) and model.dtype == "fp16":
        problem = "'fp16', but the role trains on the CPU, where DeepSpeed supports only bf16 and fp32"
        yield Fault(
            f"{name}.model_args.dtype",
            problem,
            f"set it to fp32 or bf16, or set {name}.device_mapping",
            "not_supported",
        )
    if model.liger and not role.strategy_args.traits.own_kernels:
        problem = "true, but its kernels are for GPUs, and the role runs on the CPU"
        yield Fault(
            f"{name}.model_args.liger", problem, f"remove the key, or set {name}.device_mapping", "not_supported"
        )


def uses_reference(config: Config) -> bool:
    """Return whether a term of the loss or of the reward uses the reference policy, or it is the self-teacher."""
    if isinstance(config, OfflineConfig):
        return isinstance(config, DpoConfig) and compares(config)
    return has_kl(config) or has_frozen_teacher(config)


def _kl(config: RlvrConfig) -> Iterator[Fault]:
    for switch, weight in (("use_kl_loss", "kl_loss_coef"), ("add_token_level_kl", "init_kl_coef")):
        on, coefficient = getattr(config, switch), getattr(config, weight)
        if on and not coefficient:
            problem = f"0, but {switch} is true: the term would have no effect"
            yield Fault(weight, problem, f"set it above 0 (0.001 is usual), or set {switch}=false", "no_effect")
        if coefficient and not on:
            yield Fault(
                switch,
                f"false, but {weight} is {coefficient:g}",
                f"set {switch}=true, or remove {weight}",
                "owner_missing",
            )
    if has_kl(config) and config.reference is None and not config.actor_train.model_args.lora_target:
        term = "use_kl_loss" if config.use_kl_loss else "add_token_level_kl"
        problem = f"missing, but {term} needs it (with LoRA, actor_train without its adapter would replace it)"
        yield Fault(
            "reference", problem, f"add a reference block (strategy_name: hf_infer), or set {term}=false", "missing"
        )


def _same_policy(config: RlvrConfig) -> Iterator[Fault]:
    train, infer = config.actor_train.model_args, config.actor_infer.model_args
    for key in ("model_name_or_path", "lora_target", *LORA_KEYS):
        ours, theirs = getattr(train, key), getattr(infer, key)
        if key in infer.model_fields_set and theirs != ours:
            problem = f"{theirs!r}, but actor_train.model_args.{key} is {ours!r}, and both roles hold the same policy"
            yield Fault(
                f"actor_infer.model_args.{key}", problem, "remove it, or make the two values equal", "contradiction"
            )


def _replay(config: RlvrConfig) -> Iterator[Fault]:
    strategy = config.actor_infer.strategy_args
    if config.router_replay and not strategy.traits.returns_routes:
        problem = f"true, but {strategy.strategy_name}, the strategy of actor_infer, does not return routes"
        remedy = "remove it, or set actor_infer.strategy_args.strategy_name to vllm"
        yield Fault("router_replay", problem, remedy, "not_supported")


def _replayed_run(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of a replay of the run's own rollouts, and of one that needs what it does not start."""
    if config.replay_from is None:
        return
    if Path(config.replay_from).absolute() == Path(config.output_dir).absolute():
        problem = f"'{config.replay_from}' is output_dir, too, so that the run would write into what it reads"
        yield Fault("replay_from", problem, "use another output_dir", "contradiction")
    if config.eval_steps:
        problem = f"{config.eval_steps}, but with replay_from no engine is started that could answer held-out prompts"
        yield Fault("eval_steps", problem, "set eval_steps=0", "contradiction")


def _own_attention(config: Config) -> Iterator[str]:
    """Yield a warning for each role that chooses its attention kernel itself, whatever its key says."""
    for name, role in model_roles(config).items():
        if generates(name, role) and (kernel := role.model_args.attn_implementation) != "auto":
            where = f"{name}.model_args.attn_implementation"
            yield f"{where}: {kernel} has no effect: a role that generates chooses its kernel itself; remove the key"


def experiment_warnings(config: Config) -> list[str]:
    """Return warnings about keys without an effect, and about numbers that are hardly ever meant."""
    unusual = [*plausible_warnings(config.model_dump(mode="json", exclude_defaults=True)), *_own_attention(config)]
    unusual += held_out_warnings(config)
    if isinstance(config, OfflineConfig):
        return [*unusual, *offline_warnings(config)]
    warnings = [
        *unusual,
        *determinism_warnings(config),
        *loss_warnings(config),
        *credit_warnings(config),
        *environment_warnings(config),
    ]
    if config.validation and not config.eval_steps:
        warnings.append("validation: given, but eval_steps is 0, so it never runs")
    if "num_train_epochs" in config.actor_train.training_args.model_fields_set:
        warnings.append("actor_train.training_args.num_train_epochs: has no effect here; RLVR ends after max_steps")
    return warnings


def experiment_notes(config: Config) -> list[str]:
    """Return notes on settings that work, but use more memory than necessary."""
    if not isinstance(config, RlvrConfig) or not (config.reference and uses_reference(config)):
        return []
    if config.actor_train.model_args.lora_target and _is_start(config):
        return [
            "reference: with LoRA, actor_train with its adapter off is the same policy; remove this block to free its "
            "memory"
        ]
    return []


def _is_start(config: RlvrConfig) -> bool:
    reference = config.reference.model_args.model_name_or_path if config.reference else None
    return (reference or config.pretrain) == (config.actor_train.model_args.model_name_or_path or config.pretrain)
