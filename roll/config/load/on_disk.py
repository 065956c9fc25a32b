"""Checks whether this machine has the models, data, packages, run folder and checkpoint that the configuration names.

The only files that it reads are config.json files, `.deepspeed_env` and the prompt templates of judges. Of a model in a
store it fetches all files but the weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from roll.config.derived.batch import learner, longest_sequence, longest_taught
from roll.config.derived.domains import ENVIRONMENTS, PACKAGES_OF_ENVIRONMENTS, PATHS, environment_of, named_rewards
from roll.config.derived.fixed_roles import api_key_variables, names_file
from roll.config.derived.model_shape import ModelShape, config_file, read_shape
from roll.config.derived.placement import generates, model_roles, started_roles
from roll.config.derived.trackers import argument_faults, missing_packages
from roll.config.load.env_file import NAME, env_files, idle_variables, read_env_files
from roll.config.load.stores import description_fault, output_fault, package_faults
from roll.config.schema.model import DataConfig
from roll.config.schema.offline import OfflineConfig
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.roles import LearnerConfig, RewardModelRole, RoleConfig
from roll.config.shipped import FETCHED, MODELS
from roll.errors import Fault
from roll.stores.address import FETCH, is_address

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
KERNEL_FILES = re.compile("proc|sysfs|cgroup2?|devpts|debugfs|tracefs|securityfs|mqueue|bpf|pstore")
SYSTEM_FOLDERS = re.compile("bin|boot|dev|etc|home|lib|lib64|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var")
"""The top-level folders of the Filesystem Hierarchy Standard 3.0."""
DATA_ENDINGS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")


@dataclass
class DiskFacts:
    """The findings on this machine."""

    faults: list[Fault] = field(default_factory=list)
    missing: list[Fault] = field(default_factory=list)
    """Models, data, packages, templates and API keys that this machine lacks: warnings in a dry run, else faults."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of `.deepspeed_env`."""
    shapes: dict[str, ModelShape] = field(default_factory=dict)
    """Shapes by role, for models whose config.json is available."""


def check_disk(config: Config) -> DiskFacts:
    """Check every path and every optional package of a configuration against this machine."""
    found = DiskFacts()
    found.missing += package_faults(config)
    _models(config, found)
    for role_name, role in model_roles(config).items():
        found.missing += _packages(role_name, role)
    found.warnings += _without_flash(config)
    found.notes += _without_delta_kernels(config, found.shapes)
    name, role = learner(config)
    replayed = config.replay_from if isinstance(config, RlvrConfig) else None
    if role.data_args and replayed is None:
        _files(f"{name}.data_args.file_name", role.data_args, found)
    for place, held_out in held_out_data(config).items() if replayed is None else ():
        _files(f"{place}.data_args.file_name", held_out, found)
    if replayed is not None and not Path(replayed).is_dir():
        remedy = FETCH.format(address=replayed) if is_address(replayed) else "give the folder of a run"
        found.missing.append(Fault("replay_from", f"there is no folder '{replayed}'", remedy, "not_found"))
    if isinstance(config, RlvrConfig) and replayed is None:
        found.missing += _api_keys(config)
        found.missing += _packages_of_rewards(config)
        found.missing += _packages_of_environments(config)
        found.missing += _images(config)
        _templates_of_judges(config, found)
    _run_folder(config, found)
    _checkpoint(config, found)
    found.missing += missing_packages(config)
    found.faults += argument_faults(config)
    found.environment, faults = read_env_files(env_files())
    found.faults += faults
    found.warnings += idle_variables(config, found.environment, os.environ)
    if found.environment:
        found.notes.append(
            f"every worker gets {', '.join(found.environment)} from {NAME}; system_envs takes precedence over it"
        )
    return found


def held_out_data(config: Config) -> dict[str, DataConfig]:
    """Return the `data_args` of every held-out set, by the key path of the block that contains them."""
    if isinstance(config, RlvrConfig):
        sets = config.validation.named_sets() if config.validation else {}
        places = config.validation.places() if config.validation else {}
        return {place: rows for name, place in places.items() if (rows := sets[name].data_args)}
    return {"validation": config.validation.data_args} if config.validation and config.validation.data_args else {}


