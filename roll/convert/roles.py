"""Blocks of an experiment that the programs have in common: roles, devices, adapters, trackers and lengths of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from roll.convert.draft import Draft
from roll.convert.source import Source

TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")
EXPERTS = re.compile(r"-A\d+(\.\d+)?B|moe|mixtral", re.IGNORECASE)
"""Part of the names of models with experts."""
ON_GPUS = ("gpu_memory_utilization", "tensor_parallel_size")
"""Keys of an engine that are for GPUs."""
NAMELESS = re.compile(r"[^A-Za-z0-9_.-]+")


def device_list(first: int, number: int) -> str:
    """Return `number` devices from `first` on, as a value of `device_mapping`."""
    return f"list(range({first},{first + number}))"


def put_preset(draft: Draft, preset: str, changes: dict[str, Any] | None = None) -> None:
    """Include a preset of DeepSpeed, with changed keys."""
    defaults = draft.values.setdefault("defaults", ["_self_"])
    entry = f"../config/{preset}@_here_"
    if entry not in defaults:
        defaults.insert(len(defaults) - 1, entry)
    if changes:
        draft.put(preset, changes)


def put_shared_sequences(draft: Draft, preset: str, ranks: int) -> str:
    """Let so many ranks share each sequence, if there are several, and return the preset of that.

    It is not the plain preset, because a reference that is sharded by it scores whole sequences.
    """
    if ranks <= 1:
        return preset
    chosen = "deepspeed_zero3_ulysses" if preset == "deepspeed_zero3" else preset
    put_preset(draft, chosen, {"sequence_parallel_size": ranks})
    return chosen


def put_learner(draft: Draft, role: str, preset: str, devices: str) -> None:
    """Let DeepSpeed train a role with a preset."""
    put_preset(draft, preset)
    draft.put(f"{role}.strategy_args.strategy_name", "deepspeed_train")
    draft.put(f"{role}.strategy_args.strategy_config", f"${{{preset}}}")
    draft.put(f"{role}.device_mapping", devices)


def put_reference(draft: Draft, devices: str, sharded: bool, model: str | None = None) -> None:
    """Add the role `reference`, unless the adapter can be switched off instead. `sharded`: over all its devices."""
    if draft.at("actor_train.model_args.lora_target") and model is None:
        return
    if sharded:
        put_preset(draft, "deepspeed_zero3")
        draft.put("reference.strategy_args.strategy_name", "deepspeed_infer")
        draft.put("reference.strategy_args.strategy_config", "${deepspeed_zero3}")
    else:
        draft.put("reference.strategy_args.strategy_name", "hf_infer")
    draft.put("reference.model_args.model_name_or_path", model)
    for key in ("dtype", "trust_remote_code"):
        draft.put(f"reference.model_args.{key}", draft.at(f"actor_train.model_args.{key}"))
    draft.put("reference.device_mapping", devices)


def put_engine(draft: Draft, devices: str, tensor_parallel: int, most: int, place: str) -> None:
    """Let vLLM generate. `most`: GPUs of one node that the engine may use. `place`: the source's key of its size."""
    size = max(size for size in range(1, max(1, min(tensor_parallel, most)) + 1) if most % size == 0)
    if size != tensor_parallel:
        said = f"{tensor_parallel} becomes {size}: an engine does not span nodes, and divides the GPUs of the role"
        draft.note("changed", place, said)
    draft.put("actor_infer.strategy_args.strategy_name", "vllm")
    draft.put("actor_infer.strategy_args.strategy_config.tensor_parallel_size", size if size > 1 else None)
    draft.put("actor_infer.device_mapping", devices)
    for key in ("dtype", "trust_remote_code"):
        draft.put(f"actor_infer.model_args.{key}", draft.at(f"actor_train.model_args.{key}"))


def on_cpu(draft: Draft, source: Source) -> None:
    """Let every role run on the CPU: without devices, in fp32, and with a small cache of the engine. Say which keys of
    the source have no effect there.
    """
    before = dict(_leaves(draft.values))
    _move_to_cpu(draft)
    after = dict(_leaves(draft.values))
    gone = {path.split(".")[-1] for path, value in before.items() if after.get(path) != value}
    draft.note("changed", "bf16", "fp32, for the CPU")
    noted = {note.place for note in draft.notes}
    for key in source.given:
        rule = source.table.rule(key)
        if rule is None or key in noted or rule.part not in ("same", "values", "read"):
            continue
        if names := sorted(gone.intersection(re.findall(r"\w+", rule.said))):
            draft.note("idle", key, f"it is for GPUs, and this experiment is for the CPU ({', '.join(names)})")


