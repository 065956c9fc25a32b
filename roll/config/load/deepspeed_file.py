"""Reads DeepSpeed's own configuration: from a file, and with the blocks that roll has keys for.

`optimizer`, `scheduler` and the batch sizes become keys of `training_args`, `fp16` or `bf16` the role's precision,
`gradient_clipping` the experiment's `max_grad_norm`, and `tensorboard` and `wandb` its trackers, with the meaning that
DeepSpeed gives them. If both say it, with different values, that is a fault that names both. "auto" means, as in
transformers, that the role's own key decides. Keys of a file that change no result are warnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hjson
import yaml

from roll.config.load.accelerate_file import accelerate_fault, read_accelerates
from roll.config.roll_v2.translate import Translation
from roll.config.schema.faults import printable
from roll.config.schema.foreign_names import (
    DEEPSPEED_BLOCKS,
    DEEPSPEED_IDLE,
    DEEPSPEED_REFUSED,
    DEEPSPEED_SCHEDULES,
    REMOVED_OPTIMIZERS,
)
from roll.config.shipped import deepspeed_presets
from roll.registry import nearest

AUTO = "auto"
ENDINGS = (".json", ".jsonc", ".hjson")
"""Endings of names of DeepSpeed's files."""
STRATEGIES = ("deepspeed_train", "deepspeed_infer")
OPTIMIZERS: Mapping[str, str] = {
    "adam": "adamw",
    "adamw": "adamw",
    "lion": "lion",
    "adagrad": "adagrad",
    "muon": "muon",
    "onebitadam": "onebit_adam",
    "zerooneadam": "zero_one_adam",
    "onebitlamb": "onebit_lamb",
}
"""DeepSpeed's names of optimizers, of which case does not count, and roll's."""
RATES = {"lr": "learning_rate", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
BETAS = ("adam_beta1", "adam_beta2")
USUAL: Mapping[str, Any] = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False, "torch_adam": False}
"""Parameters of DeepSpeed's optimizers that have one value here."""
PARTS = ("type", "params")
"""Keys of DeepSpeed's blocks `optimizer` and `scheduler`."""
WARMUP, PEAK, ALL_STEPS = "warmup_num_steps", "warmup_max_lr", 1000
"""Parameters of DeepSpeed's schedules that are keys of `training_args`, and DeepSpeed's default of the first."""
RATE = 1e-3
"""DeepSpeed's default learning rate of Adam."""
RLVR = "rlvr"
"""Default of `pipeline`."""
DTYPE = "bf16"
"""Default of `model_args.dtype`."""
NEUTRAL: Mapping[str, Any] = {"gradient_predivide_factor": 1.0}
"""Values of refused keys that change nothing, besides false."""
ZERO, FIRST_OVERLAPPING = "zero_optimization", 2
"""DeepSpeed's block of ZeRO, and the first stage on which communication overlaps with the backward pass."""
UNREAD: Mapping[str, Any] = {ZERO: {"stage": 0}}
"""Blocks in place of a file with a fault, so that no second fault says that they are missing."""
OLD_NAMES = {"bfloat16": "bf16"}
SHORT_NAMES = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)  # fmt: skip
"""Keys of `zero_optimization` that DeepSpeed reads with and without `stage3_` before them."""
OF_OTHERS = {
    "activation_checkpointing": (
        ("contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile"),
        "torch recomputes the layers",
    ),
    "fp16": (("auto_cast",), "inputs are token ids, which are not cast"),
    "aio": (("thread_count",), "DeepSpeed no longer reads it; intra_op_parallelism is the number of threads"),
}
"""By block, keys that change no result, and why."""
OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Keys that DeepSpeed has replaced by blocks, and still reads."""
WANDB = {"project": "project", "team": "entity", "group": "group"}
"""DeepSpeed's keys of Weights & Biases, and those of `tracker_kwargs.wandb`."""
COMPILES, INDUCTOR = "compile_layers", "inductor"
"""Key of `model_args`, and the default backend of torch.compile, the only one here."""
MONITORS = "monitor_config"
NORM = 1.0
"""Default of `max_grad_norm`."""
UNBOUNDED = 1e12
"""The largest `max_grad_norm`, which never clips."""