TAUGHT_LENGTH = "self_distillation.prompt_length"


def _models(config: Config, found: DiskFacts) -> None:
    seen: dict[tuple[str, bool | None], ModelShape | None] = {}
    limit = "max_length" if isinstance(config, OfflineConfig) and config.max_length else "response_length"
    most = longest_sequence(config)
    if (taught := longest_taught(config)) > most:
        most, limit = taught, TAUGHT_LENGTH
    for role_name, role in started_roles(config).items():
        own = role.model_args.model_name_or_path
        model, where = (own, f"{role_name}.model_args.model_name_or_path") if own else (config.pretrain, "pretrain")
        key = model, role.model_args.sees_pictures
        if key not in seen:
            # A reward model has its own tokenizer, and does not score texts that are too long for it.
            longest = 0 if isinstance(role, RewardModelRole) else most
            seen[key] = _model(*key, where, longest, limit, found)
        shape = seen[key]
        if shape:
            found.shapes[role_name] = shape


def _model(model: str, asked: bool | None, where: str, longest: int, limit: str, found: DiskFacts) -> ModelShape | None:
    if is_address(model) and (fault := description_fault(where, model)) is not None:
        found.missing.append(fault)
    file = config_file(model)
    if file is None and is_address(model):
        return None
    if file is None:
        remedy = fetch_command(model)
        if remedy or _is_local(model) or not HUB_NAME.fullmatch(model):
            remedy = remedy or "set it to a folder with a config.json, or to a Hub name such as Qwen/Qwen2.5-7B"
            found.missing.append(Fault(where, f"there is no folder '{model}'", remedy, "not_found"))
        else:
            found.notes.append(
                f"{where}: '{model}' is read as a Hub name; it is not in the local cache, so its memory is not "
                f"estimated"
            )
        return None
    if not file.is_file():
        found.faults.append(
            Fault(where, f"'{model}' contains no config.json", "set it to the folder of a saved model", "not_found")
        )
        return None
    try:
        shape = read_shape(file, asked)
    except ValueError as error:
        found.faults.append(
            Fault(where, f"{file} cannot be read: {error}", "save the model again, or use another folder", "unreadable")
        )
        return None
    if shape is None:
        found.notes.append(
            f"{where}: roll cannot compute the size of '{model}' from its config.json, so its memory is not estimated"
        )
    elif shape.max_position_embeddings and longest > shape.max_position_embeddings:
        problem = f"sequences have up to {longest} tokens, but '{model}' has {shape.max_position_embeddings} positions"
        own = {"max_length": "max_length", TAUGHT_LENGTH: f"{TAUGHT_LENGTH} + response_length"}
        keys = own.get(limit, "prompt_length + response_length, and sequence_length,")
        remedy = f"keep {keys} within {shape.max_position_embeddings}"
        found.faults.append(Fault(limit, problem, remedy, "too_large"))
    return shape


def fetch_command(folder: str) -> str:
    """Return the remedy for a missing folder of a model that `roll.models.fetch` writes; "" for any other name."""
    *_, above, name = ("", *Path(folder).parts)
    if name not in FETCHED or not (above == MODELS or _is_local(folder)):
        return ""
    elsewhere = "" if folder == f"{MODELS}/{name}" else f" --output {folder}"
    return f"fetch it first: python -m roll.models.fetch {name}{elsewhere}"


def _is_local(name: str) -> bool:
    """Return whether a name that does not exist looks like a local path."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def _packages(name: str, role: RoleConfig) -> Iterator[Fault]:
    """Yield faults of missing optional packages. Does not import them, because that would import torch."""
    model, loads_by_transformers = role.model_args, not role.strategy_args.traits.own_kernels
    if loads_by_transformers and model.liger and find_spec("liger_kernel") is None:
        yield Fault(
            f"{name}.model_args.liger",
            "true, but the package liger-kernel is not installed",
            "install it, or remove the key",
            "not_installed",
        )

    if (kind := model.quantized_base) and isinstance(role, LearnerConfig) and find_spec("bitsandbytes") is None:
        problem = f"{kind}, but the package bitsandbytes is not installed"
        remedy = "install it (pip install 'roll[bitsandbytes]'), or remove the key"
        yield Fault(f"{name}.model_args.quantized_base", problem, remedy, "not_installed")


def _packages_of_rewards(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of rewards whose optional package is missing."""
    if find_spec("reasoning_gym") is None:
        for place, name in named_rewards(config.rewards).items():
            if name == "reasoning_gym":
                remedy = "python -m pip install 'reasoning-gym~=0.1.25'"
                yield Fault(
                    place, "the package reasoning-gym, whose verifiers judge, is missing", remedy, "not_installed"
                )


