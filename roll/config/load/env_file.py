"""Environment variables of workers: from `system_envs`, and from the `.deepspeed_env` of DeepSpeed's launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from roll.config.derived.fixed_roles import all_partners, api_key_variables
from roll.config.derived.placement import model_roles
from roll.config.schema.foreign_names import VARIABLES_WITHOUT_EFFECT
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.secrets import Secrets
from roll.errors import Fault

NAME = ".deepspeed_env"
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
"""Variables for a worker's place among the others, which cannot have the same value for all workers."""


def env_files() -> list[Path]:
    """Return the possible paths of `.deepspeed_env`. The working directory's, the last, precedes the home folder's."""
    return [Path.home() / NAME, Path.cwd() / NAME]


def read_env_files(files: Sequence[Path]) -> tuple[dict[str, str], list[Fault]]:
    """Return the variables of the existing files, and faults of invalid lines."""
    variables: dict[str, str] = {}
    faults: list[Fault] = []
    for file in dict.fromkeys(files):
        if not file.is_file():
            continue
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            faults.append(Fault(str(file), f"it cannot be read: {error}", "fix it, or move it away", "unreadable"))
            continue
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            name, equals, value = line.removeprefix("export ").partition("=")
            name, where = name.strip(), f"{file}:{number}"
            if not equals or not name.isidentifier():
                faults.append(
                    Fault(
                        where,
                        f"'{line}' sets no variable",
                        "write the line as NAME=VALUE, for example NCCL_IB_DISABLE=1",
                        "malformed",
                    )
                )
            elif name in PLACE:
                faults.append(_of_its_place(where, name))
            else:
                variables[name] = _unquoted(value.strip())
    return variables, faults


def _unquoted(value: str) -> str:
    """Return a value without its quotes. DeepSpeed's launcher passes the value to a shell, which removes them."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def variable_faults(config: Config) -> list[Fault]:
    """Return faults of variable names in `system_envs` that are invalid or must not be set in a configuration."""
    names = [(f"{where}.{name}", name) for where, variables in _sections(config).items() for name in variables]
    faults = [
        Fault(where, f"'{name}' is not a valid variable name", "write NAME: value", "malformed")
        for where, name in names
        if not name.isidentifier()
    ]
    return faults + [_of_its_place(where, name) for where, name in names if name in PLACE]


def _sections(config: Config) -> dict[str, Mapping[str, str]]:
    """Return every block of variables, by its key path."""
    sections: dict[str, Mapping[str, str]] = {"system_envs": config.system_envs}
    sections |= {f"{name}.system_envs": role.system_envs for name, role in model_roles(config).items()}
    if isinstance(config, RlvrConfig):
        sections |= {f"rewards.{name}.system_envs": reward.system_envs for name, reward in config.rewards.items()}
        sections |= {f"environments.{name}.system_envs": one.system_envs for name, one in config.environments.items()}
        partners = {place: one for place, (_, _, one) in all_partners(config).items()}
        sections |= {f"{place}.system_envs": one.system_envs for place, one in partners.items()}
    return sections


def idle_variables(config: Config, file: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable without effect, in `file` (`.deepspeed_env`) or the driver's `environment`."""
    places = [(f"{where}.{name}", name) for where, variables in _sections(config).items() for name in variables]
    places += [(f"{name} in {NAME}", name) for name in file]
    places += [(f"{name} in the environment", name) for name in environment if name not in file]
    return [
        f"{place}: has no effect; {VARIABLES_WITHOUT_EFFECT[name]}"
        for place, name in places
        if name in VARIABLES_WITHOUT_EFFECT
    ]


def secrets_of(config: Config, variables: Mapping[str, str]) -> Secrets:
    """Return the secrets that no file of the run may contain: of the configuration, `variables`, APIs and stores."""
    names = api_key_variables(config).values() if isinstance(config, RlvrConfig) else ()
    keys = [{"api_key": os.environ.get(name, "")} for name in names]
    stores = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "GOOGLE_", "FSSPEC_"))}
    return Secrets.of(config.model_dump(mode="json"), variables, keys, stores)


def _of_its_place(where: str, name: str) -> Fault:
    remedy = "remove it; device_mapping (on the CPU: world_size) sets the devices and the number of workers"
    return Fault(where, f"roll sets {name} for each worker itself", remedy, "not_allowed")
