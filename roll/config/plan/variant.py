"""The variant of a run: the keys that determine its training. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from roll.config.derived.batch import learner
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.secrets import redacted

MODEL = (
    "lora_target",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "dtype",
    "gradient_checkpointing",
    "attn_implementation",
)
ADAPTER = MODEL[1:4]
"""Keys that have no effect if all weights are trained."""
ZERO = ("stage", "offload_optimizer", "offload_optimizer.device", "offload_param", "offload_param.device")
TRAINING = (
    "optimizer",
    "learning_rate",
    "lora_learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "warmup_ratio",
    "weight_decay",
)
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "seeded")
RLVR: Mapping[str, Sequence[str]] = {
    "Advantages": (
        "adv_estimator",
        "gamma",
        "norm_mean_type",
        "norm_std_type",
        "whiten_advantages",
        "dynamic_sampling",
    ),
    "Loss": (
        "policy_loss",
        "pg_clip",
        "pg_clip_low",
        "pg_clip_high",
        "dual_clip_loss",
        "loss_agg_mode",
        "entropy_loss_coef",
        "ppo_epochs",
    ),
    "Correction": ("behaviour_log_probs", "mismatch_correction", "mismatch_cap"),
    "KL": (
        "use_kl_loss",
        "kl_loss_coef",
        "kl_loss_type",
        "add_token_level_kl",
        "init_kl_coef",
        "kl_penalty",
        "target_kl",
    ),
}
OTHERS: Mapping[str, Sequence[str]] = {
    "Loss": (
        "loss_on",
        "preference_loss",
        "beta",
        "label_smoothing",
        "simpo_gamma",
        "reference_log_probs",
        "divergence",
        "temperature",
    )
}
"""Keys to show for offline pipelines."""
COMMON: Mapping[str, Sequence[str]] = {
    "Steps": ("save_steps", "eval_steps", "seed", "max_grad_norm", "resume_from_checkpoint"),
    "Trackers": ("track_with",),
}
ELSEWHERE = ("exp_name", "output_dir", "pipeline", "dry_run", "max_steps")
"""Keys in the plan's first line."""
SHOWN_AS_RANKS = ("device_mapping", "world_size", "strategy_args.strategy_name")
"""Keys of a role in the plan's first table."""
NONE = "none"
SAYS_WITHOUT = ("lora_target", "offload_optimizer", "offload_param")
"""Keys that are shown even if they are not set, because `none` is informative: all weights are trained, nothing is
offloaded.
"""
ENGINE_KEYS = "strategy_args.strategy_config."
"""Part of a key path that is not shown, because the keys in these blocks are unique without it."""


def variant_lines(config: Config) -> list[str]:
    """Return a line for each subject with its keys and values, then a line for each block with the other keys that
    differ from defaults.

    If two configurations differ in a key, a line that names this key differs as well. Exceptions are keys with secrets,
    and the keys in ELSEWHERE and SHOWN_AS_RANKS, which other parts of the plan show.
    """
    values = flat_text(redacted(config.model_dump(mode="json")))
    given = flat_text(redacted(config.model_dump(mode="json", exclude_defaults=True)))
    lines, told = list[str](), set[str]()
    for subject, prefix, keys in _subjects(config):
        paths = {key: f"{prefix}{key}" for key in keys}
        present = {
            key: path
            for key, path in paths.items()
            if values.get(path, NONE) != NONE or (key in SAYS_WITHOUT and path in values)
        }
        told.update(present.values())
        if present:
            block = prefix.replace(ENGINE_KEYS, "").removesuffix(".")
            shown = ", ".join(f"{key} {values[path]}" for key, path in present.items())
            lines.append(f"{subject}: {block + ': ' if block else ''}{shown}")
    return lines + _rest({path: value for path, value in given.items() if path not in told})


def _subjects(config: Config) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield each subject with the path of the block that contains its keys, and the keys."""
    name, role = learner(config)
    model = [key for key in MODEL if role.model_args.lora_target or key not in ADAPTER]
    yield "Learns", f"{name}.model_args.", model
    yield "ZeRO", f"{name}.{ENGINE_KEYS}zero_optimization.", ZERO
    epochs = () if isinstance(config, RlvrConfig) else ("num_train_epochs",)
    yield "Optimizer", f"{name}.training_args.", (*TRAINING, *epochs)
    for subject, keys in (RLVR if isinstance(config, RlvrConfig) else OTHERS).items():
        yield subject, "", keys
    if isinstance(config, RlvrConfig):
        yield "Sampling", "actor_infer.generating_args.", SAMPLING
    for subject, keys in COMMON.items():
        yield subject, "", keys


def _rest(given: Mapping[str, str]) -> list[str]:
    """Return a line for each block, with the given keys and their values."""
    blocks = dict[str, list[str]]()
    for path, value in given.items():
        block, _, key = path.partition(".")
        if path in ELSEWHERE or key in SHOWN_AS_RANKS:
            continue
        blocks.setdefault(block if key else "Further keys", []).append(
            f"{key.replace(ENGINE_KEYS, '') or path} {value}"
        )
    return [
        f"{block}: {', '.join(keys)}"
        for block, keys in sorted(blocks.items(), key=lambda one: one[0] != "Further keys")
    ]


def flat_text(tree: Any, path: str = "") -> dict[str, str]:
    """Return the values in nested plain blocks as text, by dotted path. Empty blocks are left out."""
    if isinstance(tree, Mapping):
        return {
            name: text
            for key, value in tree.items()
            for name, text in flat_text(value, f"{path}.{key}" if path else str(key)).items()
        }
    return {path: yaml_text(tree)}


def yaml_text(value: Any) -> str:
    """Return a value as YAML writes it, without quotes."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_text, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: NONE, True: "true", False: "false"}[value]
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
