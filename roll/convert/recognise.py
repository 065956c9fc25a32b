"""Finds out which program a file is for, and reads its keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from roll.convert.draft import Draft
from roll.convert.openrlhf import build_openrlhf
from roll.convert.python_script import training_script
from roll.convert.roles import on_cpu
from roll.convert.shell import script_commands
from roll.convert.source import Source, assigned, flagged, flat, resolved
from roll.convert.tables import table
from roll.convert.translate import translated
from roll.convert.trl import build_trl
from roll.convert.verl import build_verl
from roll.convert.verl_sft import build_verl_sft
from roll.errors import ConfigError, Fault

VERL = re.compile(r"(?:verl|recipe)(?:\.\w+)+|.*/main_ppo\.py|.*/sft_trainer\.py")
VERL_TRAINERS = {"fully_async": "fully_async", "one_step_off": "one_step_off", "main_ppo": "ppo", "main_dapo": "ppo"}
VERL_SFT = {"fsdp_sft_trainer": "sft", "sft_trainer": "sft_engine"}
VERL_FILES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer")
"""Files with verl's defaults, which the tables have."""
OPENRLHF = re.compile(r"openrlhf\.cli\.train_(ppo_ray|sft|dpo|rm|kto)")
TRL_TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "orpo", "reward")
TRL = re.compile(r"(?:.*/)?(?:run_)?(grpo|rloo|sft|dpo|kto|orpo|reward)(?:_modeling)?\.py")
SIGNS = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "num_iterations", "scale_rewards"),
    "dpo": ("precompute_ref_log_probs", "rpo_alpha", "f_divergence_type", "ref_model", "beta"),
    "reward": ("center_rewards_coefficient",),
    "sft": ("dataset_text_field", "packing", "max_seq_length", "assistant_only_loss", "completion_only_loss"),
}
"""Keys of TRL that only one kind of trainer has, in the order in which they decide."""
LEAST_KEYS = 2
"""Number of keys of TRL that a file must have."""


@dataclass(frozen=True)
class Wishes:
    """What the user says about a source that it does not say itself."""

    trainer: str | None = None
    gpus: int | None = None
    """Number of GPUs; 0 for the CPU."""
    rows: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def converted(path: Path, wishes: Wishes) -> tuple[Draft, Source]:
    """Return the experiment that a file describes, and what was read.

    Raises:
        ConfigError: the file cannot be read, is for none of the programs, or is for something that is refused.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            Fault(str(path), f"it cannot be read: {error}", "give a text file that you can read", "unreadable")
        ) from error
    source = _from_mapping(path, text, wishes) or _from_python(path, text, wishes) or _from_script(path, text, wishes)
    if source is None:
        raise ConfigError(_why_none(path, text))
    draft = translate_source(source)
    for key in source.computed:
        draft.note("lost", key, "the script computes its value, and no script is run")
    if source.changes:
        said = f"the script changes the rows with .{', .'.join(dict.fromkeys(source.changes))}, and roll reads the file"
        draft.note("lost", "train_dataset", f"{said} as it is: name one with the changed rows (.to_parquet)")
    if wishes.gpus == 0:
        on_cpu(draft, source)
    return draft, source


def translate_source(source: Source) -> Draft:
    """Return the experiment for a source. Raises ConfigError if it is about something that is refused."""
    if source.program == "TRL":
        return translated(source, build_trl)
    if source.program == "OpenRLHF":
        return translated(source, build_openrlhf)
    return translated(source, build_verl if source.in_rlvr else build_verl_sft)


def _from_mapping(path: Path, text: str, wishes: Wishes) -> Source | None:
    """Return the source of a YAML or JSON file, or None for any other file."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        return None
    try:
        loaded: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f"{path}:{where.line + 1}" if where else str(path)
        raise ConfigError(Fault(place, "this is not YAML", "fix this line of the file", "malformed")) from error
    if not isinstance(loaded, dict):
        return None
    if "actor_rollout_ref" in loaded:
        return _verl("ppo", resolved(_flattened(loaded)), wishes)
    return _trl(wishes.trainer or _trl_trainer(path, loaded), flat(loaded), wishes)


