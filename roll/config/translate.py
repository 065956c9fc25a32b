"""A plain configuration in ROLL's words to the same configuration in ours. Pure: returns a new mapping, warnings and faults."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll.config.devices import FORMS, parse_devices
from roll.config.faults import shown
from roll.config.fields import dotted
from roll.config.roll_keys import CHECKPOINTING, IGNORED, RENAMED, REWARD_CLASSES, ROLES, VALUES, VARIABLES
from roll.config.shipped import known_rewards
from roll.config.trackers import TRACKERS
from roll.errors import Fault


@dataclass
class Translation:
    """What became of a configuration."""

    values: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


def translate(plain: dict[str, Any], references: str) -> Translation:
    """Bring ROLL's keys, values and device expressions into the schema's form.

    Args:
        plain: The composed and resolved configuration; left as it is.
        references: Text of the unresolved configuration, in which `${name}` shows the use of a variable.
    """
    done = Translation(copy.deepcopy(plain))
    for name in VARIABLES:
        if name in done.values and f"${{{name}}}" in references:
            del done.values[name]
    _rewards(done)
    _ignored(done)
    _renamed(done)
    _values(done)
    _checkpointing(done)
    _ulysses(done)
    _backend_timeout(done)
    _tracker_kwargs(done)
    _strategies(done)
    _devices(done)
    return done


def _matches(values: Any, pattern: Sequence[str], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Places that a pattern finds in the values, each with the block that holds its last step."""
    if not isinstance(values, dict):
        return
    steps = list(values) if pattern[0] == "*" else [pattern[0]] if pattern[0] in values else []
    for step in steps:
        if len(pattern) == 1:
            yield (*above, step), values
        else:
            yield from _matches(values[step], pattern[1:], (*above, step))


def _ignored(done: Translation) -> None:
    for pattern, reason in IGNORED.items():
        for place, block in _matches(done.values, pattern.split(".")):
            done.warnings.append(f"{dotted(place)}: {shown(block.pop(place[-1]))} is ignored; {reason}")


def _renamed(done: Translation) -> None:
    for pattern, new in RENAMED.items():
        for place, block in _matches(done.values, pattern.split(".")):
            value = block.pop(place[-1])
            if block.get(new, value) != value:
                done.faults.append(
                    Fault(dotted(place), f"{shown(value)}, but {new} is {shown(block[new])}", f"remove {place[-1]}; it is {new} here")
                )
                continue
            block[new] = value
            done.warnings.append(f"{dotted(place)}: read as {new}; rename the key")


def _values(done: Translation) -> None:
    for pattern, translations in VALUES.items():
        for place, block in _matches(done.values, pattern.split(".")):
            old = block[place[-1]]
            if isinstance(old, str | bool | None) and old in translations:
                block[place[-1]] = translations[old]
                done.warnings.append(f"{dotted(place)}: {shown(old)} is read as {translations[old]}; write it so")


def _checkpointing(done: Translation) -> None:
    """`disable_gradient_checkpointing` is `gradient_checkpointing` the other way round."""
    for role in ROLES:
        for place, block in _matches(done.values, (role, "model_args", "disable_gradient_checkpointing")):
            value = block[place[-1]]
            if not isinstance(value, bool):
                continue
            del block[place[-1]]
            meaning = CHECKPOINTING[value]
            if block.setdefault("gradient_checkpointing", meaning) != meaning:
                problem = f"{shown(value)}, but gradient_checkpointing is {shown(block['gradient_checkpointing'])}"
                done.faults.append(Fault(dotted(place), problem, "remove it; gradient_checkpointing says what is recomputed"))
            else:
                done.warnings.append(f"{dotted(place)}: {shown(value)} is read as gradient_checkpointing={meaning}; write it so")


def _ulysses(done: Translation) -> None:
    """`model_args.ulysses_size` is DeepSpeed's `sequence_parallel_size`; backends that score or generate have no use for it."""
    for role in ROLES:
        for place, block in _matches(done.values, (role, "model_args", "ulysses_size")):
            value, strategy = block.pop(place[-1]), done.values[role].get("strategy_args")
            config = strategy.get("strategy_config") if isinstance(strategy, dict) else None
            if not isinstance(strategy, dict) or strategy.get("strategy_name") != "deepspeed_train" or not isinstance(config, dict):
                done.warnings.append(f"{dotted(place)}: {shown(value)} is ignored; deepspeed_train alone shares sequences out")
            elif config.setdefault("sequence_parallel_size", value) != value:
                problem = f"{shown(value)}, but sequence_parallel_size is {shown(config['sequence_parallel_size'])}"
                done.faults.append(Fault(dotted(place), problem, "remove it; strategy_config.sequence_parallel_size says how many"))
            else:
                done.warnings.append(f"{dotted(place)}: read as strategy_args.strategy_config.sequence_parallel_size; move it there")


