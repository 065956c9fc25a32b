"""Reads DeepSpeed's own configuration: from a file, and with the blocks that roll has keys for.

`optimizer`, `scheduler` and the batch sizes become keys of `training_args`, and `fp16` or `bf16` the role's precision,
with the meaning that DeepSpeed gives them. If the role has such a key as well, with another value, that is a fault that
names both. "auto" means, as in transformers, that the role's own key decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from roll.config.roll_v2.translate import Translation
from roll.config.schema.faults import printable
from roll.config.schema.foreign_names import DEEPSPEED_REFUSED, DEEPSPEED_SCHEDULES
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


def settle_deepspeed(done: Translation) -> None:
    """Replace the path of a DeepSpeed file by its blocks, and translate in place the blocks that roll has keys for."""
    for name, role in _roles(done.values):
        strategy = role["strategy_args"]
        where = f"{name}.strategy_args.strategy_config"
        path = strategy.get("strategy_config")
        if isinstance(path, str) and path.endswith(ENDINGS):  # another text is perhaps the name of a preset
            strategy["strategy_config"] = _read(path, where, done)
        block = strategy.get("strategy_config")
        if isinstance(block, dict):
            _Block(name, role, block, where, done).settle(learns=strategy["strategy_name"] == STRATEGIES[0])


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
    """Return the blocks of a file in JSON, in which comments are allowed; none on a fault."""
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
    return {}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a block. Raises ValueError if a key occurs twice, of which one value would be lost."""
    block = dict(pairs)
    if len(block) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)} occurs twice")
    return block


class _Block:
    """The DeepSpeed block of one role."""

    def __init__(self, name: str, role: dict[str, Any], block: dict[str, Any], where: str, done: Translation) -> None:
        self._name, self._role, self._block, self._where, self._done = name, role, block, where, done
        self._read: list[str] = []
        """Keys of `training_args` that were set, with their values."""

    def settle(self, learns: bool) -> None:
        """Translate the block in place."""
        self._drop_idle()
        self._recomputing()
        self._precision()
        if not learns:  # a file for several roles
            self._part("optimizer")
            self._part("scheduler")
            return
        self._scheduler()
        self._optimizer()
        self._batch()
        if self._read:
            self._done.warn(f"{self._where}: read as {self._name}.{', '.join(self._read)}")

    def _drop_idle(self) -> None:
        """Remove refused keys with values that change nothing, and the block of a tracker that is roll's as well."""
        for key in [key for key in self._block if key in DEEPSPEED_REFUSED]:
            value = self._block[key]
            is_off = value is False or (isinstance(value, dict) and value.get("enabled") is False)
            if is_off or (key in NEUTRAL and value == NEUTRAL[key]):
                del self._block[key]
        tracked = self._block.get("tensorboard")
        if isinstance(tracked, dict) and tracked.get("enabled") is True:
            del self._block["tensorboard"]
            given = self._done.values.setdefault("track_with", "tensorboard")
            has = "tensorboard" in (given if isinstance(given, list) else [given])
            text = "roll's own tracker writes into tensorboard/ of output_dir"
            self._done.warn(
                f"{self._where}.tensorboard: {text if has else f'has no effect; track_with is {printable(given)}'}"
            )

    def _recomputing(self) -> None:
        """Remove the partition of activations where each rank has its own."""
        block = self._block.get("activation_checkpointing")
        if isinstance(block, dict) and block.get("partition_activations") is True and self._split() in (None, 0, 1):
            del block["partition_activations"]
            place = f"{self._where}.activation_checkpointing.partition_activations"
            self._done.warn(f"{place}: has no effect without tensor_parallel: each rank has activations of its own")

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
        if isinstance(steps, int) and arguments.get("gradient_accumulation_steps") is None:
            self._take(f"{self._where}.gradient_accumulation_steps", "gradient_accumulation_steps", steps)
        if isinstance(size, int) and "per_device_train_batch_size" not in arguments:
            self._take(f"{self._where}.train_micro_batch_size_per_gpu", "per_device_train_batch_size", size)
        whole, replicas = self._block.get("train_batch_size"), self._replicas()
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
