"""Checks whether this machine has what the configuration names: models, data, packages, the run folder, a checkpoint.

Reads no more than a config.json, `.deepspeed_env` and the templates of judges.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from roll.config.derived.batch import learner, longest_sequence
from roll.config.derived.model_shape import ModelShape, config_file, read_shape
from roll.config.derived.placement import generates, model_roles, vllm_config
from roll.config.derived.reward_roles import names_file
from roll.config.derived.trackers import missing_packages
from roll.config.load.env_file import NAME, env_files, idle_variables, read_env_files
from roll.config.schema.engine import VllmStrategyConfig
from roll.config.schema.model import DataConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import RoleConfig, ServedConfig
from roll.errors import Fault

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
KERNEL_FILES = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "mqueue", "bpf", "pstore")
DATA_ENDINGS = (".json", ".jsonl", ".parquet", ".arrow")


@dataclass
class Found:
    """What exists on this machine, and what is missing."""

    faults: list[Fault] = field(default_factory=list)
    missing: list[Fault] = field(default_factory=list)
    """Models, data and packages that are not on this machine. They are faults, except in a dry run."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of `.deepspeed_env`."""
    shapes: dict[str, ModelShape] = field(default_factory=dict)
    """Shapes by role, if the model's config.json is available."""


def look(config: Config) -> Found:
    """Check every path and every optional package of a configuration against this machine."""
    found = Found()
    _models(config, found)
    for role_name, role in model_roles(config).items():
        found.missing += _packages(role_name, role)
        found.missing += _engines_packages(role_name, role, found.shapes.get(role_name))
    found.notes += _without_delta_kernels(config, found.shapes)
    name, role = learner(config)
    if role.data_args:
        _files(f"{name}.data_args.file_name", role.data_args, found)
    for place, held_out in _held_out(config).items():
        _files(f"{place}.data_args.file_name", held_out, found)
    if isinstance(config, RlvrConfig):
        found.missing += _keys_of_judges(config)
        _templates_of_judges(config, found)
    _run_folder(config, found)
    _checkpoint(config, found)
    found.missing += missing_packages(config)
    found.environment, faults = read_env_files(env_files())
    found.faults += faults
    found.warnings += idle_variables(config, found.environment, os.environ)
    if found.environment:
        found.notes.append(f"every worker gets {', '.join(found.environment)} from {NAME}; system_envs takes precedence")
    return found


def _held_out(config: Config) -> dict[str, DataConfig]:
    """Return the held-out rows by the place of their block."""
    if isinstance(config, RlvrConfig):
        sets = config.validation.named_sets() if config.validation else {}
        places = config.validation.places() if config.validation else {}
        return {place: rows for name, place in places.items() if (rows := sets[name].data_args)}
    return {"validation": config.validation.data_args} if config.validation and config.validation.data_args else {}


def _models(config: Config, found: Found) -> None:
    seen: dict[str, ModelShape | None] = {}
    for role_name, role in model_roles(config).items():
        own = role.model_args.model_name_or_path
        model, where = (own, f"{role_name}.model_args.model_name_or_path") if own else (config.pretrain, "pretrain")
        if model not in seen:
            # A reward's model has its own tokenizer, and gives no verdict on texts that are too long for it.
            longest = 0 if isinstance(role, ServedConfig) else longest_sequence(config)
            seen[model] = _model(model, where, longest, found)
        shape = seen[model]
        if shape:
            found.shapes[role_name] = shape


def _model(model: str, where: str, longest: int, found: Found) -> ModelShape | None:
    file = config_file(model)
    if file is None:
        if _is_local(model) or not HUB_NAME.fullmatch(model):
            found.missing.append(
                Fault(where, f"there is no folder '{model}'", "give a folder with a config.json, or a Hub name such as Qwen/Qwen2.5-7B")
            )
        else:
            found.notes.append(f"{where}: '{model}' is taken as a Hub name; it is not in the local cache, so no memory is estimated for it")
        return None
    if not file.is_file():
        found.faults.append(Fault(where, f"'{model}' holds no config.json", "give the folder of a saved model"))
        return None
    try:
        shape = read_shape(file)
    except ValueError as error:
        found.faults.append(Fault(where, f"{file} cannot be read: {error}", "save the model again, or give another folder"))
        return None
    if shape is None:
        found.notes.append(f"{where}: '{model}' is of a kind whose size is not known from config.json; no memory is estimated for it")
    elif shape.max_position_embeddings and longest > shape.max_position_embeddings:
        problem = f"sequences have up to {longest} tokens, but '{model}' has {shape.max_position_embeddings} positions"
        remedy = f"keep prompt_length + response_length, and sequence_length, within {shape.max_position_embeddings}"
        found.faults.append(Fault("response_length", problem, remedy))
    return shape