def _leaves(block: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested blocks, with their paths."""
    for name, value in block.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _move_to_cpu(draft: Draft) -> None:
    draft.drop("num_gpus_per_node")
    roles = [one for one in draft.values.values() if isinstance(one, dict)]
    rewards = [one for one in draft.values.get("rewards", {}).values() if isinstance(one, dict)]
    for one in rewards:
        one["world_size"] = 1
    roles += rewards
    for role in roles:
        role.pop("device_mapping", None)
        if "strategy_args" not in role:
            continue
        role.setdefault("model_args", {})["dtype"] = "fp32"
        if role["strategy_args"]["strategy_name"] == "vllm":
            engine = role["strategy_args"].setdefault("strategy_config", {})
            kept = {key: value for key, value in engine.items() if key not in ON_GPUS}
            role["strategy_args"]["strategy_config"] = {**kept, "kv_cache_gib": 1, "enforce_eager": True}


def put_adapter(
    draft: Draft, role: str, rank: int, alpha: float | None, targets: Any, dropout: Any = None, **variants: Any
) -> None:
    """Add a LoRA adapter to a role, with `variants` of it, by their keys here. No adapter if the rank is 0."""
    if rank <= 0:
        return
    is_fp32 = draft.at(f"{role}.model_args.dtype") == "fp32"
    if draft.at("pipeline") == "rlvr" and (is_fp32 or EXPERTS.search(str(draft.at("pretrain")))):
        draft.put("weight_sync.lora", "merged")  # vLLM loads no adapters in fp32, or on fused experts
    names = targets if isinstance(targets, str) else ",".join(map(str, targets or ["all-linear"]))
    draft.put(f"{role}.model_args.lora_target", names.strip("[]").replace(" ", ""))
    draft.put(f"{role}.model_args.lora_rank", rank)
    draft.put(f"{role}.model_args.lora_alpha", alpha)
    draft.put(f"{role}.model_args.lora_dropout", dropout or None)
    for key, value in variants.items():
        draft.put(f"{role}.model_args.{key}", value or None)


def put_trackers(draft: Draft, place: str, value: Any, project: str | None) -> None:
    """Set the trackers that a value names, and the project of wandb and swanlab."""
    names = value if isinstance(value, list) else [value]
    if "all" in names:
        draft.note("changed", place, "all is tensorboard")
        names = ["tensorboard"]
    known = [name for name in names if name in TRACKERS]
    if others := [name for name in names if name not in (*TRACKERS, "console", "none", "file", None, False)]:
        draft.note("lost", place, f"no tracker {', '.join(map(str, others))}; roll has {', '.join(TRACKERS)}")
    draft.put("track_with", known[0] if len(known) == 1 else known or "none")
    for name in known:
        if name in ("wandb", "swanlab") and project:
            draft.put(f"tracker_kwargs.{name}.project", project)


def put_names(draft: Draft, name: str, folder: str | None) -> None:
    """Set the names of the run and its folder."""
    draft.put("exp_name", NAMELESS.sub("-", str(name)).strip("-") or "converted")
    draft.put("output_dir", folder or "./output/${exp_name}")


def put_steps(draft: Draft, source: Source, places: Sequence[str], prompts: int, most: int | None) -> None:
    """Set `max_steps` of `rlvr`: the given number, or that of the epochs, for which the number of rows is needed.

    Args:
        draft: the experiment.
        source: the source.
        places: keys of the number of epochs.
        prompts: prompts of a step.
        most: the number of steps, if the source says it.
    """
    if most:
        draft.put("max_steps", most)
        return
    epochs = source.number(*places)
    if source.rows:
        draft.put("max_steps", max(1, math.floor(epochs * source.rows / prompts)))
    else:
        draft.put("max_steps", 1)
        said = f"{epochs:g} epochs are {epochs:g} x rows / {prompts} steps, and the rows cannot be counted"
        draft.note("assumed", places[-1], f"{said}: max_steps is 1; give --rows NUMBER")


def updates_of(draft: Draft, place: str, total: int, update: int) -> int:
    """Return the number of updates into which the sequences or prompts of a step are divided, which divides them."""
    wanted = max(1, round(total / max(1, update)))
    best = min((number for number in range(1, total + 1) if total % number == 0), key=lambda one: abs(one - wanted))
    if best * update != total:
        draft.note("changed", place, f"{total} are not a multiple of {update}: a step makes {best} equal updates")
    return best


def put_rows(draft: Draft, role: str, total: int, micro: int, ranks: int, place: str) -> None:
    """Set the batch of a role that trains on rows: `total` rows in each update, in passes of `micro` on each rank."""
    sizes = [size for size in range(1, max(1, micro) + 1) if total % (size * ranks) == 0]
    size = max(sizes, default=1)
    passes = max(1, total // (size * ranks))
    if size * passes * ranks != total:
        draft.note("changed", place, f"{total} rows of an update become {size * passes * ranks}, for {ranks} ranks")
    draft.put(f"{role}.training_args.per_device_train_batch_size", size)
    draft.put(f"{role}.training_args.gradient_accumulation_steps", passes)


def budget(draft: Draft, role: str, tokens: int, longest: int) -> None:
    """Set the token budget of a role, which is at least the longest sequence."""
    draft.put(f"{role}.max_tokens_per_microbatch", max(tokens, longest))


def as_files(value: Any) -> Any:
    """Return the names of files of `a`, `[a, b]` or `a,b`, as one text or a list."""
    names: Sequence[Any] = value if isinstance(value, list) else str(value).split(",")
    clean = [str(name).strip() for name in names if str(name).strip()]
    return clean[0] if len(clean) == 1 else clean