def _packages_of_environments(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of environments whose optional package is missing."""
    for domain, section in config.environments.items():
        module, requirement = PACKAGES_OF_ENVIRONMENTS.get(environment_of(domain, section), ("", ""))
        if module and find_spec(module) is None:
            place = f"{ENVIRONMENTS}{domain}" + (".environment" if section.environment is not None else "")
            problem = f"the package {module}, whose environments it plays, is missing"
            yield Fault(place, problem, f"python -m pip install '{requirement}'", "not_installed")


def _images(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of images that are paths, at which there is nothing."""
    for domain, section in config.environments.items():
        if section.image and section.image.startswith(PATHS) and not Path(section.image).expanduser().exists():
            remedy = f"correct the path, or make the image; relative paths start at {Path.cwd()}"
            problem = f"there is no file or folder '{section.image}'"
            yield Fault(f"{ENVIRONMENTS}{domain}.image", problem, remedy, "not_found")


def _without_flash(config: Config) -> list[str]:
    """Return a warning about the roles that cannot use flash-attn's kernel, which they ask for; nothing without any."""
    roles = {name: role for name, role in model_roles(config).items() if not generates(name, role)}
    asking = {name: role for name, role in roles.items() if role.model_args.attn_implementation == "fa2"}
    missing = find_spec("flash_attn") is None
    without = [name for name, role in asking.items() if missing or role.device_mapping is None]
    if not without:
        return []
    why = "the package flash-attn is not installed" if missing else "flash-attn has no kernel for the CPU"
    return [f"{', '.join(without)}: model_args.attn_implementation: fa2 is read as auto, torch's kernel, because {why}"]


def _without_delta_kernels(config: Config, shapes: Mapping[str, ModelShape]) -> list[str]:
    """Return a note on the roles that run a hybrid without kernels for packed sequences; nothing without any."""
    missing = find_spec("fla") is None
    packed = [
        (name, role) for name, role in model_roles(config).items() if name in shapes and not generates(name, role)
    ]
    hybrids = [(name, role) for name, role in packed if shapes[name].delta]
    slow = [name for name, role in hybrids if missing or role.device_mapping is None or role.model_args.dtype == "fp32"]
    if not slow:
        return []
    how = "transformers runs the gated-delta layers without a kernel, with each packed sequence in a separate row"
    remedy = "install flash-linear-attention" if missing else "set device_mapping, and dtype bf16"
    return [
        f"{', '.join(slow)}: {how}, which is slow; to use the kernel for packed sequences on GPUs in 16 bits, {remedy}"
    ]


def _files(where: str, columns: DataConfig, found: DiskFacts) -> None:
    alone = isinstance(columns.file_name, str)
    names = [columns.file_name] if isinstance(columns.file_name, str) else list(columns.file_name)
    for index, name in enumerate(names):
        path = Path(os.path.expanduser(name))  # leaves an unknown user's name unchanged
        place = where if alone else f"{where}[{index}]"
        if path.exists():
            if not os.access(path, os.R_OK):
                found.faults.append(
                    Fault(place, f"'{name}' cannot be read: permission denied", "change its permissions", "unreadable")
                )
            elif path.is_file() and not name.lower().endswith(DATA_ENDINGS):
                found.faults.append(
                    Fault(
                        place,
                        f"'{name}' is not a data file",
                        f"use a file that ends in {', '.join(DATA_ENDINGS)}",
                        "not_supported",
                    )
                )
        elif name.lower().endswith(DATA_ENDINGS) or _is_local(name) or not HUB_NAME.fullmatch(name):
            remedy = f"correct the path, or create the file; relative paths start at {Path.cwd()}"
            found.missing.append(Fault(place, f"there is no file '{name}'", remedy, "not_found"))


def _api_keys(config: RlvrConfig) -> Iterator[Fault]:
    """Yield faults of missing environment variables that should hold the API keys of judges and partners."""
    for place, name in api_key_variables(config).items():
        if name.isidentifier() and not os.environ.get(name):
            problem = f"the environment variable {name} is not set"
            yield Fault(place, problem, f"export {name}=... in the shell that starts the run", "missing")


def _templates_of_judges(config: RlvrConfig, found: DiskFacts) -> None:
    for domain, reward in config.rewards.items():
        name, place = reward.judge_prompt, f"rewards.{domain}.judge_prompt"
        if name is None or not names_file(name):
            continue
        if not Path(name).is_file():
            found.missing.append(
                Fault(
                    place,
                    f"there is no file '{name}'",
                    "set it to a text file, or to the name of a template",
                    "not_found",
                )
            )
        elif "{response}" not in Path(name).read_text(encoding="utf-8", errors="replace"):
            problem = f"'{name}' does not contain {{response}}, so the judge would not see the response"
            found.faults.append(
                Fault(
                    place,
                    problem,
                    "add {response}, and {question} and {reference} if the judge needs them",
                    "malformed",
                )
            )


def _run_folder(config: Config, found: DiskFacts) -> None:
    folder = Path(config.output_dir)
    nearest = folder.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if (fault := output_fault(config)) is not None:
        found.faults.append(fault)
    if not config.output_dir.strip():
        found.faults.append(
            Fault("output_dir", "'' names no folder", "set it to the run folder, for example ./output/my_run", "empty")
        )
    elif place := _whose(folder.resolve()):
        problem = f"'{config.output_dir}' is {place}, whose files a run would be mixed with"
        found.faults.append(Fault("output_dir", problem, "use a folder of its own, as ./output/my_run", "not_allowed"))
    elif kind := _kernel_folder(nearest):
        problem = (
            f"'{config.output_dir}' cannot be created: {nearest} is a file system of the kernel ({kind}), which "
            f"stores no files"
        )
        found.faults.append(Fault("output_dir", problem, "use another folder", "not_writable"))
    elif not nearest.is_dir():
        found.faults.append(
            Fault(
                "output_dir",
                f"'{config.output_dir}' is below {nearest}, which is a file",
                "use another folder",
                "not_writable",
            )
        )
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"'{config.output_dir}' cannot be written: you have no write permission for {nearest}"
        found.faults.append(Fault("output_dir", problem, "use another folder", "not_writable"))


def _whose(folder: Path) -> str:
    """Return what an existing folder is, if it is not one that a run may have for itself; else an empty text."""
    here, home = Path.cwd(), Path(os.path.expanduser("~"))
    if folder in (here, *here.parents):
        return "the working directory" if folder == here else "above the working directory"
    if folder in (home, *home.parents) or folder.parent == Path("/home"):
        return "a home directory, or above one"
    if folder.parent == Path("/") and SYSTEM_FOLDERS.fullmatch(folder.name):
        return "a folder of the system"
    if repository := next((name for name in (".git", ".hg", ".svn") if (folder / name).exists()), None):
        return f"the root of a repository (it has {repository})"
    return ""


def _kernel_folder(folder: Path) -> str | None:
    """Return the type of a folder's file system if it stores no files, as `proc` does; else None."""
    try:
        mounts = [
            line.split()[1:3]
            for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
        ]
    except OSError:
        return None
    above = [(mount, kind) for mount, kind in mounts if folder.resolve().is_relative_to(mount)]
    kind = max(above, key=lambda found: len(found[0]), default=("", ""))[1]
    return kind if KERNEL_FILES.fullmatch(kind) else None


def _checkpoint(config: Config, found: DiskFacts) -> None:
    name = config.resume_from_checkpoint
    if name not in ("auto", "never") and not Path(name).is_dir():
        remedy = "set it to the folder of a checkpoint (output_dir/checkpoints/step_N), to auto, or to never"
        if is_address(name):
            remedy += f"; {FETCH.format(address=name)}"
        found.faults.append(Fault("resume_from_checkpoint", f"there is no folder '{name}'", remedy, "not_found"))
