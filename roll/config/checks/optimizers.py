"""Checks the optimizer and schedule in `training_args` against the role's other keys. Does not import transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll.config.derived.placement import tensor_parallel
from roll.config.schema.engine import DeepSpeedTrainStrategyConfig
from roll.config.schema.kinds import COUNT, FRACTION, NUMBER, SIZE, ValueKind, one_of
from roll.config.schema.roles import LearnerConfig
from roll.errors import Fault
from roll.registry import nearest

SHAPES = one_of("linear", "cosine", "1-sqrt")
LEAST: Mapping[str, ValueKind] = {"min_lr": NUMBER, "min_lr_rate": FRACTION}
SCHEDULES: Mapping[str, Mapping[str, ValueKind]] = {
    "linear": {},
    "cosine": {"num_cycles": NUMBER},
    "cosine_with_restarts": {"num_cycles": SIZE},
    "polynomial": {"lr_end": NUMBER, "power": NUMBER},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": SIZE},
    "cosine_with_min_lr": {"num_cycles": NUMBER, **LEAST},
    "cosine_warmup_with_min_lr": {"num_cycles": NUMBER, "warmup_lr_rate": FRACTION, **LEAST},
    "warmup_stable_decay": {
        "num_decay_steps": COUNT,
        "warmup_type": SHAPES,
        "decay_type": SHAPES,
        "min_lr_ratio": FRACTION,
        "num_cycles": NUMBER,
    },
}
"""transformers' schedules that depend only on the number of updates, with the types of their additional arguments."""
BY_METRIC = ("reduce_lr_on_plateau", "greedy")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""By schedule: arguments of which exactly one must be set."""
LR_END = 1e-7
"""Default final learning rate of `polynomial`."""
REMOVED = ("onebit_adam", "zero_one_adam", "onebit_lamb")


def optimizer_faults(name: str, role: LearnerConfig) -> list[Fault]:
    """Return faults of the optimizer keys of one trained role."""
    return [*_optimizer(name, role), *_rates(name, role), *_schedule(name, role)]


def _optimizer(name: str, role: LearnerConfig) -> Iterator[Fault]:
    chosen, where = role.training_args.optimizer, f"{name}.training_args.optimizer"
    strategy = role.strategy_args
    zero = strategy.strategy_config.zero_optimization if isinstance(strategy, DeepSpeedTrainStrategyConfig) else None
    if chosen in REMOVED:
        problem = f"'{chosen}', but DeepSpeed 0.19 no longer has 1-bit optimizers"
        yield Fault(where, problem, "use adamw; to reduce communication, see ZeRO++ in docs/deepspeed.md")
    if zero is None:
        return
    if chosen == "muon" and zero.stage:
        problem = f"'muon' updates whole matrices, but stage {zero.stage} gives each rank a flat part of them"
        yield Fault(where, problem, "use adamw, or stage 0 if each device can hold the model and its optimizer states")
    elif chosen == "muon" and tensor_parallel(role) > 1:
        yield Fault(
            where,
            "'muon' updates whole matrices, but tensor_parallel.autotp_size splits them",
            "use adamw, or remove autotp_size",
        )
    if chosen == "adamw_8bit" and not role.device_mapping:
        yield Fault(
            where,
            "'adamw_8bit' keeps its states on a GPU, but the role has no device_mapping",
            "use adamw, or give it GPUs",
        )
    elif chosen == "adamw_8bit" and zero.offload_optimizer and zero.offload_optimizer.device != "none":
        problem = (
            f"'adamw_8bit' keeps its states on a GPU, but offload_optimizer.device is {zero.offload_optimizer.device}"
        )
        yield Fault(where, problem, "use adamw, or remove offload_optimizer")


def _rates(name: str, role: LearnerConfig) -> Iterator[Fault]:
    arguments, where = role.training_args, f"{name}.training_args"
    if arguments.lora_learning_rate is not None and role.model_args.lora_target is None:
        problem = f"{arguments.lora_learning_rate}, but {name}.model_args.lora_target is not set"
        yield Fault(f"{where}.lora_learning_rate", problem, "remove it, or set lora_target")


def _schedule(name: str, role: LearnerConfig) -> Iterator[Fault]:
    kind, given = role.training_args.lr_scheduler_type, role.training_args.lr_scheduler_kwargs
    where = f"{name}.training_args.lr_scheduler"
    if kind in BY_METRIC:
        problem = f"'{kind}' follows an evaluation loss, which roll does not compute during training"
        yield Fault(f"{where}_type", problem, f"use one of: {', '.join(SCHEDULES)}")
        return
    for key, value in given.items():
        if key not in SCHEDULES[kind]:
            known = ", ".join(SCHEDULES[kind]) or "no further argument"
            problem = f"{value!r}, but '{kind}' has no argument {key}{nearest(key, list(SCHEDULES[kind]))}"
            yield Fault(f"{where}_kwargs.{key}", problem, f"remove it; '{kind}' accepts {known}")
        elif not SCHEDULES[kind][key].holds(value):
            yield Fault(f"{where}_kwargs.{key}", f"{value!r} is not allowed", f"set it to {SCHEDULES[kind][key].said}")
    needed = NEEDED.get(kind, ())
    if needed and not any(key in given for key in needed):
        yield Fault(f"{where}_kwargs", f"{dict(given)}, but '{kind}' needs {' or '.join(needed)}", f"set {needed[-1]}")
    elif len(needed) > 1 and all(key in given for key in needed):
        yield Fault(f"{where}_kwargs", f"{dict(given)} has both {' and '.join(needed)}", "set only one of the two")
    yield from _bounds(name, role)


def _bounds(name: str, role: LearnerConfig) -> Iterator[Fault]:
    """Yield faults of a final learning rate and of a warm-up.

    The final learning rate must be below the initial one, and apply to `lora_learning_rate` too. `constant` has no
    warm-up.
    """
    arguments, where = role.training_args, f"{name}.training_args"
    kind, given, rate = arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs, arguments.learning_rate
    key = "lr_end" if kind == "polynomial" else "min_lr"
    least = given.get(key, LR_END if kind == "polynomial" else None)
    if isinstance(least, int | float) and key in SCHEDULES[kind]:
        if arguments.lora_learning_rate is not None and key == "min_lr":
            problem = (
                f"{least:g}, but there is also a lora_learning_rate of {arguments.lora_learning_rate:g}, to which "
                f"this bound does not apply"
            )
            yield Fault(
                f"{where}.lr_scheduler_kwargs.min_lr", problem, "set min_lr_rate instead, which is a fraction of each"
            )
        elif least >= rate:
            yield Fault(
                f"{where}.lr_scheduler_kwargs.{key}",
                f"{least:g}, but learning_rate is {rate:g}",
                "set it below learning_rate",
            )
    if kind == "constant" and (arguments.warmup_steps or arguments.warmup_ratio):
        warmup = (
            f"warmup_steps is {arguments.warmup_steps}"
            if arguments.warmup_steps
            else f"warmup_ratio is {arguments.warmup_ratio:g}"
        )
        yield Fault(
            f"{where}.lr_scheduler_type", f"'constant', but {warmup}", "use constant_with_warmup, or remove the warm-up"
        )