def settle_deepspeed(done: Translation) -> None:
    """Replace the path of a DeepSpeed file by its blocks, and translate in place the blocks that roll has keys for."""
    chooses_trackers = "track_with" not in done.values
    for name, role in _roles(done.values):
        strategy = role["strategy_args"]
        where = f"{name}.strategy_args.strategy_config"
        path = strategy.get("strategy_config")
        is_file = isinstance(path, str) and path.endswith(ENDINGS)  # another text is perhaps the name of a preset
        if is_file:
            strategy["strategy_config"] = _read(path, where, done)
        elif isinstance(path, str) and (others := read_accelerates(path)) is not None:
            fault = accelerate_fault(where, others, name)
            done.fault(where, fault.problem, fault.remedy, fault.code)
            strategy["strategy_config"] = dict(UNREAD)
            done.is_whole = False
        block = strategy.get("strategy_config")
        if isinstance(block, dict):
            translated = _Block(name, role, block, where, done)
            if is_file and done.is_whole:
                translated.settle_idle()
            translated.settle(strategy["strategy_name"] == STRATEGIES[0], chooses_trackers)


def settle_presets(values: dict[str, Any]) -> None:
    """Replace in place the name of a shipped preset, as the value of `strategy_config`, by its blocks.

    A root key of that name, as a file's `defaults` or the command line set it, overrides the preset's keys.
    """
    presets = deepspeed_presets()
    for _, role in _roles(values):
        name = role["strategy_args"].get("strategy_config")
        if isinstance(name, str) and name in presets:
            shipped = yaml.safe_load(presets[name].read_text(encoding="utf-8"))
            role["strategy_args"]["strategy_config"] = _overlaid(shipped, values.get(name))


def _overlaid(below: Any, above: Any) -> Any:
    """Return a block with the keys of both, of which those in `above` count; `below` if `above` is None."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return below if above is None else above
    return {**below, **{key: _overlaid(below.get(key), value) for key, value in above.items()}}


def _roles(values: Mapping[str, Any], above: str = "") -> list[tuple[str, dict[str, Any]]]:
    """Return the blocks of roles that DeepSpeed runs, by key path."""
    found = []
    for key, block in values.items():
        if not isinstance(block, dict):
            continue
        strategy = block.get("strategy_args")
        if isinstance(strategy, dict) and strategy.get("strategy_name") in STRATEGIES:
            found.append((f"{above}{key}", block))
        elif not above:
            found += _roles(block, f"{key}.")
    return found


def _read(path: str, where: str, done: Translation) -> Any:
    """Return the blocks of a file in JSON, in which comments are allowed; `UNREAD` on a fault."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        blocks = hjson.loads(text, object_pairs_hook=_once)
    except (OSError, UnicodeDecodeError) as error:
        problem = f"the file '{path}' cannot be read: {getattr(error, 'strerror', None) or error}"
        done.fault(where, problem, "give the path of DeepSpeed's configuration, or its blocks", "unreadable")
    except (hjson.HjsonDecodeError, ValueError, RecursionError) as error:
        done.fault(where, f"'{path}' is not JSON: {str(error).splitlines()[0]}", "correct the file", "malformed")
    else:
        if isinstance(blocks, dict):
            return blocks
        done.fault(where, f"'{path}' holds no block of keys", "give the path of DeepSpeed's configuration", "malformed")
    done.is_whole = False
    return dict(UNREAD)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a block. Raises ValueError if a key occurs twice, of which one value would be lost."""
    block = dict(pairs)
    if len(block) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)} occurs twice")
    return block


def _is_off(value: Any) -> bool:
    """Return whether a value is false or null, or a block whose switches are: those named `enabled`, or all keys."""
    if not isinstance(value, dict):
        return value is False or value is None
    switches = list(_switches(value))
    return (bool(switches) and not any(switches)) or (bool(value) and all(one is False for one in value.values()))


def _switches(block: dict[str, Any]) -> Iterator[Any]:
    """Yield the values of `enabled` at every depth."""
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _switches(value)
        elif key == "enabled":
            yield value


def _drop_auto(block: dict[str, Any]) -> None:
    """Remove the keys whose value is "auto" from a block and the blocks in it: DeepSpeed or the role's keys decide."""
    for key, value in list(block.items()):
        if value == AUTO:
            del block[key]
        elif isinstance(value, dict):
            _drop_auto(value)