def _flattened(block: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in block.items():
        if isinstance(value, dict):
            found |= _flattened(value, f"{above}{key}.")
        elif key != "_target_":
            found[f"{above}{key}"] = flat({"value": value})["value"]
    return found


def _trl_trainer(path: Path, keys: Mapping[str, Any]) -> str:
    """Return the trainer that a file of TRL is for: by its keys, else by the names of the file and its folders."""
    names = [*reversed([part.lower() for part in path.resolve().parts[-4:]])]
    by_name = next((one for name in names for one in TRL_TRAINERS if one in re.split(r"[^a-z]+", name)), None)
    if any(key in keys for key in SIGNS["grpo"]):
        return by_name if by_name == "rloo" else "grpo"
    return by_name or next((one for one, signs in SIGNS.items() if any(key in keys for key in signs)), "sft")


def _trl(
    trainer: str, keys: dict[str, Any], wishes: Wishes, gpus: int | None = None, launcher: str = ""
) -> Source | None:
    names = ("trl", "trl_grpo") if trainer in ("grpo", "rloo") else ("trl", "trl_rows")
    rules = table(*names)
    known = [key for key in keys if key in rules.rules]
    if (
        len(known) < LEAST_KEYS
        or "model_name_or_path" not in keys
        and "output_dir" not in keys
        and len(known) * 2 < len(keys)
    ):
        return None
    number = wishes.gpus or gpus or 1
    return Source("TRL", trainer, rules, keys, number, launcher, wishes.rows)


def _why_none(path: Path, text: str) -> Fault:
    """Return the fault of a file from which nothing was read."""
    if path.suffix == ".py":
        try:
            ast.parse(text)
        except (SyntaxError, ValueError) as error:
            line, said = getattr(error, "lineno", None), getattr(error, "msg", error)
            place = f"{path}:{line}" if line else str(path)
            return Fault(place, f"it is no valid Python: {said}", "fix the script", "malformed")
    remedy = (
        "give a configuration of TRL (YAML or JSON), a Python script that builds a trainer of TRL, or a shell "
        "script with a command of verl, OpenRLHF or TRL"
    )
    return Fault(str(path), "it is for none of TRL, verl and OpenRLHF", remedy, "not_supported")


def _from_python(path: Path, text: str, wishes: Wishes) -> Source | None:
    """Return the source of a Python script that builds a trainer of TRL, or None for any other file."""
    found = training_script(text, path.stem) if path.suffix == ".py" else None
    if found is None:
        return None
    trainer = wishes.trainer or found.trainer
    rules = table("trl", "trl_grpo" if trainer in ("grpo", "rloo") else "trl_rows")
    keys, number = dict(found.keys), wishes.gpus or 1
    return Source("TRL", trainer, rules, keys, number, "", wishes.rows, found.computed, found.changes)


def _verl(trainer: str, keys: dict[str, Any], wishes: Wishes, gpus: int | None = None) -> Source:
    rules = table("verl_sft" if trainer.startswith("sft") else "verl")
    on_node = keys.get("trainer.n_gpus_per_node", 8)
    nodes = keys.get("trainer.nnodes", 1)
    counted = on_node * nodes if isinstance(on_node, int) and isinstance(nodes, int) else 8
    return Source("verl", trainer, rules, keys, wishes.gpus or gpus or counted, "", wishes.rows)


def _from_script(path: Path, text: str, wishes: Wishes) -> Source | None:
    """Return the source of a script's first training command, or None if it has none."""
    for words in script_commands(text, wishes.variables):
        if found := _from_command(path, words, wishes):
            return found
    return None


def _from_command(path: Path, words: Sequence[str], wishes: Wishes) -> Source | None:
    for number, word in enumerate(words):
        rest = words[number + 1 :]
        if " " in word and re.search(r"openrlhf\.cli|verl\.|\btrl ", word):  # bash -c "..."
            return next(
                (
                    one
                    for inner in script_commands(word, wishes.variables)
                    if (one := _from_command(path, inner, wishes))
                ),
                None,
            )
        if match := OPENRLHF.fullmatch(word):
            trainer = {"ppo_ray": "ppo", "rm": "reward"}.get(match[1], match[1])
            rules = table("openrlhf", "openrlhf_ppo" if trainer == "ppo" else "openrlhf_rows")
            gpus = wishes.gpus or _number(flagged(words[:number]).get("num_gpus")) or 8
            return Source("OpenRLHF", trainer, rules, flagged(rest), gpus, "", wishes.rows)
        if VERL.fullmatch(word):
            return _from_verl(path, word, words[:number], rest, wishes)
        if word == "trl" and rest[:1] and rest[0] in TRL_TRAINERS:
            return _from_trl(path, rest[0], words[:number], rest[1:], wishes)
        if (match := TRL.fullmatch(word)) and any(
            one in ("accelerate", "python", "python3", "torchrun", "uv") for one in words
        ):
            return _from_trl(path, match[1], words[:number], rest, wishes)
    return None


def _from_verl(path: Path, module: str, before: Sequence[str], rest: Sequence[str], wishes: Wishes) -> Source | None:
    keys = {**_hydra_file(path, rest), **assigned(rest)}
    trainer = next((one for name, one in (*VERL_TRAINERS.items(), *VERL_SFT.items()) if name in module), None)
    if trainer is None and any(key.startswith("actor_rollout_ref.") for key in keys):
        trainer = "ppo"
    if trainer is None:
        if "main_generation" in module or "main_eval" in module:
            remedy = "use python -m roll.evaluate"
            raise ConfigError(Fault(str(path), f"{module} trains nothing", remedy, "not_supported"))
        return None
    processes = _number(flagged(before).get("nproc_per_node") or flagged(before).get("nproc-per-node"))
    return _verl(trainer, keys, wishes, processes if trainer.startswith("sft") else None)


def _hydra_file(path: Path, words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of the file that `--config-path` and `--config-name` name. verl's own files hold its defaults."""
    flags = flagged(words)
    name = flags.get("config_name")
    if not isinstance(name, str) or name in VERL_FILES:
        return {}
    file = Path(str(flags.get("config_path", "config")), name).with_suffix(".yaml")
    near = next((one for one in (file, path.parent / file) if one.is_file()), None)
    if near is None:
        return {"config-name": name}
    loaded = yaml.safe_load(near.read_text(encoding="utf-8"))
    return _flattened({key: value for key, value in loaded.items() if key not in ("hydra", "defaults")})


def _from_trl(path: Path, trainer: str, before: Sequence[str], rest: Sequence[str], wishes: Wishes) -> Source | None:
    keys, launch = flagged(rest), flagged(before)
    if (file := keys.pop("config", None)) and isinstance(file, str):
        near = next((one for one in (Path(file), path.parent / file) if one.is_file()), None)
        if near is None:
            remedy = "give this file, or start the converter where it is"
            raise ConfigError(Fault(str(path), f"it names --config {file}, which is not there", remedy, "not_found"))
        loaded = yaml.safe_load(near.read_text(encoding="utf-8"))
        keys = {**flat(loaded if isinstance(loaded, dict) else {}), **keys}
    launcher = str(launch.get("config_file") or keys.pop("accelerate_config", "") or "")
    gpus = _number(launch.get("num_processes") or launch.get("nproc_per_node") or keys.pop("num_processes", None))
    return _trl(wishes.trainer or trainer, keys, wishes, gpus, launcher)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
