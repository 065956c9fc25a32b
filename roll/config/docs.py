"""Generates the Markdown reference of all keys. `python -m roll.config.docs [FILE]` prints or writes it."""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from roll.algorithms.methods import ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES, readers
from roll.config.roll_v2.meanings import CISPO_CLIP, ENOUGH
from roll.config.roll_v2.rewards import PROMPTS
from roll.config.schema.base import LARGEST_COUNT, LARGEST_NUMBER, SMALLEST_NUMBER, Named
from roll.config.schema.fields import ANY_NAME, blocks_of, section_at
from roll.config.schema.foreign_names import (
    DEFAULTS,
    DIFFERS,
    HOLDS,
    IGNORED,
    MEANINGS,
    OF_REWARD_MODELS,
    READ_AS,
    READ_SPECIALLY,
    REFUSED,
    REWARD_CLASSES,
    ROLE,
    ROLES,
    STRATEGIES,
    VALUES,
    VARIABLES,
)
from roll.config.schema.offline import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from roll.config.schema.pipelines import PIPELINES
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import ExperimentConfig

OFFLINE = {"SFT": SftConfig, "DPO": DpoConfig, "Reward model": RewardModelConfig, "Distillation": DistillConfig}
INTRODUCTION = """# Configuration

One YAML file defines a whole experiment. This page is generated from the schema (`roll/config/schema/`) by
`python -m roll.config.docs docs/configuration.md`.

```
python -m roll.pipeline --config-name rlvr_lora_zero3 actor_train.training_args.learning_rate=2e-5 dry_run=true
```

- The name is looked up in all folders of `examples/`; write `folder/name` if several folders have a file of that name.
  `--config-path DIR` or `--config-dir DIR` selects another folder.
- `key=value` sets a key, whether or not the file has it. `+key=value`, `++key=value` and `~key` work as in Hydra.
- Presets are included with `defaults: [../config/deepspeed_zero3@_here_]` and used as
  `strategy_config: ${deepspeed_zero3}`. The same line finds the shipped presets from a folder outside the examples.
  To change one key of a preset, set it in the preset:
  `deepspeed_zero3.zero_optimization.stage3_max_live_parameters=500000000`.
- The presets are also Hydra's group `presets`: `presets@actor_train.strategy_args.strategy_config: deepspeed_zero3`
  in `defaults`, and the same with `=deepspeed_zero2` on the command line, or with `+` before it if `defaults` does
  not list it. A file that uses `${deepspeed_zero3}` takes another preset by its name:
  `actor_train.strategy_args.strategy_config=deepspeed_zero2`.
- An unknown root key is a variable if `${...}` refers to it: `gpus: list(range(0,8))` and `device_mapping: ${gpus}`.
- `null` removes an inherited entry that has a name of your own: `environments.calculator: ~` in a file, or
  `rewards.math_rule=null` on the command line. So do `validation.sets.NAME`, `validation.rows.NAME` and others.
- `dry_run=true` prints the plan (roles on devices, batch sizes, memory), tries the first rows of the data, environments
  and tools, and exits. It imports neither torch nor ray.
- `--multirun` checks all jobs of a sweep before the first one starts. Each job needs its own `output_dir`: use
  `${hydra:job.num}` or `${hydra:job.override_dirname}` in it. `--parallel N` runs N jobs at a time.
- All faults are listed at once, each with its key, its value and a remedy, and the exit status is 2.
- No value that you set is changed silently. Two keys that contradict each other are a fault.
"""
LIMITS = f"""If a type has no bound, whole numbers are at most {LARGEST_COUNT}, and other numbers at most
{LARGEST_NUMBER:g} in magnitude. Numbers other than 0 are at least {SMALLEST_NUMBER:g} in magnitude.
"""


def reference_page() -> str:
    """Return the page."""
    parts = [INTRODUCTION, LIMITS]
    parts.append(_section("All pipelines", "", ExperimentConfig))
    shared = set(ExperimentConfig.model_fields)
    parts.append(_section("RLVR", "", RlvrConfig, leave_out=shared))
    parts.append(_section("All pipelines except RLVR", "", OfflineConfig, leave_out=shared))
    shared |= set(OfflineConfig.model_fields)
    for title, schema in OFFLINE.items():
        parts.append(_section(title, "", schema, leave_out=shared))
    for block in _blocks():
        places = ", ".join(f"`{place}`" for place in _places(block))
        parts.append(_section(_title(block), places, block))
    parts.append(_roll_keys())
    return "\n".join(parts)