def _backend_timeout(done: Translation) -> None:
    """`backend_timeout`, minutes of one role, is `deadlines.collective`, seconds of all: the longest. What is given there goes before."""
    found = [(place, block.pop(place[-1])) for role in ROLES for place, block in _matches(done.values, (role, "backend_timeout"))]
    minutes = [value for _, value in found if isinstance(value, int | float) and not isinstance(value, bool) and value > 0]
    deadlines = done.values.setdefault("deadlines", {}) if minutes else None
    seconds = deadlines.setdefault("collective", 60 * max(minutes)) if isinstance(deadlines, dict) else None
    for place, value in found:
        if value in minutes:
            said = f"deadlines.collective, which holds for all roles, is {shown(seconds)} s; write it so"
            done.warnings.append(f"{dotted(place)}: {shown(value)} min; {said}")
        else:
            done.faults.append(Fault(dotted(place), f"{shown(value)} is no number of minutes", "use deadlines.collective, in seconds"))


def _rewards(done: Translation) -> None:
    """`worker_cls` names the reward function, unless `reward` does. A class without a counterpart here scores nothing, which is a fault."""
    for place, block in _matches(done.values, ("rewards", "*", "worker_cls")):
        class_path = str(block.pop("worker_cls"))
        name = REWARD_CLASSES.get(class_path.rpartition(".")[2])
        if "reward" in block:
            done.warnings.append(f"{dotted(place)}: {shown(class_path)} is ignored; reward says what scores this domain")
        elif name:
            if name != place[1]:
                block["reward"] = name
            done.warnings.append(f"{dotted(place)}: read as reward={name}; write it so")
        else:
            domain = dotted(place[:-1])
            remedy = f"set {domain}.reward to {', '.join(known_rewards())} or to your own package.module:function, or drop ~{domain}"
            done.faults.append(Fault(dotted(place), f"{shown(class_path)} has no counterpart here", remedy))


def _tracker_kwargs(done: Translation) -> None:
    """ROLL gives the one tracker's arguments directly; here they stand under the tracker's name."""
    tracker, arguments = done.values.get("track_with", "tensorboard"), done.values.get("tracker_kwargs")
    if not isinstance(tracker, str) or not isinstance(arguments, dict) or not arguments or any(name in TRACKERS for name in arguments):
        return
    done.values["tracker_kwargs"] = {} if tracker == "none" else {tracker: arguments}
    done.warnings.append(f"tracker_kwargs: read as tracker_kwargs.{tracker}; put the arguments under the tracker's name")


def _strategies(done: Translation) -> None:
    """`strategy_config: ~` means the defaults; `dtype` among vLLM's arguments is the role's own `model_args.dtype`."""
    for role in ROLES:
        for _, block in _matches(done.values, (role, "strategy_args", "strategy_config")):
            if block["strategy_config"] is None and block.get("strategy_name") in ("hf_infer", "vllm"):
                del block["strategy_config"]
        for place, block in _matches(done.values, (role, "strategy_args", "strategy_config", "dtype")):
            value, model_args = block.pop("dtype"), done.values[role].setdefault("model_args", {})
            short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(str(value), value)
            where = f"{role}.model_args.dtype"
            if isinstance(model_args, dict) and model_args.setdefault("dtype", short) != short:
                problem = f"{shown(value)}, but {where} is {model_args['dtype']}"
                done.faults.append(Fault(dotted(place), problem, f"remove it; {where} says the precision"))
            else:
                done.warnings.append(f"{dotted(place)}: read as {where}; move it there")


def _devices(done: Translation) -> None:
    for role in ROLES:
        for place, block in _matches(done.values, (role, "device_mapping")):
            text = block["device_mapping"]
            if not isinstance(text, str):
                continue
            try:
                block["device_mapping"] = parse_devices(text)
            except ValueError as error:
                done.faults.append(Fault(dotted(place), f"{shown(text)} is not a list of devices: {error}", f"write {FORMS}"))
                block["device_mapping"] = None


def referenced_text(raw: Any) -> str:
    """Text in which the interpolations of an unresolved configuration can be looked up."""
    return json.dumps(raw, default=str)
