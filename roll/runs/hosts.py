"""Checks, before a run on several hosts starts, that the hosts have what the run expects of them.

Each host reads models from its own file system, and each rank of a learner writes its part of a checkpoint to its own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.config.derived.placement import model_roles
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import LearnerConfig
from roll.errors import ConfigError, Fault
from roll.models.prints import difference, model_print
from roll.ray.group import WorkerGroup
from roll.runs.role_models import model_path

MARK = ".hosts-"
"""Begin of the name of a file by which a host finds out whether it sees the driver's run folder."""


async def check_hosts(config: Config, groups: Mapping[str, WorkerGroup[Any]]) -> None:
    """Check the models and the run folder on all hosts but the driver's. Takes no time if there is no other.

    Raises:
        ConfigError: a model is absent on a host or differs from the driver's, or a learner's ranks on a host do not see
            the run folder, so that their parts of a checkpoint would be lost.
    """
    faults: list[Fault] = []
    for name, role in model_roles(config).items():
        if name in groups:
            faults += await _model_faults(config, name, model_path(config, role.model_args), groups[name])
    learners = [name for name, role in model_roles(config).items() if isinstance(role, LearnerConfig)]
    seen = {name: groups[name] for name in learners if name in groups}
    if faults := faults + await _folder_faults(config, seen):
        raise ConfigError(*faults)


async def _model_faults(config: Config, name: str, model: str, group: WorkerGroup[Any]) -> list[Fault]:
    elsewhere = await group.ask_hosts(model_print, model, seconds=config.deadlines.start)
    if not elsewhere:
        return []
    own = model_print(model)
    remedy = (
        "copy the folder to the same path on each host, or put it on storage that all hosts mount"
        if Path(model).is_absolute()
        else "give `revision`-pinned files as a folder, or remove the older snapshot from the cache of that host"
    )
    key = f"{name}.model_args.model_name_or_path"
    return [
        Fault(key, f"'{model}' on host {host} {problem}", remedy, "unfit")
        for host, there in elsewhere.items()
        if (problem := difference(own, there))
    ]


async def _folder_faults(config: Config, learners: Mapping[str, WorkerGroup[Any]]) -> list[Fault]:
    mark = Path(config.output_dir).absolute() / f"{MARK}{secrets.token_hex(8)}"
    mark.touch()
    try:
        blind = {
            name: [host for host, sees in answers.items() if not sees]
            for name, group in learners.items()
            if (answers := await group.ask_hosts(os.path.exists, str(mark), seconds=config.deadlines.start))
        }
    finally:
        mark.unlink(missing_ok=True)
    remedy = (
        "put output_dir on storage that these hosts mount at the same path, or place all ranks of the role on the "
        "driver's host"
    )
    return [
        Fault(
            "output_dir",
            f"'{mark.parent}' is another folder on host(s) {', '.join(hosts)}, where ranks of {name} would write their "
            f"parts of a checkpoint, so that no checkpoint would be complete",
            remedy,
            "unfit",
        )
        for name, hosts in blind.items()
        if hosts
    ]