def _blocks() -> list[type[BaseModel]]:
    """Return all blocks below the root, in the order of the schema."""
    found: list[type[BaseModel]] = []
    waiting: list[type[BaseModel]] = list(PIPELINES.values())
    while waiting:
        block = waiting.pop(0)
        below = [inner for field in block.model_fields.values() for inner, _ in blocks_of(field.annotation)]
        waiting += [inner for inner in below if inner not in found and inner not in waiting]
        if block not in PIPELINES.values() and block not in found:
            found.append(block)
    return [block for block in found if block.model_fields]


def _places(block: type[BaseModel]) -> list[str]:
    """Return the paths of a block. If all roles have the block, their paths are combined into `<role>`."""
    places = list(dict.fromkeys(place for root in PIPELINES.values() for place in _below(root, "", block)))
    of_roles = [place for place in places if place.split(".")[0] in ROLES]
    if len({place.split(".")[0] for place in of_roles}) < len(ROLES):
        return places
    return list(dict.fromkeys(f"<role>.{place.partition('.')[2]}" if place in of_roles else place for place in places))


def _below(section: type[BaseModel], above: str, wanted: type[BaseModel]) -> list[str]:
    places: list[str] = []
    for name, field in section.model_fields.items():
        for inner, keyed in blocks_of(field.annotation):
            place = f"{above}{name}" + (f".{ANY_NAME}" if keyed else "")
            places += [place] if inner is wanted else []
            places += _below(inner, f"{place}.", wanted)
    return places


def _title(block: type[BaseModel]) -> str:
    return (block.__doc__ or block.__name__).strip().split("\n")[0].rstrip(".")


def _section(title: str, places: str, block: type[BaseModel], leave_out: set[str] | None = None) -> str:
    lines = [f"## {title}", ""]
    lines += [f"At {places}.", ""] if places else []
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in block.model_fields.items():
        if name in (leave_out or ()):
            continue
        cells = (f"`{name}`", _type(field.annotation, field.metadata), _default(field), meaning(name, field))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def meaning(name: str, field: FieldInfo) -> str:
    """Return the description of a key, and the methods that read it if only some do."""
    for table in (ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES):
        names = readers(table).get(name, ())
        if 0 < len(names) < len(table):
            return f"{field.description} Read by {', '.join(f'`{reader}`' for reader in names)}."
    return field.description or ""


def _type(annotation: object, metadata: Sequence[object] = ()) -> str:
    for named in (part for part in metadata if isinstance(part, Named)):
        return ", ".join(f"`{name}`" for name in named.kind.known) + ", or `package.module:Name`"
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(inner[0], [bound for extra in inner[1:] for bound in getattr(extra, "metadata", ())])
    if origin in (typing.Union, types.UnionType):
        said, bounds = (
            " or ".join(dict.fromkeys(_type(part) for part in inner if part is not type(None))),
            _bounds(metadata),
        )
        return said + ("," if bounds and said[-1].isdigit() else "") + bounds  # a part may have bounds of its own
    return _name(annotation) + _bounds(metadata)


def _name(part: object) -> str:
    origin = typing.get_origin(part)
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in typing.get_args(part))
    if origin is tuple:
        return f"list of {_type(typing.get_args(part)[0])}"
    if origin is dict or part is dict:
        return "block"
    if isinstance(part, type) and issubclass(part, BaseModel):
        return "block"
    return {str: "string", int: "whole number", float: "number", bool: "true or false"}.get(part, "any")


def _bounds(metadata: Sequence[object]) -> str:
    signs = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
    bounds = [
        (getattr(bound, key), sign)
        for bound in metadata
        for key, sign in signs
        if getattr(bound, key, None) is not None
    ]
    found = [f"{sign} {bound:.10g}" for bound, sign in bounds if abs(bound) not in (LARGEST_COUNT, LARGEST_NUMBER)]
    return f" {', '.join(found)}" if found else ""


