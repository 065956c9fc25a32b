"""Environment variables of workers: from `.deepspeed_env`, in the places of DeepSpeed's launcher, and from `system_envs`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from roll.config.derived.placement import model_roles
from roll.config.schema.pipelines import Config
from roll.config.schema.rlvr import RlvrConfig
from roll.config.schema.secrets import Secrets
from roll.errors import Fault

NAME = ".deepspeed_env"
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
"""Variables of a worker's own place, which cannot have one value for all workers."""

RENDEZVOUS = "each role has an address and a port of its own, which its first worker finds"
COLLECTIVE = "deadlines.collective says how long a collective operation may take, and a wait that is longer ends in an error"
WITHOUT_EFFECT: Mapping[str, str] = {
    "MASTER_ADDR": RENDEZVOUS,
    "MASTER_PORT": RENDEZVOUS,
    "NODE_RANK": "device_mapping and num_gpus_per_node say what is on which node",
    "NCCL_TIMEOUT": COLLECTIVE,
    "TORCH_NCCL_TIMEOUT": COLLECTIVE,
}
"""Variables for other programs that roll does not read, with their replacements."""


def env_files() -> list[Path]:
    """Return possible paths, the home folder first. A variable in the working directory's file takes precedence."""
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
            faults.append(Fault(str(file), f"it cannot be read: {error}", "mend it, or move it away"))
            continue
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            name, equals, value = line.removeprefix("export ").partition("=")
            name, where = name.strip(), f"{file}:{number}"
            if not equals or not name.isidentifier():
                faults.append(Fault(where, f"'{line}' sets no variable", "write a line as NCCL_IB_DISABLE=1"))
            elif name in PLACE:
                faults.append(_of_its_place(where, name))
            else:
                variables[name] = _unquoted(value.strip())
    return variables, faults


def _unquoted(value: str) -> str:
    """Remove quotes from a value. DeepSpeed's launcher passes it to a shell, which does so."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value


def environment_faults(config: Config) -> list[Fault]:
    """Return faults of names in `system_envs` that are invalid or must not be set in a configuration."""
    names = [(f"{where}.{name}", name) for where, variables in _sections(config).items() for name in variables]
    faults = [
        Fault(where, f"'{name}' is not a valid variable name", "write NAME: value") for where, name in names if not name.isidentifier()
    ]
    return faults + [_of_its_place(where, name) for where, name in names if name in PLACE]


def _sections(config: Config) -> dict[str, Mapping[str, str]]:
    """Return every block of variables by its place."""
    sections: dict[str, Mapping[str, str]] = {"system_envs": config.system_envs}
    sections |= {f"{name}.system_envs": role.system_envs for name, role in model_roles(config).items()}
    if isinstance(config, RlvrConfig):
        sections |= {f"rewards.{name}.system_envs": reward.system_envs for name, reward in config.rewards.items()}
        sections |= {f"environments.{name}.system_envs": one.system_envs for name, one in config.environments.items()}
    return sections


def idle_variables(config: Config, file: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that is set but not read.

    Args:
        file: The variables of `.deepspeed_env`.
        environment: The driver's own.
    """
    places = [(f"{where}.{name}", name) for where, variables in _sections(config).items() for name in variables]
    places += [(f"{name} in {NAME}", name) for name in file]
    places += [(f"{name} in the environment", name) for name in environment if name not in file]
    return [f"{place}: without effect; {WITHOUT_EFFECT[name]}" for place, name in places if name in WITHOUT_EFFECT]


def secrets_of(config: Config, variables: Mapping[str, str]) -> Secrets:
    """Return the secrets of the configuration, of `.deepspeed_env` and of judges' URLs, which no file of the run may contain."""
    rewards = config.rewards.values() if isinstance(config, RlvrConfig) else ()
    judges = [{"api_key": os.environ.get(reward.judge_api_key_env, "")} for reward in rewards if reward.judge_api_key_env]
    return Secrets.of(config.model_dump(mode="json"), variables, judges)


def _of_its_place(where: str, name: str) -> Fault:
    remedy = "remove it; device_mapping (on the CPU: world_size) says which devices and how many workers"
    return Fault(where, f"{name} tells a worker its place among the others", remedy)
