"""Checks, before a run on several hosts starts, that the hosts have what the run expects of them.

Each host reads models from its own file system, and each rank of a learner writes its part of a checkpoint to its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.config.derived.placement import model_roles
from roll.config.schema.pipelines import Config
from roll.config.schema.roles import LearnerConfig
from roll.errors import ConfigError, Fault
from roll.models.prints import difference, model_print
from roll.ray.group import WorkerGroup
from roll.ray.host_folders import hosts_without
from roll.runs.model_paths import model_path

LOG = logging.getLogger(__name__)


async def check_hosts(config: Config, groups: Mapping[str, WorkerGroup[Any]]) -> None:
    """Check the models on all hosts but the driver's, and warn if a host does not see the run folder. Takes no time if
    there is no other host.

    Raises:
        ConfigError: a model is absent on a host or differs from the driver's.
    """
    faults: list[Fault] = []
    for name, role in model_roles(config).items():
        if name in groups:
            faults += await _model_faults(config, name, model_path(config, role.model_args), groups[name])
    if faults:
        raise ConfigError(*faults)
    folder = Path(config.output_dir).absolute()
    for name, role in model_roles(config).items():
        if isinstance(role, LearnerConfig) and name in groups:
            blind = await hosts_without(groups[name], folder, config.deadlines.start)
            if blind:
                LOG.warning(
                    "'%s' is another folder on host(s) %s: the parts of checkpoints that ranks of %s write there are "
                    "copied to the driver's host, which takes longer than storage that all hosts mount",
                    *(folder, ", ".join(blind), name),
                )


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