class _Block:
    """The DeepSpeed block of one role."""

    def __init__(self, name: str, role: dict[str, Any], block: dict[str, Any], where: str, done: Translation) -> None:
        self._name, self._role, self._block, self._where, self._done = name, role, block, where, done
        self._read: list[str] = []
        """Keys of `training_args` that were set, with their values."""

    def settle_idle(self) -> None:
        """Take the keys out of a file's blocks that have no effect here, each with a warning, and give the block of
        ZeRO its default.
        """
        if comments := [key for key in self._block if key.startswith("_")]:
            for key in comments:
                del self._block[key]
            self._done.warn(f"{self._where}: {', '.join(comments)}: read as comments")
        if ZERO not in self._block:
            self._done.warn(f"{self._where}.{ZERO}: missing, so stage 0, as in DeepSpeed")
        zero = self._block.setdefault(ZERO, {})
        if isinstance(zero, dict) and zero.setdefault("stage", 0) in range(FIRST_OVERLAPPING):
            self._drop(zero, ZERO, ("overlap_comm",), f"stage {zero['stage']} has nothing to overlap")
        for old, new in OFFLOADS.items() if isinstance(zero, dict) else ():
            if zero.get(old) is True:
                del zero[old]
                zero.setdefault(new, {"device": "cpu"})
                self._done.warn(f"{self._where}.{ZERO}.{old}: read as {new}, with device cpu")
        for name, (keys, why) in OF_OTHERS.items():
            if isinstance(block := self._block.get(name), dict):
                self._drop(block, name, keys, why)

    def settle(self, learns: bool, chooses_trackers: bool) -> None:
        """Translate the block in place.

        Args:
            learns: Whether the role trains.
            chooses_trackers: Whether the configuration itself names no tracker.
        """
        self._rename()
        self._drop_off()
        self._track(chooses_trackers)
        self._recomputing()
        self._precision()
        if learns:
            self._scheduler()
            self._optimizer()
            self._clipping()
            self._compiling()
            self._batch()
        else:  # a file for several roles
            self._part("optimizer")
            self._part("scheduler")
        _drop_auto(self._block)
        if self._read:
            self._done.warn(f"{self._where}: read as {self._name}.{', '.join(self._read)}")

    def _drop(self, block: dict[str, Any], name: str, keys: Iterable[str], why: str) -> None:
        for key in keys:
            if (value := block.pop(key, None)) and value != AUTO:
                self._done.warn(f"{self._where}.{name}.{key}: has no effect; {why}")

    def _rename(self) -> None:
        """Replace the second names that DeepSpeed has for some keys."""
        zero = self._block.get(ZERO)
        for block, names in (
            (self._block, OLD_NAMES),
            (zero if isinstance(zero, dict) else {}, {key: f"stage3_{key}" for key in SHORT_NAMES}),
        ):
            for old, new in names.items():
                if old in block and new not in block:
                    block[new] = block.pop(old)

    def _drop_off(self) -> None:
        """Remove refused keys that are off, and keys that change no result, with a warning if they are not off."""
        for key in [key for key in self._block if key in DEEPSPEED_IDLE or key in DEEPSPEED_REFUSED]:
            value = self._block[key]
            if key == MONITORS and isinstance(value, dict):  # which DeepSpeed does not read
                value = {name: block for name, block in value.items() if isinstance(block, dict)}
            is_off = _is_off(value) or key in NEUTRAL and value == NEUTRAL[key]
            if is_off or key in DEEPSPEED_IDLE:
                del self._block[key]
            if not is_off and key in DEEPSPEED_IDLE:
                self._done.warn(f"{self._where}.{key}: has no effect; {DEEPSPEED_IDLE[key]}")
        for name, (_, refused) in DEEPSPEED_BLOCKS.items():
            block: Any = self._block.get(name)
            for key in [key for key in block if key in refused] if isinstance(block, dict) else []:
                if block[key] is False:
                    del block[key]

    def _track(self, chooses: bool) -> None:
        """Let enabled blocks of trackers choose the experiment's, and set the arguments of Weights & Biases."""
        values = self._done.values
        for name in ("tensorboard", "wandb"):
            block = self._block.get(name)
            if not isinstance(block, dict) or block.get("enabled") is not True:
                continue
            del self._block[name]
            given = values.get("track_with") or []
            chosen = [given] if isinstance(given, str) else list(given)
            if chooses and name not in chosen:
                values["track_with"] = chosen = [*chosen, name]
            if name not in chosen:
                self._done.warn(f"{self._where}.{name}: has no effect; track_with is {printable(given)}")
            elif name == "tensorboard":
                self._done.warn(f"{self._where}.{name}: roll's own tracker writes into tensorboard/ of output_dir")
            else:
                self._wandb({key: value for key, value in block.items() if key != "enabled"})

    def _wandb(self, block: dict[str, Any]) -> None:
        values, read = self._done.values, ["track_with wandb"]
        if values.get("tracker_kwargs") is None:
            values["tracker_kwargs"] = {}
        arguments: Any = values["tracker_kwargs"]
        own: Any = arguments.setdefault("wandb", {}) if isinstance(arguments, dict) else None
        if not isinstance(own, dict):
            return  # refused later
        for key, value in block.items():
            place, name = f"{self._where}.wandb.{key}", f"tracker_kwargs.wandb.{WANDB.get(key)}"
            if key not in WANDB:
                problem = f"is not a key of DeepSpeed's block{nearest(key, list(WANDB))}"
                self._done.fault(place, problem, f"use {', '.join(WANDB)}, or tracker_kwargs.wandb", "unknown_key")
            elif value not in (None, AUTO) and own.setdefault(WANDB[key], value) != value:
                problem = f"{printable(value)}, but {name} is {printable(own[WANDB[key]])}"
                self._done.fault(place, problem, "give only one of the two", "contradiction")
            elif value not in (None, AUTO):
                read.append(f"{name} {printable(value)}")
        self._done.warn(f"{self._where}.wandb: read as {', '.join(read)}")

    def _recomputing(self) -> None:
        """Remove the partition of activations where each rank has its own."""
        block: Any = self._block.get("activation_checkpointing")
        if isinstance(block, dict) and block.get("partition_activations") is True and self._split() in (None, 0, 1):
            del block["partition_activations"]
            place = f"{self._where}.activation_checkpointing.partition_activations"
            self._done.warn(f"{place}: has no effect without tensor_parallel: each rank has activations of its own")

    def _clipping(self) -> None:
        """Let `gradient_clipping` set the experiment's `max_grad_norm`, where 0 means no clipping. A critic's does not
        set it, because the policy has it too.
        """
        given, values = self._block.get("gradient_clipping"), self._done.values
        if not isinstance(given, int | float) or isinstance(given, bool) or given < 0:
            return
        norm = float(given) or UNBOUNDED
        if values.get("max_grad_norm") is None and self._name != "critic":
            values["max_grad_norm"] = norm
            if norm != NORM:
                means = "" if given else ", so gradients are not clipped"
                self._done.warn(f"{self._where}.gradient_clipping: read as max_grad_norm {norm:g}{means}")
        if values.get("max_grad_norm") == norm:
            del self._block["gradient_clipping"]

    def _compiling(self) -> None:
        """Let the block `compile` set whether layers are compiled, unless it asks for more than torch's default."""
        block, model = self._block.get("compile"), self._role.get("model_args")
        if not isinstance(block, dict) or not isinstance(model, dict) or not block.keys() <= {"disable", "backend"}:
            return
        if isinstance(block.get("disable", False), bool) and block.get("backend", INDUCTOR) == INDUCTOR:
            del self._block["compile"]
            wanted = not block.get("disable", False)
            if model.setdefault(COMPILES, wanted) != wanted:
                problem = f"{printable(block)}, but {self._name}.model_args.{COMPILES} is {printable(model[COMPILES])}"
                self._done.fault(f"{self._where}.compile", problem, "give only one of the two", "contradiction")
            else:
                self._read.append(f"model_args.{COMPILES} {printable(wanted)}")

    def _precision(self) -> None:
        """Let an enabled `fp16` or `bf16` set the role's precision, and "auto" follow it."""
        model = self._role.get("model_args")
        if model is None:
            model = self._role["model_args"] = {}
        if not isinstance(model, dict):
            return
        blocks = {key: self._block[key] for key in ("fp16", "bf16") if isinstance(self._block.get(key), dict)}
        enabled = [key for key, block in blocks.items() if block.get("enabled") is True]
        if len(enabled) == 1 and "dtype" not in model:
            model["dtype"] = enabled[0]
            self._read += [f"model_args.dtype {enabled[0]}"] if enabled[0] != DTYPE else []
        for key, block in blocks.items():
            if block.get("enabled") == AUTO:
                block["enabled"] = model.get("dtype", DTYPE) == key

    def _optimizer(self) -> None:
        where, block = f"{self._where}.optimizer", self._part("optimizer")
        kind, given = str(block.get("type", AUTO)), dict(block.get("params") or {})
        if kind != AUTO:
            if (known := OPTIMIZERS.get(kind.lower())) is None:
                problem = f"roll has no optimizer '{kind}'{nearest(kind.lower(), list(OPTIMIZERS))}"
                remedy = "use AdamW, Lion or Adagrad, or a key of training_args"
                self._done.fault(f"{where}.type", problem, remedy, "unknown_name")
            else:
                self._take(f"{where}.type", "optimizer", known)
        if kind != AUTO and OPTIMIZERS.get(kind.lower(), REMOVED_OPTIMIZERS[0]) in REMOVED_OPTIMIZERS:
            return  # its parameters need no faults of their own
        if kind.lower() in ("adam", "adamw") and self._arguments().get("learning_rate") is None:
            given.setdefault("lr", RATE)
        betas = given.pop("betas", AUTO)
        if betas != AUTO:
            if not isinstance(betas, list) or len(betas) != len(BETAS):
                problem = f"{printable(betas)} is not allowed"
                self._done.fault(f"{where}.params.betas", problem, "give two numbers", "wrong_type")
            else:
                for key, value in zip(BETAS, betas, strict=True):
                    self._take(f"{where}.params.betas", key, value)
        for key, value in given.items():
            place = f"{where}.params.{key}"
            if key in RATES:
                self._take(place, RATES[key], value)
            elif key not in USUAL:
                problem = f"{printable(value)}, but roll has no such parameter of an optimizer"
                self._done.fault(place, problem, "remove it", "not_supported")
            elif value not in (USUAL[key], AUTO):
                problem = f"{printable(value)}, but here it is always {printable(USUAL[key])}"
                self._done.fault(place, problem, "remove it", "not_supported")

    def _scheduler(self) -> None:
        where, block = f"{self._where}.scheduler", self._part("scheduler")
        kind, given = str(block.get("type", AUTO)), dict(block.get("params") or {})
        if kind == AUTO:
            return
        if kind not in DEEPSPEED_SCHEDULES:
            problem = f"roll has no schedule '{kind}'{nearest(kind, list(DEEPSPEED_SCHEDULES))}"
            self._done.fault(f"{where}.type", problem, f"use {', '.join(DEEPSPEED_SCHEDULES)}", "unknown_name")
            return
        self._take(f"{where}.type", "lr_scheduler_type", kind)
        self._take(f"{where}.params.{PEAK}", "learning_rate", given.pop(PEAK, AUTO))
        if kind.startswith("Warmup"):
            usual = ALL_STEPS if self._arguments().get("warmup_steps") is None else AUTO
            self._take(f"{where}.params.{WARMUP}", "warmup_steps", given.pop(WARMUP, usual))
        left = {key: value for key, value in given.items() if value != AUTO}
        if left:
            self._take(f"{where}.params", "lr_scheduler_kwargs", left)

    def _batch(self) -> None:
        """Let the batch sizes set the role's, except in RLVR, where `updates_per_step` says the size of an update.

        Keys of both are compared later, when the number of ranks is known.
        """
        if self._done.values.get("pipeline", RLVR) == RLVR:
            return
        arguments = self._arguments()
        steps, size = self._block.get("gradient_accumulation_steps"), self._block.get("train_micro_batch_size_per_gpu")
        whole, replicas = self._block.get("train_batch_size"), self._replicas()
        if isinstance(size, int) and isinstance(whole, int) and steps in (None, AUTO) and size > 0:
            steps = whole // (size * replicas) or None  # as in DeepSpeed
        if isinstance(steps, int) and arguments.get("gradient_accumulation_steps") is None:
            self._take(f"{self._where}.gradient_accumulation_steps", "gradient_accumulation_steps", steps)
        if isinstance(size, int) and "per_device_train_batch_size" not in arguments:
            self._take(f"{self._where}.train_micro_batch_size_per_gpu", "per_device_train_batch_size", size)
        if isinstance(whole, int) and "per_device_train_batch_size" not in arguments:
            per_size = replicas * (arguments.get("gradient_accumulation_steps") or 1)
            if whole % per_size == 0:
                self._take(f"{self._where}.train_batch_size", "per_device_train_batch_size", whole // per_size)

    def _replicas(self) -> int:
        """Return the number of the role's ranks that have sequences of their own."""
        mapping, shared = self._role.get("device_mapping"), 1
        for size in (self._block.get("sequence_parallel_size"), self._split()):
            shared *= size if isinstance(size, int) and size > 0 else 1
        ranks = len(mapping) if isinstance(mapping, list) else self._role.get("world_size")
        return max(1, (ranks if isinstance(ranks, int) else 1) // shared)

    def _split(self) -> Any:
        tensor = self._block.get("tensor_parallel")
        return tensor.get("autotp_size") if isinstance(tensor, dict) else 1

    def _arguments(self) -> dict[str, Any]:
        if self._role.get("training_args") is None:
            self._role["training_args"] = {}
        arguments = self._role["training_args"]
        return arguments if isinstance(arguments, dict) else {}

    def _take(self, place: str, key: str, value: Any) -> None:
        """Set a key of `training_args`, unless the value is "auto". Another value there is a fault."""
        if value == AUTO:
            return
        arguments, own = self._arguments(), f"{self._name}.training_args.{key}"
        if arguments.get(key) is None:
            arguments[key] = value
            self._read.append(f"training_args.{key} {printable(value)}")
        elif arguments[key] != value:
            problem = f"{printable(value)}, but {own} is {printable(arguments[key])}"
            self._done.fault(place, problem, "give only one of the two", "contradiction")

    def _part(self, key: str) -> dict[str, Any]:
        """Remove and return the block of a key, with the keys `type` and `params`. Without a block return an empty one.

        Another value stays, and is refused later.
        """
        block = self._block.get(key)
        if not isinstance(block, dict):
            return {}
        del self._block[key]
        unknown = [name for name in block if name not in PARTS]
        if unknown or not isinstance(block.get("params") or {}, dict):
            place = f"{self._where}.{key}.{unknown[0] if unknown else 'params'}"
            problem = "is not a key of DeepSpeed's block" if unknown else "is not a block of keys"
            self._done.fault(place, problem, f"give {' and '.join(PARTS)}", "unknown_key" if unknown else "wrong_type")
            return {}
        return block
