"""What `training_args` says of optimizer and schedule, against the role's other keys. transformers is not imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.placement import tensor_parallel
from roll.config.schema_engine import DeepSpeedTrainStrategy
from roll.config.schema_roles import Learner
from roll.errors import Fault
from roll.registry import nearest

SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
}
"""transformers' schedules that follow the number of updates alone, and the arguments that each takes beyond the usual ones."""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""One of these must be given."""
REMOVED = ("onebit_adam", "zero_one_adam", "onebit_lamb")


def optimizer_faults(name: str, role: Learner) -> list[Fault]:
    """Of one role that trains."""
    return [*_optimizer(name, role), *_rates(name, role), *_schedule(name, role)]


def _optimizer(name: str, role: Learner) -> Iterator[Fault]:
    chosen, where = role.training_args.optimizer, f"{name}.training_args.optimizer"
    strategy = role.strategy_args
    zero = strategy.strategy_config.zero_optimization if isinstance(strategy, DeepSpeedTrainStrategy) else None
    if chosen in REMOVED:
        problem = f"'{chosen}', but DeepSpeed 0.19 has its 1-bit optimizers no more"
        yield Fault(where, problem, "use adamw; to send less, see ZeRO++ in docs/deepspeed.md")
    if zero is None:
        return
    if chosen == "muon" and zero.stage:
        problem = f"'muon' updates whole matrices, and stage {zero.stage} gives each rank a flat part of them"
        yield Fault(where, problem, "use adamw, or stage 0 for a model that each device can hold with its states")
    elif chosen == "muon" and tensor_parallel(role) > 1:
        yield Fault(where, "'muon' updates whole matrices, and tensor_parallel.autotp_size shares them out", "use adamw, or remove it")
    if chosen == "adamw_8bit" and not role.device_mapping:
        yield Fault(where, "'adamw_8bit' keeps its states on a GPU, and the role has no device_mapping", "use adamw, or give it GPUs")
    elif chosen == "adamw_8bit" and zero.offload_optimizer and zero.offload_optimizer.device != "none":
        problem = f"'adamw_8bit' keeps its states on a GPU, but offload_optimizer.device is {zero.offload_optimizer.device}"
        yield Fault(where, problem, "use adamw, or remove offload_optimizer")


def _rates(name: str, role: Learner) -> Iterator[Fault]:
    arguments, where = role.training_args, f"{name}.training_args"
    if arguments.lora_learning_rate is not None and role.model_args.lora_target is None:
        problem = f"{arguments.lora_learning_rate}, but {name}.model_args.lora_target gives no adapter"
        yield Fault(f"{where}.lora_learning_rate", problem, "remove it, or give lora_target")


def _schedule(name: str, role: Learner) -> Iterator[Fault]:
    kind, given = role.training_args.lr_scheduler_type, role.training_args.lr_scheduler_kwargs
    where = f"{name}.training_args.lr_scheduler"
    if kind in BY_METRIC:
        problem = f"'{kind}' follows a loss that is evaluated, and training here evaluates none"
        yield Fault(f"{where}_type", problem, f"use {', '.join(SCHEDULES)}")
        return
    for key, value in given.items():
        if key not in SCHEDULES[kind]:
            known = ", ".join(SCHEDULES[kind]) or "no further argument"
            problem = f"{value!r}: '{kind}' takes no {key}{nearest(key, list(SCHEDULES[kind]))}"
            yield Fault(f"{where}_kwargs.{key}", problem, f"it takes {known}")
    needed = NEEDED.get(kind, ())
    if needed and not any(key in given for key in needed):
        yield Fault(f"{where}_kwargs", f"{dict(given)} lacks {' or '.join(needed)} of '{kind}'", f"give {needed[-1]}")