def _default(field: typing.Any) -> str:
    if field.default_factory is not None:
        return ""
    if field.default is PydanticUndefined:
        return "required"
    return "" if field.default is None else f"`{json.dumps(field.default, default=str)}`"


def _roll_keys() -> str:
    lines = [
        "## Keys of ROLL",
        "",
        "Files of ROLL v0.2.1 can be loaded. Each of these keys gives one warning, or a fault if refused.",
        "",
    ]
    lines += ["| key | how it is read |", "|---|---|"]
    lines += [f"| `{place}` | ignored; {reason} |" for place, reason in IGNORED.items()]
    functions = ", ".join(f"`{key}`" for key in OF_REWARD_MODELS)
    lines.append(f"| `rewards.*`: {functions} | ignored if the reward is a function |")
    lines += [f"| `rewards.*.judge_prompt: {name}` | read as `{ours}` |" for name, ours in PROMPTS.items()]
    for place, instead in REFUSED.items():
        but = f", unless it is `{json.dumps(HOLDS[place])}`" if place in HOLDS else ""
        lines.append(f"| `{place}` | refused{but}; {instead} |")
    lines += [
        f"| `{place}` | read as `{new}`{_meanings(MEANINGS.get(place, {}))}{_differs(place)} |"
        for place, new in READ_AS.items()
    ]
    lines += [f"| `{place}` | value{_meanings(values, '`null`')} |" for place, values in VALUES.items()]
    return "\n".join([*lines, *_keys_of_roll_in_prose(), "", *_defaults_of_roll(), ""])


def _keys_of_roll_in_prose() -> list[str]:
    classes = ", ".join(f"`{name}` is `{reward}`" for name, reward in REWARD_CLASSES.items())
    strategies = ", ".join(f"`{name}`" for name in STRATEGIES)
    variables = ", ".join(f"`{name}`" for name in VARIABLES)
    rows = {f"`{place}`": text for place, text in READ_SPECIALLY.items()} | {
        "`rewards.*.worker_cls`": f"read as `reward` by the class's name: {classes}; any other also needs `reward`",
        "workers and keys of images, video and diffusion models": "refused by name, before any other check",
        f"`<role>.strategy_args.strategy_name`: {strategies}": f"in a file with {ENOUGH} or more keys of ROLL read "
        "as `deepspeed_train`, `deepspeed_infer`, `hf_infer` or `vllm`, see [from ROLL](moving/from_roll.md#files); "
        "otherwise refused by name, as are keys of Megatron in `strategy_config`",
        f"{variables} at the root": "variables for `${...}`; they may be unused in a file",
    }
    return [f"| {place} | {text} |" for place, text in rows.items()]


def _defaults_of_roll() -> list[str]:
    """Return the lines about `roll_defaults`."""
    lines = ["## Defaults of ROLL", ""]
    lines += [
        f"If a file has {ENOUGH} or more keys of ROLL, one warning lists the keys that it does not set and whose "
        f"default in ROLL is"
    ]
    lines += [
        "different. `roll_defaults: true` selects the defaults of ROLL, in any file:",
        "",
        "| key | ROLL | here |",
        "|---|---|---|",
    ]
    for place, value in DEFAULTS.items():
        steps = place.replace(ROLE, "actor_train").split(".")
        section = section_at(RlvrConfig, steps[:-1], {})
        assert section is not None, "every key with a default of ROLL is in the schema"
        lines.append(f"| `{place}` | `{value}` | `{section.model_fields[steps[-1]].default}` |")
    lines.append(
        f"| `pg_clip_low`, `pg_clip_high`, with `actor_train.pg_variant: cispo` | `{CISPO_CLIP}` | `pg_clip` |"
    )
    return lines


def _differs(place: str) -> str:
    return "".join(f"; {text}" for text in DIFFERS.get(place, {}).values())


def _meanings(values: Mapping[typing.Any, typing.Any], none: str = "what roll always does") -> str:
    said = [f"`{json.dumps(old)}` is " + (f"`{new}`" if new else none) for old, new in values.items()]
    return ": " * bool(said) + ", ".join(said)


def main() -> None:
    """Print the page, or write it to the file named on the command line."""
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(reference_page(), encoding="utf-8")
    else:
        print(reference_page(), end="")


if __name__ == "__main__":
    main()