def _is_local(name: str) -> bool:
    """Whether a name that does not exist looks like a local path."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def _packages(name: str, role: RoleConfig) -> Iterator[Fault]:
    """Return faults of missing optional packages. Does not import them, because that would import torch."""
    model, loads_by_transformers = role.model_args, not isinstance(role.strategy_args, VllmStrategyConfig)
    if not generates(name, role) and model.attn_implementation == "fa2" and find_spec("flash_attn") is None:
        problem = "fa2, but the package flash-attn is not installed"
        remedy = "install it, or use auto: torch has a packed kernel of its own"
        yield Fault(f"{name}.model_args.attn_implementation", problem, remedy)
    if loads_by_transformers and model.liger and find_spec("liger_kernel") is None:
        yield Fault(f"{name}.model_args.liger", "true, but the package liger-kernel is not installed", "install it, or remove the key")


def _engines_packages(name: str, role: RoleConfig, shape: ModelShape | None) -> Iterator[Fault]:
    """Return the fault of a package that vLLM's code of a hybrid imports, also for the text model only."""
    if shape and shape.delta and vllm_config(role) and find_spec("torchvision") is None:
        problem = "vllm, but its code for Qwen3.5 needs the package torchvision, which is not installed"
        yield Fault(f"{name}.strategy_args.strategy_name", problem, "install the build for this torch, or use hf_infer")


def _without_delta_kernels(config: Config, shapes: Mapping[str, ModelShape]) -> list[str]:
    """Return a note on roles that run a hybrid's layers without kernels for packed sequences, with the remedy."""
    missing = find_spec("fla") is None
    packed = [(name, role) for name, role in model_roles(config).items() if name in shapes and not generates(name, role)]
    hybrids = [(name, role) for name, role in packed if shapes[name].delta and not vllm_config(role)]
    slow = [name for name, role in hybrids if missing or role.device_mapping is None or role.model_args.dtype == "fp32"]
    if not slow:
        return []
    how = "layers by the delta rule run by transformers' own code, each packed sequence in a row of its own"
    remedy = "install flash-linear-attention" if missing else "give the roles devices, and dtype bf16"
    return [f"{', '.join(slow)}: {how}, which is slow; on GPUs, in 16 bits, kernels can take all sequences at once: {remedy}"]


def _files(where: str, columns: DataConfig, found: Found) -> None:
    alone = isinstance(columns.file_name, str)
    names = [columns.file_name] if isinstance(columns.file_name, str) else list(columns.file_name)
    for index, name in enumerate(names):
        path = Path(os.path.expanduser(name))  # leaves an unknown user's name unchanged
        place = where if alone else f"{where}[{index}]"
        if path.exists():
            if not os.access(path, os.R_OK):
                found.faults.append(Fault(place, f"'{name}' cannot be read: permission denied", "change its permissions"))
            elif path.is_file() and not name.endswith(DATA_ENDINGS):
                found.faults.append(Fault(place, f"'{name}' is not a data file", f"give a file that ends in {', '.join(DATA_ENDINGS)}"))
        elif name.endswith(DATA_ENDINGS) or _is_local(name) or not HUB_NAME.fullmatch(name):
            remedy = f"relative paths start at {Path.cwd()}; correct the path or make the file"
            found.missing.append(Fault(place, f"there is no file '{name}'", remedy))


def _keys_of_judges(config: RlvrConfig) -> Iterator[Fault]:
    """Return faults of variables with the keys of judges' URLs."""
    for domain, reward in config.rewards.items():
        name = reward.judge_api_key_env
        if name and name.isidentifier() and not os.environ.get(name):
            problem = f"the environment variable {name} is not set"
            yield Fault(f"rewards.{domain}.judge_api_key_env", problem, f"export {name}=... where the run is started")


def _templates_of_judges(config: RlvrConfig, found: Found) -> None:
    for domain, reward in config.rewards.items():
        name, place = reward.judge_prompt, f"rewards.{domain}.judge_prompt"
        if name is None or not names_file(name):
            continue
        if not Path(name).is_file():
            found.missing.append(Fault(place, f"there is no file '{name}'", "give a text file, or the name of a template"))
        elif "{response}" not in Path(name).read_text(encoding="utf-8", errors="replace"):
            problem = f"'{name}' has no {{response}}: every response would get the same verdict"
            found.faults.append(Fault(place, problem, "put {question}, {response} and {reference} where they belong"))


def _run_folder(config: Config, found: Found) -> None:
    folder = Path(config.output_dir)
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not config.output_dir.strip():
        found.faults.append(Fault("output_dir", "'' names no folder", "give the run folder: ./output/my_run"))
    elif kind := _kernel_folder(nearest):
        problem = f"'{config.output_dir}' cannot be made: {nearest} is the kernel's own ({kind}) and holds no files"
        found.faults.append(Fault("output_dir", problem, "give another folder"))
    elif not nearest.is_dir():
        found.faults.append(Fault("output_dir", f"'{config.output_dir}' is below {nearest}, which is a file", "give another folder"))
    elif not os.access(nearest, os.W_OK | os.X_OK):
        found.faults.append(
            Fault("output_dir", f"'{config.output_dir}' cannot be written: {nearest} is read-only for you", "give another folder")
        )


def _kernel_folder(folder: Path) -> str | None:
    """Return the kind of a file system in which nobody can create files, whatever its permissions. None for all others."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return None
    above = [(mount, kind) for mount, kind in mounts if folder.resolve().is_relative_to(mount)]
    kind = max(above, key=lambda found: len(found[0]), default=("", ""))[1]
    return kind if kind in KERNEL_FILES else None


def _checkpoint(config: Config, found: Found) -> None:
    name = config.resume_from_checkpoint
    if name not in ("auto", "never") and not Path(name).is_dir():
        remedy = "give the folder of a checkpoint (output_dir/checkpoints/step_N), auto, or never"
        found.faults.append(Fault("resume_from_checkpoint", f"there is no folder '{name}'", remedy))
